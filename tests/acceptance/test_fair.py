"""Fair turns: customers that share a key take turns, however many messages one of them has sent."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_redislock import LockKeyError
from celery_redislock.cli.commands import locks
from celery_redislock.protocol.names import FIRST_TURN
from celery_redislock.testing import busy
from tests.conftest import on_every_broker, on_every_queue
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import ROOT, kept

KEY = "redislock:{k}"


@contextmanager
def closed(task, permits=2):
    """Nothing begins until the end of the block."""
    with ExitStack() as stack:
        for _ in range(permits):
            stack.enter_context(busy(task.lock_for("k")))
        yield


def waiting(app):
    """The messages that wait in the one worker, in order of their ranks."""
    replies = app.control.broadcast("redislock_waiting", reply=True, limit=1, timeout=5)
    (answer,) = [answer for reply in replies for answer in reply.values()]
    return answer


def places(items, customer):
    """Which of the runs are a customer's, counted from 0."""
    return [place for place, item in enumerate(items) if item.startswith(customer)]


@counts_on_wake_ups("two workers that hear nothing may change their order")
@on_every_broker
def test_customers_take_turns_however_many_messages_one_of_them_has_sent(tasks, start_worker, ledger):
    for _ in range(2):
        start_worker(3)
    task = tasks.by_turns
    with closed(task):
        results = [task.delay("k", "A", number, 0.02) for number in range(60)]
        wait_until(lambda: kept(task.app, 2) == 60, "the flood waits")
        results += [task.delay("k", "B", number, 0.02) for number in range(6)]
        wait_until(lambda: kept(task.app, 2) == 66, "all wait")
    for result in results:
        result.get(timeout=60)
    assert places(ledger.items(), "B")[-1] <= 2 * 6 + 6
    assert len(ledger.items()) == 66
    assert ledger.most_at_once() <= 2


def test_without_turns_the_last_who_came_are_the_last(tasks, start_worker, ledger):
    start_worker(3)
    task = tasks.by_time
    with closed(task):
        results = [task.delay("k", "A", number) for number in range(30)]
        wait_until(lambda: kept(task.app) == 30, "the flood waits")
        results += [task.delay("k", "B", number) for number in range(3)]
        wait_until(lambda: kept(task.app) == 33, "all wait")
    for result in results:
        result.get(timeout=60)
    assert places(ledger.items(), "B")[0] >= 28


def test_a_customer_that_weighs_three_times_as_much_has_three_turns_for_one(tasks, start_worker, ledger):
    start_worker(3)
    task = tasks.by_turns
    with closed(task):
        results = [task.delay("k", "A", number, 0, 3) for number in range(45)]
        results += [task.delay("k", "B", number, 0, 1) for number in range(20)]
        wait_until(lambda: kept(task.app) == 65, "all wait")
    for result in results:
        result.get(timeout=60)
    first = ledger.items()[:40]
    assert 2.5 <= len(places(first, "A")) / len(places(first, "B")) <= 3.5


@counts_on_wake_ups("without them, the block may wait for its key longer than it does")
def test_the_messages_of_a_customer_run_in_their_order_and_an_idle_customer_saves_no_turns(tasks, start_worker, ledger):
    start_worker(2)
    task = tasks.one_by_turns
    with closed(task, 1):
        results = [task.delay("k", "A", number, 0.1) for number in range(20)]
        wait_until(lambda: kept(task.app) == 20, "A waits")
    wait_until(lambda: len(ledger.items()) > 2, "A has had turns, and B none")
    with closed(task, 1):
        before = len(ledger.items())
        results += [task.delay("k", "B", number) for number in range(8)]
        wait_until(lambda: kept(task.app) == 20 - before + 8, "all wait")
    for result in results:
        result.get(timeout=60)
    items = ledger.items()
    assert [item for item in items if item.startswith("A")] == [f"A{number}" for number in range(20)]
    assert [item for item in items if item.startswith("B")] == [f"B{number}" for number in range(8)]
    together = items[before : before + 10]
    assert abs(len(places(together, "A")) - len(places(together, "B"))) <= 2


