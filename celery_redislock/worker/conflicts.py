"""Conflicts: how many runs of this worker have found their key held."""

from __future__ import annotations

import threading

from celery_redislock.errors import LockConflict
from celery_redislock.task.endings import CameBack, CameBackInOutage, Skipped


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
