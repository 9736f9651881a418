"""docs/changing-a-key.md is true: its two ways to change a key while old and new code run."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError

from celery_redislock import Also, LockedTask, locked
from celery_redislock.testing import busy
from tests.lab.pages import python_of
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

PAGE = ROOT / "docs" / "changing-a-key.md"


@pytest.fixture
def page(app, monkeypatch):
    """What the page's Python defines, with its tasks in the test's app. `bill` calls what is added to `during`."""
    monkeypatch.setattr(app, "main", "shop")
    text = python_of(PAGE)
    for before, after in {
        "app = Celery(": "_ = Celery(",
        "@app.task(": "@app.task(shared=False, ",
        "block_for=5)": "block_for=0.05, app=app)",
        "amount: int) -> None: ...": "amount: int) -> None: [call() for call in during]",
    }.items():
        assert before in text
        text = text.replace(before, after)
    names = {"__name__": "shop", "app": app, "during": []}
    exec(compile(text, str(PAGE), "exec"), names)  # noqa: S102 - the page is ours
    return names


@pytest.fixture
def other_version(app):
    """Defines a task as another version of the code does, on the same servers: ``other_version(body, **options)``."""
    with ExitStack() as stack:

        def define(body, **options):
            other = Celery("shop", set_as_current=False)
            stack.callback(other.close)
            other.conf.update(app.conf.changes)
            return other.task(base=LockedTask, name=f"shop.{body.__name__}", shared=False, **options)(body)

        yield define


def test_naming_the_old_parameters_keeps_the_key_that_all_arguments_made(page, other_version):
    """And `skip` keeps the policy, which `lock_args` alone would change."""

    def refresh(sku: str, full: bool = False) -> None: ...

    before, after = other_version(refresh), page["refresh"]
    for call in [("A1",), ("A1", True)]:
        assert after.lock_for(*call, note="new").name == before.lock_for(*call).name
    with busy(before.lock_for("A1")):
        assert isinstance(after.apply(("A1",)).result, TaskRevokedError)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
@pytest.mark.parametrize(("old", "new"), [("job", "run"), ("queue", "run"), ("job", "queue"), ("queue", "job")])
def test_a_key_reserved_in_another_scope_is_free_after_its_run(app, other_version, deliver, queued, old, new):
    """A publisher of the old version and a worker of the new one: the next call is sent, and no key stays."""
    before, after = other_version(bill, lock_scope=old), other_version(bill, lock_scope=new)
    assert not before.delay(7, 1).duplicate
    assert before.delay(7, 1).duplicate
    (message,) = queued()
    sent = {name: value for name, value in message.items() if name not in {"task", "argsrepr", "kwargsrepr"}}
    assert deliver(after.app, "shop.bill", 7, 1, **sent)[0] == states.SUCCESS
    wait_until(lambda: after.lock_info(7, 1) is None, "its key is free")
    assert not before.delay(7, 1).duplicate


def key_of(call):
    return f"customer:{call['customer']}"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
@pytest.mark.parametrize("policy", ["wait", "skip", "raise"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("customer:{customer}", {"lock_also": [Also("farm", limit=3)]}),
        ("customer:{customer}", {"lock_key": ["customer:{customer}", "amount:{amount}"]}),
        (key_of, {}),
    ],
    ids=["one more", "two", "only the scope"],
)
def test_a_key_reserved_for_a_run_that_now_needs_several_is_not_in_its_own_way(
    app, other_version, deliver, queued, old, new, policy
):
    before = other_version(bill, lock_scope="job", lock_key=old)
    after = other_version(bill, **{"lock_key": old, "lock_on_conflict": policy, **new})
    assert not before.delay(7, 1).duplicate
    state = None
    while state != states.SUCCESS:  # it may meet its own reservation, and come back
        assert state in {None, states.RETRY}
        message = queued()[-1]
        sent = {name: value for name, value in message.items() if name not in {"task", "argsrepr", "kwargsrepr"}}
        state, _ = deliver(after.app, "shop.bill", 7, 1, **sent)
        wait_until(lambda: before.lock_info(7, 1) is None, "its key is free")
    assert not before.delay(7, 1).duplicate


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
@pytest.mark.parametrize("new", [{"lock_limit": 3}, {"lock_rate": "100/m"}, {"lock_also": [Also("farm", limit=3)]}])
def test_a_call_that_comes_during_a_run_with_a_new_limit_is_queued_as_before(app, other_version, deliver, queued, new):
    """The run's message had the place in the queue of the old version."""

    def charge(customer: int, amount: int) -> None:
        during.append(before.delay(7, 2).duplicate)

    during, common = [], {"lock_key": "customer:{customer}"}
    before, after = other_version(charge, lock_scope="queue", **common), other_version(charge, **common, **new)
    with busy(before.lock_for(7, 1)):
        assert not before.delay(7, 1).duplicate
    while not during:
        message = queued()[-1]
        sent = {name: value for name, value in message.items() if name not in {"task", "argsrepr", "kwargsrepr"}}
        state, _ = deliver(after.app, "shop.charge", 7, 1, **sent)
    assert state == states.SUCCESS
    assert during == [False]


def bill(customer: int, amount: int) -> None: ...


def test_the_step_between_holds_both_keys(page, other_version):
    before = other_version(bill, lock_args=["customer"])
    after = other_version(bill, lock_key="invoice:{customer}")
    held = []
    page["during"].append(lambda: held.extend([before.lock_info(7), after.lock_info(7)]))
    page["bill"].apply((7, 1), throw=True)
    assert None not in held
    assert [before.lock_info(7), after.lock_info(7)] == [None, None]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
def test_in_the_step_between_a_run_that_meets_the_new_key_retries(page, app, deliver, queued):
    """However often: `max_retries` is None. Meanwhile the old key is free."""
    with busy(locked("invoice:7", app=app)):
        state, _ = deliver(app, "shop.bill", 7, 1, retries=1000)
    assert state == states.RETRY
    assert [message["task"] for message in queued()] == ["shop.bill"]
    assert page["bill"].lock_info(7) is None
