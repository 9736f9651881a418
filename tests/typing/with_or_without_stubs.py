"""What mypy --strict sees in a user's code also where Celery has no types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, assert_type

import redis

from celery_redislock import Lock, LockConflict, LockedTask, LockInfo
from celery_redislock.lock.no_lock import NoLock


class ByAccount(LockedTask):
    lock_args = ["account_id"]
    lock_lease = 60
    lock_max_hold = None
    lock_scope = "queue"
    lock_on_conflict = "wait"
    lock_on_lost = "abort"
    lock_on_outage = "run"


class ByKey(LockedTask):
    lock_args = ("account_id",)
    lock_key = "stock:{sku}"
    lock_on_conflict = None
    lock_cooldown = 0.5
    lock_fence = True


class Wrong(LockedTask):
    lock_args = 7  # type: ignore[assignment]
    lock_key = 7  # type: ignore[assignment]
    lock_scope = "jobs"  # type: ignore[assignment]
    lock_on_conflict = "retry"  # type: ignore[assignment]
    lock_lease = "60"  # type: ignore[assignment]
    lock_on_lost = "abrot"  # type: ignore[assignment]
    lock_on_outage = None  # type: ignore[assignment]
    lock_fence = "yes"  # type: ignore[assignment]


def key_of(arguments: Mapping[str, Any]) -> str:
    return str(arguments["sku"])


def body(self: LockedTask, index: str) -> None:
    self.lock_key = key_of
    self.lock.check()
    self.lock.extend()
    assert_type(self.lock.remaining, float)
    assert_type(self.lock.state, Literal["held", "at_risk", "lost", "none"])
    assert_type(self.lock.key, str)
    assert_type(self.lock.fence, int | None)
    print(self.lock.state == "gone")  # type: ignore[comparison-overlap]
    assert_type(self.delay(index).duplicate, bool)
    assert_type(self.apply_async((index,)).duplicate, bool)


def look(task: LockedTask) -> None:
    assert_type(task.lock_info("products"), LockInfo | None)
    try:
        with task.lock_for("products") as lock:
            assert_type(lock, Lock | NoLock)
            assert_type(lock.state, Literal["held", "at_risk", "lost", "none"] | None)
    except LockConflict as conflict:
        assert_type(conflict.holder, LockInfo | None)


def report() -> None:
    with Lock(redis.Redis(), "report", timeout=30, renew=True) as lock:
        assert_type(lock, Lock)
        assert_type(lock.fence, int | None)
    Lock(redis.Redis(), "report", timout=30)  # type: ignore[call-arg]
