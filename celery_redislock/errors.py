"""The errors of celery-redislock. All have one base, and carry what they say as attributes too.

The ``args`` of each are the arguments that make it, so that pickle and Celery's result backends can rebuild it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery.exceptions import ImproperlyConfigured
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

from .info import LONGEST, LockInfo, shown


def describe(error: BaseException) -> str:
    """An error of redis-py's or the broker's in one line: its type and message, without the full stop at the end."""
    return shown(f"{type(error).__name__}: {error}", LONGEST).rstrip(".")


class RedisLockError(Exception):
    """Base of all errors of celery-redislock."""

    # Celery logs this text and sends it in events. The `__repr__` of redis-py 8's errors shows no message.
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class LockConflict(RedisLockError, LockError):
    """Another execution holds the key.

    Args:
        key: The key in Redis.
        holder: Who holds the key, as `LockInfo` or its `plain` values; None if that is not known.
    """

    def __init__(self, key: str, holder: LockInfo | Sequence[Any] | None = None) -> None:
        self.key = str(key)
        self.holder = LockInfo.of(holder) if holder else None
        super().__init__(str(self), self.key)
        self.args = (self.key, self.holder and self.holder.plain)

    @property
    def holders(self) -> tuple[LockInfo, ...]:
        """All who hold the key: one, unless the lock has a limit; none where that is not known."""
        return self.holder.holders if self.holder else ()

    def __str__(self) -> str:
        who = self.holder.who if self.holder else "somebody else"
        return f"the lock {shown(self.key, LONGEST)} is held by {who}"


class LockLost(RedisLockError, LockNotOwnedError):
    """The holder's lease ended, or its key was deleted or taken, before it released the key.

    Args:
        key: The key in Redis.
        reason: How the loss was noticed, in words.
    """

    def __init__(self, key: str, reason: str = "its lease has ended") -> None:
        self.key = str(key)
        self.reason = reason
        super().__init__(str(self), self.key)
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return (
            f"the lock {shown(self.key, LONGEST)} is lost: {shown(self.reason, LONGEST)}; another run may have started"
        )


class LockUnavailable(RedisLockError, RedisConnectionError):
    """Redis could not be asked: it did not answer, or it refused.

    Args:
        key: The key in Redis.
        reason: The error of redis-py, in words.
    """

    def __init__(self, key: str, reason: str = "Redis did not answer") -> None:
        self.key = str(key)
        self.reason = reason
        super().__init__(str(self))
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return f"the lock {shown(self.key, LONGEST)} cannot be asked for: {shown(self.reason, LONGEST)}"


class LockKeyError(RedisLockError, ValueError):
    """No key can be made of the arguments of a call. The message names the task, the parameter and the remedy."""


class LockConfigError(RedisLockError, ImproperlyConfigured):
    """A task option or a setting is wrong. The message names that option, its value and what is allowed."""