@on_every_queue
def test_a_room_that_one_customer_has_filled_sends_back_the_last_of_its_messages(config, tasks, start_worker, ledger):
    config.settings["redislock_waiting_limit"] = 10
    worker = start_worker(2)
    task = tasks.by_turns
    with closed(task):
        flood = [task.delay("k", "A", number, 0.02) for number in range(25)]
        wait_until(lambda: "republished the messages" in worker.output(), "the room is full")
        few = [task.delay("k", "B", number, 0.02) for number in range(3)]
        wait_until(lambda: sum(one["id"] in {str(each) for each in few} for one in waiting(task.app)) == 3, "B waits")
        assert len(waiting(task.app)) <= 12
    for result in few:
        result.get(timeout=30)
    assert places(ledger.items(), "B")[-1] <= 12
    for result in flood:
        result.get(timeout=60)
    assert sorted(ledger.items()) == sorted([f"A{number}" for number in range(25)] + ["B0", "B1", "B2"])


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_what_a_dead_worker_leaves_keeps_its_place(tasks, start_worker, ledger):
    """A message that the broker delivers again does not bring its rank, but the lock server knows it."""
    worker = start_worker(2)
    task = tasks.one_by_turns
    with closed(task, 1):
        results = [task.delay("k", customer, number) for number in range(5) for customer in "AB"]
        wait_until(lambda: kept(task.app) == 10, "all wait")
        before = {one["id"]: one["rank"] for one in waiting(task.app)}
        worker.kill()
        start_worker(2)
        wait_until(lambda: kept(task.app) == 10, "all wait again")
        assert {one["id"]: one["rank"] for one in waiting(task.app)} == before
        results.append(task.delay("k", "A", 5))
    for result in results:
        result.get(timeout=30)
    assert ledger.items()[:4] in (["A0", "B0", "A1", "B1"], ["B0", "A0", "B1", "A1"], ["A0", "B0", "B1", "A1"])


def test_what_a_worker_hands_over_keeps_its_place_and_its_group(tasks, start_worker, ledger):
    worker = start_worker(2)
    task = tasks.one_by_turns
    with closed(task, 1):
        results = [task.delay("k", customer, number) for number in range(4) for customer in "AB"]
        wait_until(lambda: kept(task.app) == 8, "all wait")
        before = [(one["id"], one["rank"], one["group"]) for one in waiting(task.app)]
        assert {group for *_, group in before} == {"of A", "of B"}
        assert before[0][1] > FIRST_TURN
        worker.stop()
        start_worker(2)
        wait_until(lambda: kept(task.app) == 8, "all wait again")
        assert sorted((one["id"], one["rank"], one["group"]) for one in waiting(task.app)) == sorted(before)
    for result in results:
        result.get(timeout=30)


def test_a_lock_server_that_loses_its_data_loses_no_message(tasks, start_worker, ledger, locks, gate):
    start_worker(2)
    task = tasks.one_by_turns
    results = [task.delay("k", "A", "first", gate)]
    wait_until(lambda: ledger.running(), "the first one runs")
    results += [task.delay("k", customer, number) for number in range(3) for customer in "AB"]
    wait_until(lambda: kept(task.app) == 6, "all wait")
    locks.client.flushall()
    results += [task.delay("k", "C", number) for number in range(3)]
    gate.open()
    for result in results:
        result.get(timeout=90)
    assert sorted(ledger.items()) == sorted(["Afirst", *(f"{one}{number}" for one in "ABC" for number in range(3))])


def test_a_retry_takes_another_turn(tasks, start_worker, ledger):
    start_worker(2)
    task = tasks.again_by_turns
    with closed(task, 1):
        results = [task.delay("k", "A", "again", 3)]
        wait_until(lambda: kept(task.app) == 1, "it waits")
        results += [task.delay("k", "B", number) for number in range(3)]
        wait_until(lambda: kept(task.app) == 4, "all wait")
    for result in results:
        result.get(timeout=30)
    assert [item for item in ledger.items() if item.startswith("A")] == [f"Aagain{number}" for number in range(4)]


