"""Run counts: how many runs of this worker found their key held, and how many were sent back in an outage."""

from __future__ import annotations

import logging
import threading
import time

from celery_redislock.errors import LockConflict
from celery_redislock.policy import Ended

logger = logging.getLogger(__name__)

#: Minimum seconds between two reminders.
EVERY = 60.0
#: A run that is sent back more than this many seconds after the previous one belongs to another outage.
OTHER_OUTAGE_AFTER = 600.0


class Conflicts:
    """Counts the runs that a conflict has ended since the worker started. A message that waits twice counts twice."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = threading.Lock()  # in a thread pool, several threads count

    def ended_by(self, error: object) -> None:
        """Count a run that ended with `error`, if the error means a conflict."""
        if isinstance(error, LockConflict) or (isinstance(error, Ended) and error.verdict.reason.is_conflict):
            with self._counting:
                self.count += 1


CONFLICTS = Conflicts()


class Reminder:
    """Counts the runs that a worker's children send back in an outage, and logs a reminder once a minute.

    Each child logs only when an outage begins and ends. Counting a run logs the reminder if one is due, so this needs
    no thread: as long as no runs are sent back, no reminder is due.
    """

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._count = 0
        self._since = self._last = 0.0

    def count(self) -> None:
        """Count a run that was sent back because the lock server could not be reached."""
        now = time.monotonic()
        with self._counting:
            if not self._count or now - self._last > OTHER_OUTAGE_AFTER:
                self._count, self._since = 0, now
            self._count, self._last = self._count + 1, now
            count, seconds = self._count, now - self._since
            if seconds < EVERY:
                return
            self._count = 0
        logger.warning(
            "runs were sent back %d times in the last %.0f s: the lock server cannot be asked; they run once it can",
            *(count, seconds),
        )
