"""The errors of celery-redislock. All share one base class, and keep their details in attributes.

The ``args`` of an error are its constructor's arguments, so that pickle and Celery's result backends can rebuild it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery.exceptions import ImproperlyConfigured
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

from .info import LONGEST, LockInfo, shown


def describe(error: BaseException) -> str:
    """An error from redis-py or the broker in one line: its type and message, without a period at the end."""
    return shown(f"{type(error).__name__}: {error}", LONGEST).rstrip(".")


class RedisLockError(Exception):
    """Base class of all errors of celery-redislock."""

    # Celery logs this text and sends it in events. The `__repr__` of redis-py 8's errors leaves out the message.
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class LockConflict(RedisLockError, LockError):
    """Another execution holds the key.

    Args:
        key: The key in Redis.
        holder: Who holds the key, as a `LockInfo` or its `plain` values; None if unknown.
    """

    def __init__(self, key: str, holder: LockInfo | Sequence[Any] | None = None) -> None:
        self.key = key
        self.holder = LockInfo.of(holder) if holder else None
        super().__init__(str(self), self.key)
        self.args = (self.key, self.holder and self.holder.plain)

    @property
    def holders(self) -> tuple[LockInfo, ...]:
        """All holders of the key: one, unless the lock has a limit; none if they are unknown."""
        return self.holder.holders if self.holder else ()

    def __str__(self) -> str:
        held = f"held by {self.holder.who}" if self.holder else "already held"
        return f"the lock {shown(self.key, LONGEST)} is {held}"


class LockLost(RedisLockError, LockNotOwnedError):
    """The lease ended, or the key was deleted or taken, before the holder released it.

    Args:
        key: The key in Redis.
        reason: How the loss was noticed, in words.
    """

    def __init__(self, key: str, reason: str = "its lease has ended") -> None:
        self.key = key
        self.reason = reason
        super().__init__(str(self), self.key)
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return (
            f"the lock {shown(self.key, LONGEST)} is lost: {shown(self.reason, LONGEST)}; another run may have started"
        )


class LockUnavailable(RedisLockError, RedisConnectionError):
    """Redis did not answer or refused the command.

    Args:
        key: The key in Redis.
        reason: redis-py's error, in words.
    """

    def __init__(self, key: str, reason: str = "Redis did not answer") -> None:
        self.key = key
        self.reason = reason
        super().__init__(str(self))
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return f"the lock server is unavailable for lock {shown(self.key, LONGEST)}: {shown(self.reason, LONGEST)}"


class LockKeyError(RedisLockError, ValueError):
    """The arguments of a call cannot be made into a key. The message names the task, the parameter and the remedy."""


class LockConfigError(RedisLockError, ImproperlyConfigured):
    """A task option or a setting is wrong. The message names it, its value and what is allowed."""
