"""Conflicts: how many runs of this worker have found their key held."""

from __future__ import annotations

import logging
import threading
import time

from celery_redislock.errors import LockConflict
from celery_redislock.task.ended_early import CameBack, CameBackInOutage, Skipped


class Conflicts:
    """Counts them, from the worker's start on. A message that waits twice counts twice."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = threading.Lock()  # in a pool of threads, each of them counts

    def ended_by(self, error: object) -> None:
        """Count a run that has ended with `error`, if a conflict has ended it."""
        if isinstance(error, Skipped | CameBack | LockConflict) and not isinstance(error, CameBackInOutage):
            with self._counting:
                self.count += 1


CONFLICTS = Conflicts()


logger = logging.getLogger(__name__)

#: Seconds between two reminders at least.
EVERY = 60.0
#: A run that is sent back so many seconds after the last one, or later, belongs to another outage.
OTHER_OUTAGE_AFTER = 600.0


class Reminder:
    """Counts the runs that all children of a worker send back. Each child itself logs only an outage's begin and end.

    The reminder is logged while a run is counted, so it needs no thread: where no run is sent back, none is due.
    """

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._count = 0
        self._since = self._last = 0.0

    def count(self) -> None:
        """Count a run that was sent back because the lock server could not be asked."""
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
