"""The keys of real tasks: bound ones, pydantic ones, and what a Cluster makes of the key."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from celery import Celery, Task
from pydantic import BaseModel
from redis.crc import key_slot

from celery_redislock import LockConfigError, LockedTask, LockKeyError
from celery_redislock.protocol.names import keys_of

from .wire import over_the_wire


class Order(BaseModel):
    """An argument of a task with ``pydantic=True``."""

    sku: str
    quantity: int = 1


class HookedOrder(Order):
    """Its own hook tells kombu how to send it; Celery then leaves it alone."""

    def __json__(self) -> Any:
        return {"sku": self.sku, "quantity": self.quantity, "hooked": True}


def sent(task: Any, *args: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """A call as a worker receives it from `apply_async`."""
    # Before Celery 5.7 callers dump their models themselves.
    dump = getattr(task, "_dump_pydantic_arguments", None) or _dump
    return over_the_wire(*dump(args, {}))


def _dump(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    plain = [arg.model_dump(mode="json") if type(arg) is Order else arg for arg in args]
    return plain, kwargs


@pytest.mark.parametrize("bind", [False, True], ids=["plain", "bind=True"])
def test_lock_args_name_the_parameters_of_plain_and_bound_tasks_alike(app: Celery, bind: bool) -> None:
    def bill(account: int, amount: int = 1) -> None: ...
    def bill_bound(self: Task[..., Any], account: int, amount: int = 1) -> None: ...

    task = app.task(shared=False, base=LockedTask, bind=bind, lock_args=["account"], name="bill")(
        bill_bound if bind else bill
    )
    assert task.lock_for(7).name == task.lock_for(account=7, amount=3).name
    assert task.lock_for(7).name != task.lock_for(8).name


def test_a_bound_tasks_self_is_no_parameter(app: Celery) -> None:
    @app.task(shared=False, base=LockedTask, bind=True, lock_args=["self"], name="bill")
    def bill(self: Task[..., Any], account: int) -> None: ...

    with pytest.raises(LockConfigError, match=r"^bill: lock_args names 'self', .* its parameters: account$"):
        bill.lock_for(7)


def test_plain_and_bound_tasks_of_one_name_have_one_key(app: Celery) -> None:
    """A task may be given ``bind=True`` in a rolling upgrade."""

    @app.task(shared=False, base=LockedTask, name="bill")
    def plain(account: int) -> None: ...

    key = plain.lock_for(7).name
    with Celery("other", broker="redis://nowhere.invalid/0", set_as_current=False) as other:

        @other.task(shared=False, base=LockedTask, bind=True, name="bill")
        def bound(self: Task[..., Any], account: int) -> None: ...

        assert bound.lock_for(7).name == key


@pytest.mark.parametrize("order", [Order(sku="7"), {"sku": "7", "quantity": 1}], ids=["model", "dict"])
@pytest.mark.parametrize("bind", [False, True], ids=["plain", "bind=True"])
def test_a_pydantic_task_has_one_key_for_a_model_and_for_what_is_sent_of_it(
    app: Celery, order: Any, bind: bool
) -> None:
    def reserve(order: Order) -> None: ...
    def reserve_bound(self: Task[..., Any], order: Order) -> None: ...

    body = reserve_bound if bind else reserve
    task = app.task(shared=False, base=LockedTask, bind=bind, pydantic=True, name="reserve")(body)
    args, kwargs = sent(task, order)
    assert task.lock_for(*args, **kwargs).name == task.lock_for(order).name == task.lock_for(order=Order(sku="7")).name
    assert task.lock_for(Order(sku="7", quantity=2)).name != task.lock_for(order).name


@pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="before Celery 5.7 callers dump models")
def test_a_model_counts_as_the_tasks_own_way_to_dump_it(app: Celery) -> None:
    @app.task(
        shared=False, base=LockedTask, pydantic=True, pydantic_dump_kwargs={"exclude_defaults": True}, name="reserve"
    )
    def reserve(order: Order) -> None: ...

    args, _ = sent(reserve, Order(sku="7"))
    assert args == [{"sku": "7"}]
    assert reserve.lock_for(Order(sku="7")).name == reserve.lock_for({"sku": "7"}).name


@pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="before Celery 5.7 callers dump models")
def test_pickle_sends_a_model_as_it_is(app: Celery) -> None:
    dumped = {"base": LockedTask, "pydantic": True, "pydantic_dump_kwargs": {"exclude_defaults": True}}

    @app.task(shared=False, serializer="pickle", name="reserve", **dumped)
    def reserve(order: Order) -> None: ...

    assert reserve.lock_for(Order(sku="7")).name == reserve.lock_for({"sku": "7", "quantity": 1}).name


def passing_on(function: Any) -> Any:
    """A decorator that changes nothing."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def with_database(function: Any) -> Any:
    """A decorator that adds an argument, and names what callers pass."""

    @functools.wraps(function)
    def wrapper(account: int, amount: int = 0) -> Any:
        return function("database", account, amount)

    return wrapper


