"""Celery tasks that never run twice at once: a Redis lock per task and arguments."""

from .celery_port import hide_setting
from .errors import (
    LockConfigError,
    LockConflict,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
)
from .info import LockInfo
from .lock.lock import Lock
from .locked import Locked, locked
from .task import run_hooks
from .task.locked_task import LockedTask
from .task.publish import LockedResult
from .worker import start

__all__ = [
    "Lock",
    "LockConfigError",
    "LockConflict",
    "LockInfo",
    "LockKeyError",
    "LockLost",
    "LockUnavailable",
    "Locked",
    "LockedResult",
    "LockedTask",
    "RedisLockError",
    "locked",
]

hide_setting("redislock_url")  # it may hold a password
run_hooks.connect()
start.connect()
