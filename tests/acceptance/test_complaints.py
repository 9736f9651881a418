"""What users of other plugins complain about, each by its number in the list that this project was built against."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest

from tests.lab.servers import wait_until

RICH = {
    "uuid": UUID(int=7),
    "datetime": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
    "naive": datetime(2026, 1, 2, 3, 4, 5),
    "date": date(2026, 1, 2),
    "decimal": Decimal("1.10"),
    "bytes": b"\xff\x00",
    "tuple": (1, (2, 3)),
    "keys": {1: "one", False: "no", None: "none"},
}


@pytest.fixture
def holding(tasks, start_worker, ledger):
    """Starts a run that holds its key, and waits until it does."""
    start_worker(2)

    def hold(task, *args, **kwargs):
        runs = len(ledger.runs())
        result = task.delay(*args, **kwargs)
        wait_until(lambda: len(ledger.runs()) > runs, "it runs")
        return result

    return hold


def test_complaint_9_positional_and_keyword_calls_are_one_call(holding, tasks):
    result = holding(tasks.whole, 7, seconds=1.5)
    for call in [((7, False, 1.5), {}), ((), {"seconds": 1.5, "account": 7}), ((7,), {"full": False, "seconds": 1.5})]:
        assert tasks.whole.lock_info(*call[0], **call[1]).task_id == result.id
        assert tasks.whole.apply_async(*call).get(timeout=1, propagate=False).args == (f"duplicate of {result.id}",)


@pytest.mark.parametrize("other", ["7", 7.5, [7], None])
def test_complaint_9_values_of_other_types_are_other_calls(holding, tasks, other):
    holding(tasks.whole, 7, seconds=1.5)
    assert tasks.whole.lock_info(7, seconds=1.5)
    assert tasks.whole.delay(other, seconds=0.0).get(timeout=1) is None


def test_complaint_9_true_is_not_1(holding, tasks):
    holding(tasks.whole, 1, seconds=1.5)
    assert tasks.whole.delay(True, seconds=1.5).get(timeout=5) is None


@pytest.mark.parametrize("kind", RICH)
def test_complaint_10_rich_arguments_make_the_same_key_before_and_after_the_broker(holding, tasks, kind):
    result = holding(tasks.whole, RICH[kind], seconds=0.5)
    assert tasks.whole.lock_info(RICH[kind], seconds=0.5).task_id == result.id


def test_complaint_10_pydantic_models_make_the_same_key_before_and_after_the_broker(holding, tasks):
    from tests.lab.app import Order

    order = Order(number=7, lines=("a", "b"))
    result = holding(tasks.model, order)
    assert tasks.model.lock_info(order).task_id == result.id
    assert result.get(timeout=5) == 7


def test_complaint_11_a_bound_task_locks_on_the_parameters_that_it_names(holding, tasks):
    result = holding(tasks.bound, 100, 7, seconds=1.5)
    assert tasks.bound.lock_info(200, account=7).task_id == result.id
    assert tasks.bound.lock_info(100, account=8) is None
    skipped = tasks.bound.delay(200, 7).get(timeout=1, propagate=False)
    assert skipped.args == (f"duplicate of {result.id}",)


def test_complaint_12_no_argument_is_readable_in_redis_or_in_the_log(tasks, start_worker, locks, ledger):
    worker = start_worker(2)
    tasks.once.apply_async(("k-secret", "i-secret", 1.0), argsrepr="(hidden)", kwargsrepr="(hidden)")
    wait_until(ledger.runs, "it runs")
    duplicate = tasks.once.apply_async(("k-secret", "i-secret", 1.0), argsrepr="(hidden)", kwargsrepr="(hidden)")
    duplicate.get(timeout=5, propagate=False)
    (key,) = locks.client.keys()
    assert b"secret" not in key + locks.client.get(key)
    assert "lock redislock:{lab.once:" in worker.output()
    assert "secret" not in worker.output().replace("succeeded in", "").split("Task lab.once")[0]
    assert all("secret" not in line for line in worker.output().splitlines() if "succeeded in" not in line)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_complaint_15_no_state_leaks_between_runs_of_one_task_object(tasks, start_worker, pool):
    start_worker(8, "-P", pool)
    results = [(n, tasks.threaded.delay(n, 0.05)) for n in range(40)]
    for number, result in results:
        expected = tasks.threaded.lock_for(number, 0).name
        assert result.get(timeout=20) == [expected, expected]
