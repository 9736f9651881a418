"""WakeUps: where a waiter blocks until a release wakes it, on connections that nobody else needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import redis
from redis.exceptions import RedisError

from celery_redislock.errors import describe

from .lines import Lines
from .names import keys_of

logger = logging.getLogger(__name__)

#: A waiter looks again after so many seconds at most: a wake-up may be lost with the waiter that it woke.
TURN = 1.0
#: More waiters of one process poll: each that blocks on the server needs a connection.
MAX_WAITERS = 200
#: The server takes a shorter one for none, which is for ever.
_SHORTEST = 0.01


class WakeUps(Lines):
    """Blocks on the list of a lock; its release wakes one waiter.

    Args:
        client: Its socket time-out is longer than `TURN`. Where it has no connection left, waiters poll.
    """

    def wait(self, key: str, timeout: float, poll: float) -> None:
        """Return when the lock `key` should be asked for again.

        Args:
            key: The key in Redis.
            timeout: Seconds; `TURN` at most.
            poll: Seconds between two looks where the server cannot wake.
        """
        turn = max(_SHORTEST, min(timeout, TURN))
        try:
            self._on_line(_block, keys_of(key).wake, f"{turn:.3f}")
        except RedisError as error:  # an outage shows at the next look; a user without this command polls
            logger.debug("a release cannot wake a waiter of %s: %s", key, describe(error))
            time.sleep(min(turn, poll))


def _block(client: redis.Redis, wake: str, seconds: str) -> object:
    execute: Callable[..., object] = client.execute_command
    return execute("BLPOP", wake, seconds)
