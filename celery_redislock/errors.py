"""The errors of celery-redislock: one base, data as attributes.

Each is rebuilt from its ``args``, so that it survives pickle and Celery's result backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery.exceptions import ImproperlyConfigured
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

from .info import LockInfo

__all__ = [
    "LockConfigError",
    "LockConflict",
    "LockKeyError",
    "LockLost",
    "LockUnavailable",
    "RedisLockError",
]


def describe(error: BaseException) -> str:
    """An error of redis-py or of the broker in words, for the midst of a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(".")


class RedisLockError(Exception):
    """Base of all errors of celery-redislock."""

    def __repr__(self) -> str:  # that of redis-py 8 shows no message, and this is what Celery logs and sends as events
        return f"{type(self).__name__}({str(self)!r})"


class LockConflict(RedisLockError, LockError):
    """Another execution holds the key.

    Args:
        key: The key in Redis.
        holder: Who holds it, as `LockInfo` or its `plain` values; None if unknown.
    """

    def __init__(self, key: str, holder: LockInfo | Sequence[Any] | None = None) -> None:
        self.key = key
        self.holder = LockInfo.of(holder) if holder else None
        super().__init__(str(self), key)
        self.args = (key, self.holder and self.holder.plain)

    def __str__(self) -> str:
        who = self.holder.who if self.holder else "somebody else"
        return f"the lock {self.key} is held by {who}"


class LockLost(RedisLockError, LockNotOwnedError):
    """The holder's lease ended, or its key was deleted or taken, before it released the key.

    Args:
        key: The key in Redis.
        reason: What was seen, for people.
    """

    def __init__(self, key: str, reason: str = "its lease has ended") -> None:
        self.key = key
        self.reason = reason
        super().__init__(str(self), key)
        self.args = (key, reason)

    def __str__(self) -> str:
        return f"the lock {self.key} is lost: {self.reason}; another run may have started"


class LockUnavailable(RedisLockError, RedisConnectionError):
    """Redis could not be asked: it did not answer, or it refused.

    Args:
        key: The key in Redis.
        reason: The client's error, for people.
    """

    def __init__(self, key: str, reason: str = "Redis did not answer") -> None:
        self.key = key
        self.reason = reason
        super().__init__(str(self))
        self.args = (key, reason)

    def __str__(self) -> str:
        return f"the lock {self.key} cannot be asked for: {self.reason}"


class LockKeyError(RedisLockError, ValueError):
    """These arguments cannot make a key. The message names the task, the parameter and the remedy."""


class LockConfigError(RedisLockError, ImproperlyConfigured):
    """A task option or a setting is wrong. The message names it, its value and what is allowed."""
