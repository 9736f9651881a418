"""Renewals at a test's bidding: a test that waits for the next one goes by time."""

from __future__ import annotations

from typing import Any

from celery_redislock import Lock
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.lock_server import LockServer
from tests.lab.servers import wait_until


def held_by(lock: Lock) -> HeldLock:
    """What `lock` holds, with its deadline."""
    held: Any = lock.local.entries and lock.local.entries[-1].held
    return held


def begin_renewal(lock: Lock) -> None:
    """Let the keeper renew `lock` now."""
    held_by(lock).renew_at = 0
    LockServer.behind(lock.redis).keeper.add(held_by(lock))


def renew(lock: Lock) -> None:
    """Wait until the keeper has renewed `lock`."""
    deadline = held_by(lock).deadline
    begin_renewal(lock)
    wait_until(lambda: held_by(lock).deadline > deadline, "it is renewed", 10)
