"""What mypy --strict sees in a user's code also where Celery has no types."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, assert_type

import redis

from celery_redislock import (
    Lock,
    LockConflict,
    LockedResult,
    LockedTask,
    LockInfo,
    LockLost,
    LockUnavailable,
    locked,
    locked_task,
)
from celery_redislock.asyncio import Lock as AsyncLock
from celery_redislock.lock.no_lock import AsyncNoLock, NoLock
from celery_redislock.lock.several import AsyncLocks, Locks
from celery_redislock.testing import busy


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


class ThreeAtOnce(LockedTask):
    lock_args = ()
    lock_limit = 3
    lock_wait_for = 60
    lock_block_for = 0.5
    lock_hold_on_retry = True
    lock_queue_ttl = 7200


class ThatJoins(LockedTask):
    lock_key = "rate:{currency}"
    lock_scope = "job"
    lock_on_conflict = "join"
    lock_on_outage = "raise"


class ThatSkips(LockedTask):
    lock_scope = "run"
    lock_on_conflict = "skip"
    lock_on_lost = "warn"
    lock_on_outage = "retry"


class ThatRaises(LockedTask):
    lock_on_conflict = "raise"


class Wrong(LockedTask):
    lock_args = 7  # type: ignore[assignment]
    lock_key = 7  # type: ignore[assignment]
    lock_scope = "jobs"  # type: ignore[assignment]
    lock_on_conflict = "retry"  # type: ignore[assignment]
    lock_lease = "60"  # type: ignore[assignment]
    lock_on_lost = "abrot"  # type: ignore[assignment]
    lock_on_outage = None  # type: ignore[assignment]
    lock_limit = "3"  # type: ignore[assignment]
    lock_fence = "yes"  # type: ignore[assignment]


def key_of(arguments: Mapping[str, Any]) -> str:
    return str(arguments["sku"])


def limit_of(arguments: Mapping[str, Any]) -> int:
    return 10 if arguments["customer"] == 7 else 1


def body(self: LockedTask, index: str) -> None:
    self.lock_key = key_of
    self.lock_limit = limit_of
    self.lock_limit = key_of  # type: ignore[assignment]
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
            assert_type(lock, Lock | Locks | NoLock)
            assert_type(lock.state, Literal["held", "at_risk", "lost", "none"] | None)
        assert_type(task.lock_for(index="products").acquire(), bool)
    except LockConflict as conflict:
        assert_type(conflict.holder, LockInfo | None)
        print(*(tell(holder) for holder in conflict.holders))


def tell(info: LockInfo) -> str:
    assert_type(info.holders, tuple[LockInfo, ...])
    assert_type(info.others, tuple[LockInfo, ...])
    assert_type(info.task_id, str | None)
    assert_type(info.since, datetime | None)
    assert_type(info.ttl, float | None)
    assert_type(info.waiting_processes, int)
    return f"{info.key} {info.state} {info.task} {info.hostname}"


def report(client: redis.Redis) -> None:
    with Lock(client, "report", timeout=30, renew=True) as lock:
        assert_type(lock, Lock)
        assert_type(lock.fence, int | None)
    Lock(client, "report", timout=30)  # type: ignore[call-arg]
    seats = Lock(client, "seats", timeout=30, limit=3, reentrant=True, blocking_timeout=5)
    assert_type(seats.acquire(blocking=False), bool)
    assert_type(seats.acquire(blocking_timeout=0.5), bool)
    assert_type(seats.locked(), bool)
    assert_type(seats.owned(), bool)
    assert_type(seats.token, str | None)
    assert_type(seats.remaining, float)
    assert_type(seats.state, Literal["held", "at_risk", "lost"] | None)
    assert_type(seats.extend(5, replace_ttl=True), Literal[True])
    assert_type(seats.reacquire(), Literal[True])
    seats.release()
    Lock(client, "seats", timeout=30, limit="3")  # type: ignore[arg-type]
    with client.lock("report", timeout=30, lock_class=Lock):
        pass
    with busy(seats) as held:
        assert_type(held, Lock | Locks | NoLock)


def lose(lock: Lock) -> str:
    try:
        lock.check()
    except (LockLost, LockUnavailable) as error:
        return f"{error.key}: {error.reason}"
    return ""


seats = locked("cad-licence", limit=3, block_for=20, lease=60, fence=False)


@seats
def draw(plan: str, scale: float = 1.0) -> int:
    return round(len(plan) * scale)


@locked()
def rebuild_index(name: str) -> None: ...


def draw_all() -> None:
    assert_type(draw("kitchen", scale=2), int)
    draw(7)  # type: ignore[arg-type]
    rebuild_index()  # type: ignore[call-arg]
    with seats as seat:
        assert_type(seat, Lock | Locks | NoLock)
        seat.check()
    with locked("stock:{sku}", values={"sku": 7}, limit=2), busy(locked("stock:8")):
        pass
    locked("cad-licence", limit="3")  # type: ignore[call-overload]


@locked_task(lock_scope="job", lock_window=60, max_retries=3)
def report_of(day: int) -> str:
    return f"report of {day}"


@locked_task(bind=True, lock_args=["index"])
def rebuild(self: LockedTask, index: str, *, full: bool = False) -> list[str]:
    self.lock.check()
    return [index]


def call() -> None:
    assert_type(report_of.delay(1), LockedResult[str])
    assert_type(report_of.delay(day=1).duplicate, bool)
    assert_type(report_of.apply_async((1,), lock_scope="run"), LockedResult[str])
    assert_type(rebuild.delay("products", full=True), LockedResult[list[str]])
    assert_type(rebuild.lock_info(), LockInfo | None)  # the arguments that do not affect the key may be left out
    assert_type(report_of.lock_scope, Literal["run", "job", "queue"])
    report_of.delay("monday")  # type: ignore[arg-type]
    report_of.delay(1, 2, 3)  # type: ignore[call-arg]
    report_of.delay()  # type: ignore[call-arg]
    report_of.delay(date=1)  # type: ignore[call-arg]
    rebuild.delay("products", full="yes")  # type: ignore[arg-type]
    locked_task(lock_scop="job")  # type: ignore[call-arg]
    locked_task(lock_scope="jobs")  # type: ignore[arg-type]
    locked_task(lock_lease="60")  # type: ignore[arg-type]
    locked_task(max_retrys=3)  # type: ignore[call-arg]


async def call_from_a_loop(task: LockedTask) -> None:
    assert_type(await report_of.adelay(1), LockedResult[str])
    await report_of.adelay("monday")  # type: ignore[arg-type]
    async with task.alock_for("products") as lock:
        assert_type(lock, AsyncLock | AsyncLocks | AsyncNoLock)
        assert_type(await lock.owned(), bool)
        lock.check()
    assert_type(await task.alock_info(), LockInfo | None)
    with task.alock_for("products"):  # type: ignore[union-attr]
        pass


def call_any(task: LockedTask) -> LockedResult:
    return task.delay(1, 2, 3)


call_any(report_of)
