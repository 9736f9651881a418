"""Redis locks for Celery tasks: equal calls of a task never run at the same time."""

from celery.signals import worker_init

from .celery_port import hide_setting
from .errors import (
    LockConfigError,
    LockConflict,
    LockInfo,
    LockKeyError,
    LockLost,
    LockReplaced,
    LockUnavailable,
    RedisLockError,
)
from .lock.lock import Lock
from .locked import Locked, locked
from .options import Also
from .task.decorator import locked_task
from .task.locked_task import LockedTask
from .task.publish import LockedResult

__all__ = [
    "Also",
    "Lock",
    "LockConfigError",
    "LockConflict",
    "LockInfo",
    "LockKeyError",
    "LockLost",
    "LockReplaced",
    "LockUnavailable",
    "Locked",
    "LockedResult",
    "LockedTask",
    "RedisLockError",
    "locked",
    "locked_task",
]


# Only workers import `worker/`: it imports Celery's own worker, which a publisher does without.


def _begin_worker(**about: object) -> None:
    from .worker import start

    start.begin(**about)


def _request_class(task: str, request: object) -> object:
    from .worker.request import locked_request

    return locked_request(task, request)


hide_setting("redislock_url")  # it may hold a password
worker_init.connect(_begin_worker, weak=False)
LockedTask.request_class = staticmethod(_request_class)
