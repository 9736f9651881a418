"""`lock_for` and `lock_info` take what the key needs; runs and publishes take the whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task
from pydantic import BaseModel

from celery_redislock import LockedTask
from celery_redislock.task.plan import LockPlan


class Order(BaseModel):
    """An argument of a task with ``pydantic=True``."""

    sku: str


@pytest.fixture
def locked_task(app: Celery) -> Callable[..., Any]:
    """Makes a task of a function: ``locked_task(function, lock_args=["account"])``."""

    def make(function: Callable[..., Any], **options: Any) -> Any:
        return app.task(base=LockedTask, shared=False, name="bill", **options)(function)

    return make


def bill(account: int, amount: int, note: str = "", *, dry: bool) -> None: ...
def bill_last(amount: int, account: int, *, dry: bool) -> None: ...
def bill_bound(self: Any, account: int, amount: int) -> None: ...
def bill_positional(account: int, amount: int, /, dry: bool) -> None: ...
def bill_defaulted(amount: int, account: int = 7) -> None: ...
def bill_stars(account: int, amount: int, *more: int, dry: bool, **others: int) -> None: ...


@pytest.mark.parametrize("options", [{"lock_args": ["account"]}, {"lock_key": "account:{account}"}], ids=str)
@pytest.mark.parametrize(
    ("function", "part", "whole"),
    [
        (bill, ((7,), {}), ((7, 1), {"dry": True})),
        (bill, ((), {"account": 7}), ((7, 1, "note"), {"dry": True})),
        (bill, ((7,), {"note": "x"}), ((7, 1), {"dry": True})),
        (bill, ((7, 2, "x"), {}), ((7, 1), {"dry": True})),
        (bill_last, ((), {"account": 7}), ((1, 7), {"dry": True})),
        (bill_last, ((1, 7), {}), ((1, 7), {"dry": True})),
        (bill_bound, ((7,), {}), ((7, 1), {})),
        (bill_positional, ((7,), {}), ((7, 1, True), {})),
        (bill_positional, ((7,), {"dry": True}), ((7, 1, True), {})),
        (bill_defaulted, ((), {}), ((1, 7), {})),
        (bill_stars, ((7,), {"other": 3}), ((7, 1, 2, 3), {"dry": True})),
    ],
)
def test_the_key_of_a_part_of_a_call_is_that_of_the_call(
    locked_task: Callable[..., Any], options: dict[str, Any], function: Any, part: Any, whole: Any
) -> None:
    task = locked_task(function, bind=function is bill_bound, **options)
    (args, kwargs), (all_args, all_kwargs) = part, whole
    own = {name.removeprefix("lock_"): value for name, value in options.items()}
    plan = LockPlan(task.app, task.name, function, function is bill_bound, own)
    key = plan.demand(all_args, all_kwargs).key
    assert task.lock_for(*args, **kwargs).name == task.lock_for(*all_args, **all_kwargs).name == key


@pytest.mark.parametrize("options", [{"lock_args": ["order"]}, {"lock_args": ["order", "urgent"]}], ids=str)
@pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="before Celery 5.7 callers dump models")
def test_a_model_counts_as_in_the_whole_call(locked_task: Callable[..., Any], options: dict[str, Any]) -> None:
    def reserve(order: Order, quantity: int, urgent: bool = False) -> None: ...

    task = locked_task(reserve, pydantic=True, **options)
    assert task.lock_for(Order(sku="7")).name == task.lock_for(Order(sku="7"), 3).name
    assert task.lock_for({"sku": "7"}).name == task.lock_for(Order(sku="7"), 3).name


def test_a_tasks_only_lock_needs_no_argument(locked_task: Callable[..., Any]) -> None:
    task = locked_task(bill, lock_args=())
    assert task.lock_for().name == task.lock_for(7, 1, dry=True).name


@pytest.mark.parametrize("options", [{"lock_args": ["account"]}, {"lock_key": "account:{account}"}], ids=str)
@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {"amount": 1}, r"^bill\(\) lacks arguments that its lock's key needs: account$"),
        ((7,), {"acount": 7}, r"^bill\(\) got an unexpected keyword argument 'acount'$"),
        ((7,), {"account": 7}, r"^bill\(\) multiple values for argument 'account'$"),
        ((7, 1, "x", True), {}, r"^bill\(\) too many positional arguments$"),
    ],
)
def test_what_the_key_misses_and_what_no_call_has_is_a_type_error(
    locked_task: Callable[..., Any], options: dict[str, Any], args: Any, kwargs: Any, says: str
) -> None:
    task = locked_task(bill, **options)
    for look in (task.lock_for, task.lock_info):
        with pytest.raises(TypeError, match=says):
            look(*args, **kwargs)


def test_all_that_the_key_misses_is_named(locked_task: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"needs: account, amount$"):
        locked_task(bill, lock_args=["amount", "account"]).lock_for()


@pytest.mark.parametrize(
    "options", [{}, {"lock_key": lambda arguments: str(arguments["account"])}], ids=["all arguments", "callable"]
)
def test_all_arguments_and_a_callable_need_the_whole_call(
    locked_task: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"^bill\(\) missing a required argument: 'amount'$"):
        locked_task(bill, **options).lock_for(7)


def test_a_publish_in_scope_job_needs_the_whole_call_too(locked_task: Callable[..., Any]) -> None:
    task = locked_task(bill, lock_args=["account"], lock_scope="job")
    with pytest.raises(TypeError, match=r"missing a required argument: 'amount'$"):
        task.delay(7)
