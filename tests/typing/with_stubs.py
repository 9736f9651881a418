"""As the README has it, where celery-types is installed: mypy --strict passes, but for what is marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

from celery import Celery
from celery.exceptions import Retry

from celery_redislock import Lock, LockedResult, LockedTask, LockInfo, LockUnavailable, locked, locked_task, signals
from celery_redislock.lock.no_lock import NoLock
from celery_redislock.lock.several import Locks
from celery_redislock.signals import lock_conflict
from celery_redislock.testing import busy

app = Celery("shop", task_cls="celery_redislock:LockedTask")


@app.task(base=LockedTask, lock_args=["account_id"], lock_lease=60, lock_wait_for=None)
def bill(account_id: int, amount: int) -> None: ...


@app.task(base=LockedTask, lock_scope="job")
def daily_report(day: str) -> str:
    return f"report of {day}"


@app.task(base=LockedTask, bind=True, lock_on_conflict="wait", max_retries=3)
def rebuild(self: LockedTask, index: str) -> None:
    self.lock.check()
    assert_type(self.lock.fence, int | None)
    assert_type(self.request.retries, int)
    if self.lock.remaining < 5:
        assert_type(self.retry(countdown=1), Retry)
    self.lock.chek()  # type: ignore[union-attr]


def exports_of(call: Mapping[str, Any]) -> int:
    return 10 if call["customer"] == 7 else 1


@app.task(base=LockedTask, lock_args=["customer"], lock_limit=exports_of)
def export(customer: int, report: str) -> str:
    return f"{report} of {customer}"


@app.task(base=LockedTask, lock_on_conflict="join")
def exchange_rate(currency: str) -> float:
    return 1.0


@app.task(base=LockedTask[[int], str], lock_scope="job")
def invoice(order: int) -> str:
    return f"invoice of {order}"


@app.task(base=LockedTask[[int], str], bind=True)
def refund(self: LockedTask[[int], str], order: int) -> str:
    return f"refund of {order}"


class GeoApi(LockedTask):
    abstract = True
    lock_key = "geo-api"
    lock_limit = 5


@app.task(base=GeoApi)
def locate(address: str) -> str:
    return f"where {address} is"


def ask_for_report(day: str) -> tuple[str, bool]:
    result = daily_report.delay(day)
    assert_type(result, LockedResult)
    assert_type(daily_report.apply_async((day,), countdown=5, queue="slow"), LockedResult)
    assert_type(daily_report.apply_async((day,), lock_scope="run", lock_wait_for=5), LockedResult)
    assert_type(result.duplicate, bool)
    result.duplicated  # type: ignore[attr-defined]  # noqa: B018
    return result.id, result.duplicate


@locked_task(app, base=GeoApi, lock_limit=2, autoretry_for=(OSError,), queue="geo")
def route(start: str, end: str) -> float:
    return 1.0


def call() -> None:
    assert_type(invoice.delay(1).get(), str)
    assert_type(refund.delay(1).get(), str)
    assert_type(route.delay("A", "B").get(timeout=5), float)
    assert_type(route.apply_async(args=("A",)).get(), float)  # as Celery's own: it does not know the arguments
    assert_type(route.apply(("A", "B")).get(), float)
    assert_type(route("A", "B"), float)
    invoice.delay("1")  # type: ignore[arg-type]
    invoice.delay(1, 2, 3)  # type: ignore[call-arg]
    refund.delay("1")  # type: ignore[arg-type]
    route.delay("A")  # type: ignore[call-arg]
    route("A", 7)  # type: ignore[arg-type]
    locked_task(app, base=int)  # type: ignore[arg-type]


def look() -> None:
    some_task: LockedTask = bill
    some_task.delay(1)
    assert_type(locate, GeoApi)
    assert_type(exchange_rate.delay("EUR"), LockedResult)
    info = export.lock_info(7)
    assert info is not None
    assert_type(info.holders, tuple[LockInfo, ...])
    assert_type(rebuild.lock_info("products"), LockInfo | None)
    with rebuild.lock_for("products") as lock:
        assert_type(lock, Lock | Locks | NoLock)
        lock.check()
    with busy(rebuild.lock_for("products")) as lock:
        lock.check()
    rebuild("products")
    rebuild.lock_fro("products")  # type: ignore[attr-defined]


@locked("stock:{sku}")
def count_shelf(sku: int) -> int:
    return sku


@locked
def sync(account: int) -> int:
    return account


def count() -> None:
    assert_type(count_shelf(7), int)
    assert_type(sync(7), int)
    count_shelf("7")  # type: ignore[arg-type]
    with locked("stock:7", block_for=5) as lock:
        assert_type(lock, Lock | Locks | NoLock)
    with locked("stock:{sku}", values={"sku": 7}, lease="30"):  # type: ignore[call-overload]
        pass


@lock_conflict.connect
def count_conflict(sender: LockedTask, key: str, holder: LockInfo, policy: str, **_: Any) -> None:
    print(sender.name, key, holder.task_id, policy)


@signals.lock_acquired.connect(sender=bill)
def acquired(sender: LockedTask, lock: Any, **_: Any) -> None: ...


@signals.lock_lost.connect
def lost(sender: LockedTask, lock: Any, reason: str, **_: Any) -> None: ...


@signals.lock_unavailable.connect
def away(sender: LockedTask, key: str, error: LockUnavailable, **_: Any) -> None: ...


signals.lock_released.connect(acquired, sender=bill, weak=False)
