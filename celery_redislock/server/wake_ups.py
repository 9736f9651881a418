"""WakeUps: where a waiter blocks until a release wakes it, on connections that no other command uses."""

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

#: A waiter asks for the key again after so many seconds at most: the waiter that a release woke may have died.
TURN = 1.0
#: So many waiters of one process block on the server, each on a connection; any others poll.
MAX_WAITERS = 200
#: The shortest time-out in seconds: the server may read a shorter one as 0, which stands for "no time-out".
_SHORTEST = 0.01


class WakeUps(Lines):
    """Blocks waiters on a lock's list, to which the lock's release pushes one wake-up.

    Args:
        client: A client whose socket time-out is longer than `TURN`. Where it has no connection free, waiters poll.
    """

    def wait(self, key: str, timeout: float, poll: float) -> None:
        """Block until `key` should be asked for again.

        Args:
            key: The key in Redis.
            timeout: Seconds to block at most; more than `TURN` counts as `TURN`.
            poll: Seconds to sleep at most where the server cannot wake the waiter.
        """
        turn = max(_SHORTEST, min(timeout, TURN))
        try:
            self._on_line(_block, keys_of(key).wake, f"{turn:.3f}")
        except RedisError as error:  # an outage, which the next acquire reports; or the user may not send BLPOP
            logger.debug("a release cannot wake a waiter of %s: %s", key, describe(error))
            time.sleep(min(turn, poll))


def _block(client: redis.Redis, wake: str, seconds: str) -> object:
    execute: Callable[..., object] = client.execute_command
    return execute("BLPOP", wake, seconds)
