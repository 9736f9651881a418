"""Celery tasks that never run twice at once: a Redis lock per task and arguments."""

from . import bootsteps, masking  # noqa: F401 - bootsteps connects what a worker does at its start
from .errors import (
    LockConfigError,
    LockConflict,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
)
from .info import LockInfo
from .locked import locked
from .locks import Lock
from .result import LockedResult
from .task import LockedTask

__all__ = [
    "Lock",
    "LockConfigError",
    "LockConflict",
    "LockInfo",
    "LockKeyError",
    "LockLost",
    "LockUnavailable",
    "LockedResult",
    "LockedTask",
    "RedisLockError",
    "locked",
]

masking.hide_url()