def with_any_database(function: Any) -> Any:
    """A decorator that adds an argument, and says so."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("database", *args, **kwargs)

    parameters = [*inspect.signature(function).parameters.values()]
    wrapper.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
    return wrapper


def test_a_decorated_task_is_called_as_the_function_inside(app: Celery) -> None:
    @app.task(shared=False, base=LockedTask, lock_args=["account"])
    @passing_on
    def bill(account: int, amount: int = 0) -> None: ...

    assert bill.lock_for(7).name == bill.lock_for(account=7, amount=3).name != bill.lock_for(8).name


@pytest.mark.parametrize("decorator", [with_database, with_any_database])
def test_a_decorator_that_adds_an_argument_may_name_what_callers_pass(app: Celery, decorator: Any) -> None:
    @app.task(shared=False, base=LockedTask, lock_args=["account"])
    @decorator
    def bill(database: str, account: int = 0, amount: int = 0) -> None: ...

    assert bill.lock_for(7).name == bill.lock_for(account=7, amount=3).name != bill.lock_for(8).name


def test_a_pydantic_model_with_a_hook_for_kombu_has_one_key_on_both_sides(app: Celery) -> None:
    @app.task(shared=False, base=LockedTask, pydantic=True, name="reserve")
    def reserve(order: HookedOrder) -> None: ...

    order = HookedOrder(sku="7")
    args, kwargs = sent(reserve, order)
    assert args == [{"sku": "7", "quantity": 1, "hooked": True}]
    assert reserve.lock_for(*args, **kwargs).name == reserve.lock_for(order).name


def test_a_key_has_the_prefix_and_the_name_as_its_hash_tag(app: Celery) -> None:
    @app.task(shared=False, base=LockedTask, lock_key="stock:{sku}", name="reserve")
    def reserve(sku: str) -> None: ...

    assert reserve.lock_for("7").name == "redislock:{stock:7}"


@pytest.mark.parametrize(
    ("lock_key", "sku"),
    [
        ("{sku}", "7"),
        ("{sku}", "}"),
        ("{sku}", ""),
        pytest.param(lambda _: "}", "7", id="callable, only a brace"),
        pytest.param(lambda arguments: "}" + arguments["sku"], "7", id="callable, brace first"),
        pytest.param(lambda arguments: arguments["sku"] + "}x{", "7", id="callable, braces later"),
    ],
)
def test_what_a_lock_needs_is_in_one_hash_slot_whatever_its_name(app: Celery, lock_key: Any, sku: str) -> None:
    """An empty hash tag counts as none: then the key and its note would be in two hash slots."""

    @app.task(shared=False, base=LockedTask, lock_key=lock_key, name="reserve")
    def reserve(sku: str) -> None: ...

    try:
        key = reserve.lock_for(sku).name
    except LockKeyError:
        return
    assert key_slot(key.encode()) == key_slot(keys_of(key).note("id/0/0").encode())


@pytest.mark.parametrize("name", ["shop.bill", "}", "}{", "shop.{bill}", "shop\nbill"])
def test_what_a_lock_needs_is_in_one_hash_slot_and_its_key_in_one_line_whatever_the_name_of_its_task(
    app: Celery, name: str
) -> None:
    @app.task(shared=False, base=LockedTask, name=name)
    def bill(account: int) -> None: ...

    key = bill.lock_for(7).name
    assert key_slot(key.encode()) == key_slot(keys_of(key).note("id/0/0").encode())
    assert key.isprintable()


@pytest.mark.parametrize("options", [{}, {"lock_args": []}, {"lock_key": "nightly"}], ids=["all", "none", "template"])
def test_a_task_without_parameters_has_its_key_ready_and_still_refuses_arguments(
    app: Celery, options: Mapping[str, Any]
) -> None:
    @app.task(shared=False, base=LockedTask, name="sweep", **options)
    def sweep() -> None: ...

    plan = sweep.lock_plan
    assert plan.demand_of_run((), {}, 0) is plan.demand_of_run([], {}, 7)
    assert plan.demand_of_run((), {}, 0) == plan.demand((), {})
    for args, kwargs in [([1], {}), ([], {"force": True})]:
        with pytest.raises(TypeError, match=r"^sweep\(\) (too many positional|got an unexpected keyword) argument"):
            plan.demand_of_run(args, kwargs, 0)


def test_the_key_that_a_callable_makes_for_a_task_without_parameters_is_made_for_each_run(app: Celery) -> None:
    keys = iter(["monday", "tuesday"])

    @app.task(shared=False, base=LockedTask, name="sweep", lock_key=lambda _: next(keys))
    def sweep() -> None: ...

    assert [sweep.lock_plan.demand_of_run((), {}, 0).key.rpartition("{")[2] for _ in range(2)] == [
        "monday}",
        "tuesday}",
    ]