def test_a_task_without_turns_waits_by_time_and_goes_first(tasks, start_worker, ledger):
    start_worker(3)
    task = tasks.by_turns
    with closed(task):
        results = [task.delay("k", "A", number) for number in range(8)]
        wait_until(lambda: kept(task.app) == 8, "A waits")
        results += [tasks.by_time.delay("k", "T", number) for number in range(2)]
        wait_until(lambda: kept(task.app) == 10, "all wait")
    for result in results:
        result.get(timeout=30)
    assert places(ledger.items(), "T")[-1] <= 4


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (0.05, "lock_weight must return a number from 0.1 to 100, not 0.05"),
        (101, "lock_weight must return a number from 0.1 to 100, not 101"),
        ("secret", "lock_weight must return a number from 0.1 to 100, not a str"),
        (0, "lock_weight raised ZeroDivisionError in fair.py, line"),
    ],
)
def test_a_weight_that_is_none_fails_the_run_and_is_not_told(tasks, start_worker, weight, text):
    worker = start_worker(1)
    with pytest.raises(LockKeyError, match=text):
        tasks.by_turns.delay("k", "A", 0, 0, weight).get(timeout=20)
    assert "secret" not in worker.output()


def test_the_number_of_a_message_stays_when_the_line_has_run_empty_but_for_no_longer_than_a_day(
    tasks, start_worker, locks
):
    start_worker(2)
    with closed(tasks.by_turns):
        results = [tasks.by_turns.delay("k", "AB"[number % 2], number) for number in range(20)]
        wait_until(lambda: kept(tasks.by_turns.app) == 20, "they wait")
    for result in results:
        result.get(timeout=20)
    wait_until(lambda: locks.client.keys() == [f"{KEY}:fair".encode()], "nothing else is left")
    assert locks.client.zcard(f"{KEY}:fair") >= 20
    assert 0 < locks.client.ttl(f"{KEY}:fair") <= 86_400


def test_the_value_of_a_group_is_told_to_nobody_unless_a_template_shows_it(tasks, start_worker, locks):
    worker = start_worker(2)
    with closed(tasks.by_turns):
        hidden = tasks.by_turns.delay("k", "Erika Mustermann")
        wait_until(lambda: kept(tasks.by_turns.app) == 1, "it waits")
        (one,) = waiting(tasks.by_turns.app)
        assert len(one["group"]) == 16
        kept_in_redis = str([locks.client.zrange(f"{KEY}:fair", 0, -1), [*locks.client.scan_iter()]])
    hidden.get(timeout=20)
    for told in (one, kept_in_redis, worker.output()):
        assert "Erika" not in str(told)


def test_what_the_page_says_that_show_prints_of_two_runs_and_three_who_wait_is_what_it_prints(
    tasks, app, start_worker, running, gate
):
    page = (ROOT / "docs" / "fair-turns.md").read_text(encoding="utf-8")
    ((key, shown),) = re.findall(r"\$ celery -A shop locks show '(.*)'\n((?:.+\n)+?)```", page)
    start_worker(3)
    for number in range(2):
        tasks.by_turns.delay("k", "A", number, str(gate))
        running(f"A{number}")
    for customer in ("A", "A", "B"):
        tasks.by_turns.delay("k", customer)
    wait_until(lambda: kept(app) == 3, "all wait")
    context = CLIContext(app, no_color=True, workdir=None)
    said = CliRunner().invoke(locks, ["show", KEY, "--timeout=10"], obj=context).output
    gate.open()
    assert without_values(shown.replace(key, KEY)) == without_values(said)


def without_values(lines):
    """Without ids, digests, hosts and times."""
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}|[0-9a-f]{16}|\w+@[\w-]+|[\d-]{10} [\d:]{8}|[\d.]+s\b", "...", lines)
