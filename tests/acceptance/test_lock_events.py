"""The events of locks, as any consumer of Celery's events hears them; and what Celery's own monitors make of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.events.state import State

from tests.lab.servers import running as program
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT, kept

#: What Celery adds to each event.
CELERYS = {"type", "hostname", "utcoffset", "pid", "clock", "local_received", "timestamp"}
Heard = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def state() -> State:
    """What Celery's monitors know."""
    return State()


@pytest.fixture
def heard(app, state) -> Iterator[Heard]:
    """The events about a task so far, or about all tasks: those of locks, or with ``of="task"`` those of Celery."""
    events: list[dict[str, Any]] = []
    ready = threading.Event()

    def hear(event: dict[str, Any]) -> None:
        events.append(dict(event))
        state.event(event)

    connection = app.connection_for_read()
    receiver = app.events.Receiver(connection, handlers={"*": hear})
    receiver.on_consume_ready = lambda *_, **__: ready.set()
    listener = threading.Thread(target=receiver.capture, kwargs={"wakeup": False}, daemon=True)
    listener.start()
    assert ready.wait(20)

    def look(result: Any = None, of: str = "redislock") -> list[dict[str, Any]]:
        mine = events if result is None else [event for event in events if event.get("uuid") == result.id]
        return [event for event in mine if event["type"].startswith(f"{of}-")]

    yield look
    receiver.should_stop = True
    listener.join(20)
    connection.release()


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].partition("-")[2] for event in events]


def about(event: dict[str, Any]) -> dict[str, Any]:
    """What the plugin itself says."""
    return {name: value for name, value in event.items() if name not in CELERYS}


def test_a_run_tells_that_it_has_acquired_and_released_its_lock_and_for_how_long_it_held_it(tasks, start_worker, heard):
    start_worker(2, "-E")
    result = tasks.work.delay("k", "a secret", 0.5)
    wait_until(lambda: len(heard(result)) == 2, "both are heard")
    acquired, released = heard(result)
    assert names(heard(result)) == ["acquired", "released"]
    key = tasks.work.lock_for("k").name
    common = {"uuid": result.id, "name": "lab.work", "key": key}
    assert about(acquired) == {**common, "waited": 0.0}
    assert about(released) == {**common, "held": released["held"]}
    assert 0.5 <= released["held"] == pytest.approx(released["timestamp"] - acquired["timestamp"], abs=0.2)
    assert acquired["hostname"] == released["hostname"] == "w0@lab"
    assert "a secret" not in str(heard())


def test_a_run_that_waits_names_the_holder_and_then_tells_how_long_it_has_waited(
    tasks, app, start_worker, heard, running, gate
):
    start_worker(2, "-E")
    first = tasks.work.delay("k", "first", gate)
    running("first")
    wait_until(lambda: names(heard(first)) == ["acquired"], "it is told while the run goes on")
    second = tasks.work.delay("k", "second")
    wait_until(lambda: heard(second), "it is told that the second waits")
    assert kept(app) == 1
    (waiting,) = heard(second)
    key = tasks.work.lock_for("k").name
    assert waiting["type"] == "redislock-waiting"
    assert about(waiting) == {
        "uuid": second.id, "name": "lab.work", "key": key, "policy": "wait", "holder": first.id,
    }  # fmt: skip
    gate.open()
    wait_until(lambda: names(heard(second)) == ["waiting", "acquired", "released"], "the second has run")
    acquired = heard(second)[1]
    assert acquired["waited"] == pytest.approx(acquired["timestamp"] - waiting["timestamp"], abs=1)


def test_a_run_that_its_policy_ends_is_skipped_and_one_that_it_refuses_has_only_celerys_event(
    tasks, start_worker, heard
):
    start_worker(1, "-E")
    with tasks.on_skip.lock_for("k"), tasks.on_raise.lock_for("r"):
        skipped, refused = tasks.on_skip.delay("k"), tasks.on_raise.delay("r")
        wait_until(lambda: "task-failed" in [event["type"] for event in heard(refused, of="task")], "both have ended")
    (event,) = heard(skipped)
    assert event["type"] == "redislock-skipped"
    assert event["reason"].startswith("duplicate of a lock outside tasks")
    assert (event["policy"], event["holder"], event["key"]) == ("skip", None, tasks.on_skip.lock_for("k").name)
    assert heard(refused) == []


def test_a_lost_lock_is_told_while_its_run_goes_on(tasks, start_worker, locks, heard, running, gate):
    start_worker(1, "-E")
    result = tasks.work.delay("k", "item", gate)
    running("item")
    locks.client.delete(tasks.work.lock_for("k").name)
    wait_until(lambda: names(heard(result)) == ["acquired", "lost"], "the loss is told")
    assert heard(result)[1]["reason"] == "its key was deleted, expired or taken"
    gate.open()


def test_in_a_pool_of_threads_the_same_is_told(tasks, start_worker, heard):
    start_worker(2, "-E", "-P", "threads")
    result = tasks.work.delay("k", "item")
    wait_until(lambda: names(heard(result)) == ["acquired", "released"], "both are heard")


def test_celerys_own_state_is_as_if_there_were_none_of_them(tasks, start_worker, heard, state, running, gate):
    start_worker(2, "-E")
    first = tasks.work.delay("k", "first", gate)
    running("first")
    wait_until(lambda: heard(first) and state.tasks.get(first.id), "it has begun")
    assert state.tasks[first.id].state == "STARTED"
    second = tasks.work.delay("k", "second")
    wait_until(lambda: heard(second), "the second waits")
    wait_until(lambda: state.tasks[second.id].state == "RETRY", "Celery knows that it waits")
    gate.open()
    wait_until(lambda: len(heard()) == 5, "both have run")
    wait_until(lambda: {task.state for task in state.tasks.values()} == {"SUCCESS"}, "both have ended")
    assert state.tasks.keys() == {first.id, second.id}


def test_a_worker_without_task_events_tells_nothing(tasks, start_worker, heard):
    start_worker(1)
    result = tasks.work.delay("k", "item")
    result.get(timeout=20)
    with tasks.on_skip.lock_for("k"):
        skipped = tasks.on_skip.delay("k")
        wait_until(lambda: skipped.state == "REVOKED", "it is skipped")
    assert heard() == heard(of="task") == []


def test_celerys_own_dump_shows_them(config, tasks, start_worker, tmp_path):
    start_worker(1, "-E")
    log = tmp_path / "dump.log"
    env = {"LAB_CONFIG": config.dump(), "LAB_READY": str(tmp_path / "ready"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", "-m", "celery", "-A", "tests.lab.worker", "events", "--dump"]
    with program(command, log, env):

        def shows() -> bool:
            tasks.work.delay("k", "item").get(timeout=20)
            return all(f"redislock {event}: " in log.read_text() for event in ("acquired", "released"))

        wait_until(shows, "both events are shown", 60)
    lines = [line for line in log.read_text().splitlines() if "redislock" in line]
    assert any(
        "w0@lab" in line and "redislock acquired: " in line and "key=redislock:{lab.work:" in line for line in lines
    )
