"""Policy wait: the message that has waited is the message that was sent, on every broker, in line or sent back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from celery import chord, group, states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from tests.lab.app import make_app
from tests.lab.servers import wait_until

#: So many seconds after its publish a message expires; a worker has received it by then, else RabbitMQ would drop it.
IN_TIME = 4
#: What tells one message from another, and when it is due; each broker's own notes.
OWN = {"id", "root_id", "correlation_id", "eta", "delivery_info", "properties", "headers"}
#: A worker that may keep no more messages sends them back to the broker.
in_every_way = pytest.mark.parametrize(
    ("broker", "limit"),
    [(broker, limit) for broker in ("redis", "rabbitmq", "quorum") for limit in (1000, 0)],
    ids=[f"{broker}, {way}" for broker in ("redis", "rabbitmq", "quorum") for way in ("in line", "sent back")],
    indirect=True,
)


@pytest.fixture
def limit(request):
    """How many messages a worker keeps waiting."""
    return getattr(request, "param", 1000)


@pytest.fixture
def config(config, limit):
    config.settings["redislock_waiting_limit"] = limit
    return config


def received(worker, result):
    return worker.output().count(f"[{result.id}] received")


def wait_in_line(worker, result):
    """Until the message of `result` waits in line, or has come back once."""
    line = f"[{result.id}]: lock"
    wait_until(
        lambda: (
            any(line in said and "; waiting in line (" in said for said in worker.output().splitlines())
            or received(worker, result) > 1
        ),
        "it waits in line, or has come back",
    )


def told(ledger):
    """What the messages had that `tells` has run for, by their ids."""
    messages = [line["message"] for line in ledger.lines() if line["event"] == "told"]
    return {message["id"]: message for message in messages}


def kept(message):
    return {name: value for name, value in message.items() if name not in OWN and not name.startswith("x-")}


@in_every_way
def test_a_message_that_has_waited_is_the_message_that_was_sent(tasks, start_worker, ledger):
    worker = start_worker(2)
    sent = {
        "link": tasks.plain.si("link"),
        "link_error": tasks.plain.si("errback"),
        "headers": {"tenant": "acme", "deep": {"list": [1, None]}},
        "priority": 3,
        "expires": datetime.now(UTC) + timedelta(hours=1),
        "time_limit": 100,
        "soft_time_limit": 90,
        "shadow": "shadow",
        "argsrepr": "('k', '***')",
        "kwargsrepr": "{'what': '***'}",
        "ignore_result": True,
        "compression": "zlib",
        "delivery_mode": 1,
        "stamp": "a stamp",
        "stamped_headers": ["stamp"],
    }
    task = tasks.tells
    with task.lock_for("k"):
        result = task.apply_async(("k", "secret"), task_id="waited", **sent)
        wait_in_line(worker, result)
    task.apply_async(("k", "secret"), task_id="at once", **sent)
    wait_until(lambda: len(told(ledger)) == 2, "both have run")
    waited, at_once = told(ledger)["waited"], told(ledger)["at once"]
    assert kept(waited) == kept(at_once)
    for message in (waited, at_once):
        assert message["root_id"] == message["correlation_id"] == message["id"]
        assert message["properties"]["delivery_mode"] == 1
        assert message["delivery_info"]["priority"] == 3
        assert message["headers"].items() >= sent["headers"].items()
    assert "secret" not in worker.output()


@in_every_way
def test_headers_beside_an_inner_dict_of_headers_stay_too(tasks, start_worker, ledger):
    """ddtrace and older sentry-sdk put such a dict into the message; Celery shows a task nothing but that."""
    worker = start_worker(2)
    inner = {"x-datadog-trace-id": "1", "deep": {"list": [1, None]}, "redislock": {"times": 3, "since": 1.0}}
    sent = {"tenant": 7, "redislock_note": "mine", "headers": inner}
    with tasks.tells.lock_for("k"):
        result = tasks.tells.apply_async(("k",), headers=sent)
        wait_in_line(worker, result)
    assert result.get(timeout=20) == "told"
    retried = tasks.tells.apply_async(("k",), {"retries": 1}, headers=sent)
    assert retried.get(timeout=20) == "told"
    for message in (told(ledger)[result.id], told(ledger)[retried.id]):
        assert message["headers"].items() >= {"x-datadog-trace-id": "1", "deep": {"list": [1, None]}}.items()
        assert "redislock" not in message["headers"]
    assert told(ledger)[result.id]["tenant"] == 7
    assert told(ledger)[result.id]["headers"].keys() == {"x-datadog-trace-id", "deep"}


@in_every_way
def test_a_member_of_a_group_in_a_chord_and_a_chain_stays_one(tasks, app, start_worker, ledger):
    worker = start_worker(2)
    with tasks.tells.lock_for("k"):
        member = tasks.tells.si("k").set(task_id="member") | tasks.plain.s()
        body = chord([member, tasks.plain.si()])(tasks.plain.s())
        wait_in_line(worker, app.AsyncResult("member"))
    assert body.get(timeout=20) == "plain"
    message = told(ledger)["member"]
    assert message["group"] or message["chain"]
    assert message["parent_id"] is None
    parent = group(tasks.tells.si("k").set(task_id="child")).apply_async(parent_id="parent", root_id="root")
    assert parent.get(timeout=20) == ["told"]
    assert (told(ledger)["child"]["parent_id"], told(ledger)["child"]["root_id"]) == ("parent", "root")


@in_every_way
def test_it_stays_in_the_queue_that_it_came_from(config, tasks, start_worker, ledger):
    default = start_worker(1)
    queue = f"{config.queue}-other"
    other = start_worker(1, "-Q", queue)
    with tasks.tells.lock_for("k"):
        result = tasks.tells.apply_async(("k",), queue=queue)
        wait_in_line(other, result)
    assert result.get(timeout=20) == "told"
    assert received(default, result) == 0


@pytest.mark.parametrize(("broker", "limit"), [("quorum", 0)], indirect=True)
def test_rabbitmq_takes_no_message_that_comes_back_for_one_that_goes_in_a_circle(config, start_worker):
    """A long delay goes through several queues. RabbitMQ drops what expires towards a queue of its record."""
    app = make_app(config)
    worker = start_worker(1)
    task = app.tasks["lab.tells"]
    with task.lock_for("k"):
        result = task.delay("k")
        wait_until(lambda: received(worker, result) > 2, "it has come back twice")
    assert result.get(timeout=30) == "told"
    app.close()


@pytest.mark.parametrize("limit", [1000, 0], ids=["in line", "sent back"], indirect=True)
@pytest.mark.parametrize("protocol", [2, 1])
def test_a_body_that_only_its_own_serializer_can_carry_stays_in_it(config, start_worker, protocol):
    config.settings |= {"accept_content": ["json", "yaml"], "task_protocol": protocol}
    app = make_app(config)
    worker = start_worker(1)
    task = app.tasks["lab.tells"]
    with task.lock_for("k"):
        result = task.apply_async(("k", {"a", "set"}), serializer="yaml")
        wait_in_line(worker, result)
    assert result.get(timeout=20) == "told"
    assert "could not be republished" not in worker.output()
    app.close()


@in_every_way
def test_a_task_that_has_waited_still_has_all_its_own_retries(tasks, start_worker, ledger):
    worker = start_worker(1)
    with tasks.tells.lock_for("k"):
        result = tasks.tells.delay("k", retries=2)  # as many as it may have
        wait_in_line(worker, result)
    assert result.get(timeout=20) == "told"
    assert ledger.items() == ["0", "1", "2"]


@in_every_way
def test_after_lock_wait_for_it_fails_naming_the_holder(config, start_worker, ledger):
    config.settings["redislock_wait_for"] = 0.2
    app = make_app(config)
    start_worker(2)
    task, plain = app.tasks["lab.on_wait"], app.tasks["lab.plain"]
    holder = task.delay("k", "holder", "hangs")
    wait_until(ledger.runs, "the holder runs")
    result = (task.si("k", "duplicate") | plain.s()).apply_async(link_error=plain.si("errback"))
    with pytest.raises(LockConflict) as caught:
        result.parent.get(timeout=20)
    assert caught.value.holder.task_id == holder.id
    assert str(caught.value).endswith("; gave up after 0.2 s in line (lock_wait_for)")
    with pytest.raises(LockConflict):
        result.get(timeout=20)
    wait_until(lambda: [run.key for run in ledger.runs()] == ["k", "plain"], "the errback ran, and no more")
    app.close()


@in_every_way
def test_a_message_that_expires_while_it_waits_is_revoked(tasks, start_worker, ledger):
    start_worker(1)
    with tasks.on_wait.lock_for("k"):
        result = tasks.on_wait.apply_async(("k",), expires=IN_TIME)
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=20)
    assert result.state == states.REVOKED
    assert ledger.runs() == []


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_message_that_expires_while_it_waits_is_not_left_to_the_broker(config, start_worker):
    """RabbitMQ drops what has expired unless a consumer takes it at once: its caller would wait for ever."""
    app = make_app(config)
    start_worker(1)
    task = app.tasks["lab.on_wait"]
    with task.lock_for("k"):
        result = task.apply_async(("k",), expires=IN_TIME)
        app.tasks["lab.plain"].delay()  # so that the worker has fetched all it may
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=20)
    app.close()
