"""Outage: one log line when a server cannot be asked any more, and one when it can again."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import RedisError

from .errors import describe
from .script import ACQUIRE, Script

logger = logging.getLogger(__name__)


class Outage:
    """Says once when a server cannot be asked any more, and once when it can again."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._failing: Script | None = None
        self._changing = threading.Lock()

    def begin(self, script: Script, error: RedisError) -> None:
        """A command failed, and so did its second try."""
        with self._changing:
            if self.since is None:
                self.since, self._failing = time.monotonic(), script
                logger.warning(
                    "the lock server cannot be asked: %s; until it can, runs go by their lock_on_outage and held locks "
                    "live until their deadline",
                    describe(error),
                )

    def end(self, script: Script) -> None:
        """A command was answered. A server that refuses to write may still answer others."""
        with self._changing:
            if self.since is not None and script in {self._failing, ACQUIRE}:
                logger.warning("the lock server answers again, after %.1f s", time.monotonic() - self.since)
                self.since = None
