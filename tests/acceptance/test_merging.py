"""Calls that are merged into the message that waits in the queue, with real workers."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from threading import Thread

import pytest
from celery import Task, chain, chord, group, states
from celery.exceptions import TaskRevokedError, WorkerLostError
from kombu.exceptions import OperationalError

from celery_redislock import LockConfigError, LockUnavailable
from celery_redislock.protocol.names import keys_of
from tests.conftest import IS_MATRIX, on_every_broker
from tests.lab.servers import need, need_pool, wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

PATIENCE = 30
#: With these a publish fails at once where the broker does not answer.
NO_RETRIES = {"max_retries": 1, "interval_start": 0, "interval_step": 0}


def received(app, task_id):
    """Whether a worker has the message: one that waits or sleeps in its room is not among Celery's own."""
    return kept(app) > 0 or any((app.control.inspect(timeout=1).query_task(task_id) or {}).values())


@pytest.fixture
def while_nobody_fetches(app, config):
    """In the block, the only worker fetches nothing: what is published waits in the queue, however slow the test is."""

    @contextmanager
    def leave_the_queue():
        app.control.cancel_consumer(config.queue, reply=True, limit=1, timeout=10)
        app.control.ping(limit=1, timeout=10)  # by now it has given back what it was taking when it was told
        yield
        app.control.add_consumer(config.queue, reply=True, limit=1, timeout=10)

    return leave_the_queue


@pytest.fixture
def held(tasks, start_worker, running, gate):
    """A worker, and a run that holds the key until the gate opens."""

    def hold(task, **options):
        start_worker(3)
        holder = task.apply_async(("k", "holder", str(gate)), task_id="holder", **options)
        running("holder")
        return holder

    return hold


class TestLatest:
    @on_every_broker
    def test_the_run_has_the_arguments_of_the_last_call_and_every_caller_its_result(
        self, tasks, held, ledger, gate, nothing_is_left
    ):
        held(tasks.latest)
        calls = [tasks.latest.delay("k", number) for number in range(5)]
        assert [call.duplicate for call in calls] == [False, True, True, True, True]
        assert {call.id for call in calls} == {calls[0].id}
        gate.open()
        assert [call.get(timeout=PATIENCE) for call in calls] == [4] * 5
        assert ledger.items() == ["holder", "4"]
        nothing_is_left()

    @on_every_broker
    def test_a_call_after_the_start_is_a_message_of_its_own(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        first = tasks.latest.delay("k", "first", str(gate))
        running("first")
        second, third = tasks.latest.delay("k", "second"), tasks.latest.delay("k", "third")
        assert (first.id != second.id, second.id == third.id) == (True, True)
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (first, second, third)] == ["first", "third", "third"]
        assert ledger.items() == ["first", "third"]

    @on_every_broker
    def test_a_child_that_dies_is_followed_by_a_run_with_equal_arguments(
        self, tasks, held, ledger, gate, tmp_path, nothing_is_left
    ):
        held(tasks.latest)
        for number in range(3):
            result = tasks.latest.delay("k", number, 0, "dies", str(tmp_path / "died"))
        gate.open()
        assert result.get(timeout=PATIENCE) == 2
        assert ledger.items() == ["holder", "2", "2"]

    @on_every_broker
    def test_a_retry_is_superseded_by_a_newer_call_that_has_begun(
        self, app, tasks, start_worker, running, gate, ledger, while_nobody_fetches
    ):
        start_worker(2)
        stale = tasks.latest.delay("k", "stale", str(gate), "retry")
        running("stale")
        newer = tasks.latest.delay("k", "newer")
        wait_until(lambda: kept(app) == 1, "the newer one waits in the worker")
        with while_nobody_fetches():
            gate.open()
            assert newer.get(timeout=PATIENCE) == "newer"
        with pytest.raises(TaskRevokedError, match=f"superseded by {newer.id}"):
            stale.get(timeout=PATIENCE)
        assert ledger.items() == ["stale", "newer"]

    @on_every_broker
    def test_a_retry_takes_the_place_and_gets_later_arguments(self, tasks, start_worker, running, gate, ledger):
        start_worker(2)
        first = tasks.latest.delay("k", "first", str(gate), "retry", "4")
        running("first")
        gate.open()
        wait_until(lambda: first.state == states.RETRY, "it has called retry")
        later = tasks.latest.delay("k", "later")
        assert (later.id, later.duplicate) == (first.id, True)
        assert first.get(timeout=PATIENCE) == "later"
        assert ledger.items() == ["first", "later"]

    @pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost came with Celery 5.7")
    def test_the_retry_that_celery_publishes_for_a_lost_run_has_equal_arguments(
        self, tasks, held, ledger, gate, tmp_path
    ):
        held(tasks.latest_again)
        for number in range(3):
            result = tasks.latest_again.delay("k", number, 0, "dies", str(tmp_path / "died"))
        gate.open()
        assert result.get(timeout=PATIENCE) == 2
        assert ledger.items() == ["holder", "2", "2"]


class TestARetry:
    @on_every_broker
    def test_that_takes_the_place_has_all_calls_and_leaves_nothing(
        self, tasks, start_worker, running, gate, ledger, nothing_is_left
    ):
        start_worker(2)
        first = tasks.collected.delay("k", "first", str(gate), "retry", "4")
        running("first")
        gate.open()
        wait_until(lambda: first.state == states.RETRY, "it has called retry")
        later = tasks.collected.delay("k", "later", how="calls")
        assert later.id == first.id
        assert first.get(timeout=PATIENCE) == ["first", "later"]
        nothing_is_left()

    @on_every_broker
    def test_whose_place_is_taken_keeps_its_own_calls_and_leaves_nothing(
        self, tasks, start_worker, running, gate, ledger, nothing_is_left
    ):
        start_worker(2)
        first = tasks.collected.delay("k", "first", str(gate), "retry", "0")
        running("first")
        others = [tasks.collected.delay("k", number, how="calls") for number in range(2)]
        gate.open()
        assert others[1].get(timeout=PATIENCE) == [0, 1]
        assert first.get(timeout=PATIENCE) == "first"
        nothing_is_left()

    @on_every_broker
    @pytest.mark.parametrize("countdown", [0, 3])
    @pytest.mark.parametrize(
        ("name", "gets"), [("latest_put_off", slice(-1, None)), ("collected_put_off", slice(None))]
    )
    def test_that_is_sent_before_its_run_asks_for_the_key_has_the_calls_that_were_merged_into_it(
        self, tasks, start_worker, nothing_is_left, name, gets, countdown
    ):
        task, items = getattr(tasks, name), ["first", "second", "third"]
        results = [task.delay("k", item, countdown, "calls") for item in items]
        start_worker(2)
        if countdown:
            wait_until(lambda: results[0].state == states.RETRY, "it has called retry")
            items.append("fourth")
            results.append(task.delay("k", "fourth", countdown, "calls"))
        assert len({result.id for result in results}) == 1
        assert results[0].get(timeout=PATIENCE) == items[gets]
        nothing_is_left()

    @on_every_broker
    def test_that_is_revoked_while_it_waits_revokes_what_was_merged_into_it(
        self, app, tasks, start_worker, running, gate, ledger
    ):
        worker = start_worker(2)
        first = tasks.latest.delay("k", "first", str(gate), "retry", "60")
        running("first")
        gate.open()
        wait_until(lambda: first.state == states.RETRY, "it has called retry")
        merged = tasks.latest.delay("k", "merged")
        assert merged.id == first.id
        wait_until(lambda: worker.output().count(f"[{first.id}] received") == 2, "the worker has the retry")
        app.control.revoke(first.id, reply=True, limit=1, timeout=5)
        with pytest.raises(TaskRevokedError):
            merged.get(timeout=PATIENCE)
        assert tasks.latest.delay("k", "next").get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["first", "next"]


class TestAll:
    @on_every_broker
    def test_the_run_has_the_arguments_of_each_call_in_order(self, tasks, held, ledger, gate, nothing_is_left):
        held(tasks.collected)
        calls = [tasks.collected.delay("k", number, how="calls") for number in range(5)]
        gate.open()
        assert [call.get(timeout=PATIENCE) for call in calls] == [[0, 1, 2, 3, 4]] * 5
        nothing_is_left()


class TestDebounce:
    @on_every_broker
    def test_one_run_follows_the_last_call(self, tasks, start_worker, ledger):
        start_worker(2)
        calls = [tasks.debounced_long.delay("k", number) for number in range(20)]
        assert [call.get(timeout=PATIENCE) for call in calls] == [19] * 20
        assert ledger.items() == ["19"]


class TestACallWhoseIdMatters:
    """It is sent with its own arguments, takes no place, and waits in line."""

    @on_every_broker
    @pytest.mark.parametrize("how", ["task_id", "link", "link_error", "chain", "group", "header", "chord body"])
    def test_keeps_its_arguments(self, tasks, held, ledger, gate, nothing_is_left, how):
        held(tasks.latest)
        task, plain = tasks.latest, tasks.plain
        ticket = task.delay("k", "ticket")
        publish = {
            "task_id": lambda: task.apply_async(("k", "own"), task_id="mine"),
            "link": lambda: task.apply_async(("k", "own"), link=plain.si()),
            "link_error": lambda: task.apply_async(("k", "own"), link_error=plain.si()),
            "chain": lambda: chain(task.si("k", "own"), plain.si()).apply_async(),
            "group": lambda: group(task.si("k", "own"), plain.si()).apply_async(),
            "header": lambda: chord([task.si("k", "own"), plain.si()])(plain.si()),
            "chord body": lambda: chord([plain.si(), plain.si()])(task.si("k", "own")),
        }[how]
        result = publish()
        if how == "chord body":
            wait_until(lambda: not result.parent or result.parent.ready(), "the header has run")
        later = task.delay("k", "later")
        assert (later.id, later.duplicate) == (ticket.id, True)
        gate.open()
        result.get(timeout=PATIENCE)
        assert ticket.get(timeout=PATIENCE) == "later"
        assert next(item for item in ledger.items() if not item.isdigit()) == "holder"
        assert {"own", "later"} <= set(ledger.items())
        assert "ticket" not in ledger.items()
        nothing_is_left()

    @on_every_broker
    def test_the_links_of_a_failed_message_are_called_once(self, tasks, held, ledger, gate):
        held(tasks.latest)
        result = tasks.latest.apply_async(("k", "own", 0, "failure"), link_error=tasks.plain.si())
        ticket = tasks.latest.delay("k", "ticket")
        gate.open()
        assert ticket.get(timeout=PATIENCE) == "ticket"
        with pytest.raises(ValueError, match="own fails"):
            result.get(timeout=PATIENCE)


class TestATicketThatDoesNotRun:
    @on_every_broker
    def test_is_revoked_for_all_its_callers_and_the_next_call_is_sent(
        self, app, tasks, held, ledger, gate, nothing_is_left
    ):
        held(tasks.latest)
        calls = [tasks.latest.delay("k", number) for number in range(3)]
        wait_until(lambda: kept(app) == 1, "it waits")
        app.control.revoke(calls[0].id, reply=True, limit=1, timeout=5)
        for call in calls:
            with pytest.raises(TaskRevokedError):
                call.get(timeout=PATIENCE)
        following = tasks.latest.delay("k", "next")
        assert (following.duplicate, following.id == calls[0].id) == (False, False)
        gate.open()
        assert following.get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["holder", "next"]
        nothing_is_left()

    @on_every_broker
    def test_is_revoked_while_it_sleeps(self, app, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        first = tasks.debounced_long.delay("k", "first")
        assert tasks.debounced_long.delay("k", "second").id == first.id
        wait_until(lambda: received(app, first.id), "the worker has it")
        app.control.revoke(first.id, reply=True, limit=1, timeout=5)
        with pytest.raises(TaskRevokedError):
            first.get(timeout=PATIENCE)
        following = tasks.debounced_long.delay("k", "next")
        assert following.id != first.id
        assert following.get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["next"]
        nothing_is_left()

    @on_every_broker
    def test_expires_if_all_its_calls_do(self, tasks, held, ledger, gate, nothing_is_left):
        held(tasks.latest)
        first = tasks.latest.apply_async(("k", "first"), expires=2)
        last = tasks.latest.apply_async(("k", "last"), expires=2.1)
        over = time.time() + 2.1
        assert last.id == first.id
        wait_until(lambda: time.time() > over, "both have expired")
        gate.open()
        with pytest.raises(TaskRevokedError, match="expired"):
            last.get(timeout=PATIENCE)
        assert tasks.latest.delay("k", "next").get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["holder", "next"]
        nothing_is_left()

    @on_every_broker
    @pytest.mark.parametrize("expires", [(2, None), (None, 2)], ids=["the first does", "the last does"])
    def test_does_not_expire_if_one_of_its_calls_does_not(self, tasks, held, ledger, gate, nothing_is_left, expires):
        held(tasks.latest)
        first = tasks.latest.apply_async(("k", "first"), expires=expires[0])
        last = tasks.latest.apply_async(("k", "last"), expires=expires[1])
        over = time.time() + 2
        assert last.id == first.id
        wait_until(lambda: time.time() > over, "one of them has expired")
        gate.open()
        assert last.get(timeout=PATIENCE) == "last"
        nothing_is_left()

    @on_every_broker
    def test_whose_place_has_expired_runs_or_is_superseded_but_never_after_a_newer_one(
        self, tasks, start_worker, ledger, locks
    ):
        first, merged = (tasks.latest_brief.delay("k", item) for item in ("first", "merged"))
        place = keys_of(tasks.latest_brief.lock_for("k").name).queued
        wait_until(lambda: not locks.client.exists(place), "the place has expired")
        second, last = (tasks.latest_brief.delay("k", item) for item in ("second", "last"))
        assert (first.id == merged.id, second.id == last.id, first.id == second.id) == (True, True, False)
        start_worker(2)
        assert last.get(timeout=PATIENCE) == "last"
        with suppress(TaskRevokedError):
            assert first.get(timeout=PATIENCE) == "merged"
        assert ledger.items() in [["last"], ["merged", "last"]]

    @on_every_broker
    def test_that_was_acked_early_dies_for_all_callers_and_holds_nothing_up(self, tasks, held, ledger, gate, tmp_path):
        held(tasks.latest_early)
        calls = [tasks.latest_early.delay("k", number, 0, "dies", str(tmp_path / "died")) for number in range(2)]
        gate.open()
        for call in calls:
            with pytest.raises(WorkerLostError):
                call.get(timeout=PATIENCE)
        assert tasks.latest_early.delay("k", "next").get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["holder", "1", "next"]

    @on_every_broker
    def test_that_fails_gives_its_error_to_all_callers(self, tasks, held, gate, nothing_is_left):
        held(tasks.latest)
        calls = [tasks.latest.delay("k", number, 0, "failure") for number in range(3)]
        gate.open()
        for call in calls:
            with pytest.raises(ValueError, match="2 fails"):
                call.get(timeout=PATIENCE)
        nothing_is_left()


class TestOptionsOfTheCall:
    @on_every_broker
    def test_a_longer_countdown_of_the_last_call_counts(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        began = time.monotonic()
        first = tasks.latest.apply_async(("k", "first"), countdown=1)
        last = tasks.latest.apply_async(("k", "last"), countdown=3)
        assert last.id == first.id
        assert last.get(timeout=PATIENCE) == "last"
        assert ledger.runs()[0].start - began >= 3
        assert ledger.items() == ["last"]
        nothing_is_left()

    def test_a_shorter_countdown_does_not_shorten_the_life_of_what_is_kept(self, tasks, locks):
        """The message comes only when the longer one is over."""
        days = 5 * 86_400
        for task in (tasks.latest, tasks.collected):
            first = task.apply_async(("k", "first"), countdown=days)
            assert task.delay("k", "last").id == first.id
            keys = keys_of(task.lock_for("k").name)
            for name in (keys.queued, keys.queued.replace(":queued", ":pending")):
                assert locks.client.pttl(name) > days * 1000

    @on_every_broker
    def test_each_priority_is_allowed(self, tasks, held, gate):
        held(tasks.latest)
        calls = [tasks.latest.apply_async(("k", number), priority=number) for number in range(3)]
        gate.open()
        assert [call.get(timeout=PATIENCE) for call in calls] == [2, 2, 2]

    @on_every_broker
    @pytest.mark.parametrize("serializer", ["json", "yaml"])
    def test_serializers_may_differ_from_call_to_call(self, config, tasks, start_worker, ledger, serializer):
        need(serializer)
        config.settings["accept_content"] = ["json", serializer]
        calls = [
            tasks.latest.apply_async(("k", number), serializer=name) for number, name in ((1, "json"), (2, serializer))
        ]
        calls += [
            tasks.collected.apply_async(("k", n), {"how": "calls"}, serializer=name)
            for n, name in ((1, "json"), (2, serializer))
        ]
        start_worker(2)
        assert [call.get(timeout=PATIENCE) for call in calls] == [2, 2, [1, 2], [1, 2]]

    @pytest.mark.parametrize("serializer", ["pickle", "application/x-python-serialize"])
    def test_pickle_is_refused(self, tasks, locks, serializer):
        with pytest.raises(LockConfigError, match=r"pickle|python-serialize"):
            tasks.latest.apply_async(("k", "first"), serializer=serializer)
        assert locks.client.keys() == []

    @on_every_broker
    def test_a_body_above_64_KiB_is_sent_alone(self, tasks, held, ledger, gate, nothing_is_left):
        held(tasks.latest)
        ticket, large = tasks.latest.delay("k", "ticket"), tasks.latest.delay("k", "x" * 65_536)
        last = tasks.latest.delay("k", "last")
        assert (large.duplicate, large.id == ticket.id, last.id == ticket.id) == (False, False, True)
        gate.open()
        assert (large.get(timeout=PATIENCE), last.get(timeout=PATIENCE)) == ("x" * 65_536, "last")
        nothing_is_left()

    @on_every_broker
    def test_a_body_of_almost_64_KiB_is_merged(self, tasks, held, gate, nothing_is_left):
        held(tasks.latest)
        ticket, large = tasks.latest.delay("k", "ticket"), tasks.latest.delay("k", "x" * 65_000)
        assert large.id == ticket.id
        gate.open()
        assert large.get(timeout=PATIENCE) == "x" * 65_000
        nothing_is_left()


class TestInThisProcess:
    @pytest.mark.parametrize("is_always", [False, True])
    def test_an_eager_run_has_the_one_call(self, app, tasks, is_always):
        app.conf.task_always_eager = is_always
        call = tasks.collected.delay if is_always else lambda *args, **kwargs: tasks.collected.apply(args, kwargs)
        assert call("k", "item", how="calls").get() == ["item"]
        app.conf.task_always_eager = False


class TestTheLockServer:
    @on_every_broker
    def test_that_is_emptied_lets_the_ticket_run_with_its_own_arguments(self, tasks, held, locks, ledger, gate):
        held(tasks.latest)
        ticket = tasks.latest.delay("k", "own")
        assert tasks.latest.delay("k", "later").id == ticket.id
        locks.client.flushall()
        assert ticket.get(timeout=PATIENCE) == "own"
        gate.open()
        assert tasks.latest.delay("k", "next").get(timeout=PATIENCE) == "next"

    @pytest.mark.parametrize("how", ["retry", "run", "raise"])
    def test_out_of_reach_sends_a_call_alone_or_raises(
        self, tasks, lock_proxy, start_worker, ledger, nothing_is_left, how
    ):
        task = {"retry": tasks.latest_retry, "run": tasks.latest_run, "raise": tasks.latest_raise}[how]
        lock_proxy.refuse()
        if how == "raise":
            with pytest.raises(LockUnavailable):
                task.delay("k", "first")
        else:
            assert task.delay("k", "first").duplicate is False
        lock_proxy.mend()
        start_worker(2)
        with suppress(LockUnavailable):  # an outage is over only when it was looked for again
            task.delay("k", "second")
        time.sleep(1)
        assert task.delay("k", "third").get(timeout=PATIENCE) == "third"
        if how != "raise":
            wait_until(lambda: "first" in ledger.items(), "the first ran too")
        nothing_is_left()

    @pytest.mark.parametrize("name", [":pending", ":newest"])
    @pytest.mark.parametrize("kind", ["string", "list", "hash"])
    def test_with_a_foreign_value_stops_no_more_than_its_own_key(self, tasks, start_worker, ledger, locks, name, kind):
        worker = start_worker(2)
        key = keys_of(tasks.latest_raise.lock_for("k").name).queued.replace(":queued", name)
        store = {
            "string": lambda: locks.client.set(key, "nonsense"),
            "list": lambda: locks.client.rpush(key, "nonsense"),
            "hash": lambda: locks.client.hset(key, "claim", "nonsense"),
        }[kind]
        store()
        with suppress(LockUnavailable):
            tasks.latest.delay("k", "odd")
        other = tasks.latest.delay("other", "other")
        assert other.get(timeout=PATIENCE) == "other"
        locks.client.delete(key)
        assert tasks.latest.delay("k", "next").get(timeout=PATIENCE) == "next"
        assert "Traceback" not in worker.output()

    @pytest.mark.parametrize("field", ["1", "bodies", "number", "due", "expires", "count", "first", "job", "claim"])
    @pytest.mark.parametrize("value", ["", "nonsense", "application/json utf-8\n[", str(10**30), "-1", "nan"])
    def test_a_damaged_field_costs_no_more_than_that_run(
        self, tasks, held, ledger, gate, locks, field, value, nothing_is_left
    ):
        held(tasks.latest)
        first = tasks.latest.delay("k", "first")
        (pending,) = locks.client.keys("*:pending")
        locks.client.hset(pending, field, value)
        with suppress(LockUnavailable):
            tasks.latest.delay("k", "second")
        locks.client.hset(pending, field, value)
        gate.open()
        with suppress(Exception):
            first.get(timeout=3)
        assert tasks.latest.delay("k", "next").get(timeout=PATIENCE) == "next"
        assert tasks.latest.delay("other", "other").get(timeout=PATIENCE) == "other"

    @pytest.mark.parametrize("number", [1, 2**53 - 1, 2**53, -1, 1e300, "1", None, [1], True])
    def test_a_forged_number_in_a_header_disturbs_no_later_call(
        self, app, tasks, start_worker, ledger, locks, number, nothing_is_left
    ):
        start_worker(2)
        tasks.latest.delay("k", "before").get(timeout=PATIENCE)
        forged = app.send_task("lab.latest", ("k", "forged"), headers={"redislock": {"number": number}})
        with suppress(TaskRevokedError):
            forged.get(timeout=PATIENCE)
        for item in ("after", "last"):
            assert tasks.latest.delay("k", item).get(timeout=PATIENCE) == item
        calls = [tasks.collected.delay("k", number, how="calls") for number in range(2)]
        assert calls[1].get(timeout=PATIENCE)[-1] == 1


class TestTheBroker:
    def test_out_of_reach_gives_the_first_caller_the_error_and_the_next_one_the_place(
        self, config, broker_proxy, tasks, start_worker, ledger, nothing_is_left
    ):
        config.settings["broker_transport_options"] = NO_RETRIES
        broker_proxy.refuse()
        with pytest.raises(OperationalError):
            tasks.latest.delay("k", "lost")
        broker_proxy.mend()
        following = tasks.latest.delay("k", "next")
        assert following.duplicate is False
        start_worker(2)
        assert following.get(timeout=PATIENCE) == "next"
        assert ledger.items() == ["next"]
        nothing_is_left()

    def test_while_a_publish_is_about_to_fail_nothing_is_merged_into_it(
        self, app, tasks, start_worker, ledger, monkeypatch, nothing_is_left
    ):
        send, others = app.amqp.send_task_message, []
        is_first = iter([True])

        def fails_late(*args, **options):
            if not next(is_first, False):
                return send(*args, **options)
            other = Thread(target=lambda: others.append(tasks.latest.delay("k", "meanwhile")))
            other.start()
            time.sleep(0.3)
            assert others == []
            raise OperationalError

        monkeypatch.setattr(app.amqp, "send_task_message", fails_late)
        with pytest.raises(OperationalError):
            tasks.latest.delay("k", "lost")
        wait_until(lambda: others, "the other call is answered")
        assert others[0].duplicate is False
        start_worker(2)
        assert others[0].get(timeout=PATIENCE) == "meanwhile"
        assert ledger.items() == ["meanwhile"]
        nothing_is_left()


class TestAWarmShutdown:
    @on_every_broker
    @pytest.mark.parametrize("how", ["sleeps", "waits"])
    def test_gives_a_ticket_to_another_worker_with_the_latest_arguments(
        self, app, tasks, start_worker, running, ledger, gate, nothing_is_left, how
    ):
        task = tasks.debounced_long if how == "sleeps" else tasks.latest
        first_worker = start_worker(2)
        if how == "waits":
            task.delay("k", "holder", str(gate))
            running("holder")
        ticket = task.delay("k", "first")
        wait_until(lambda: received(app, ticket.id), "the worker has it")
        assert task.delay("k", "second").id == ticket.id
        first_worker.begin_to_stop()
        gate.open()
        first_worker.wait()
        last = task.delay("k", "last")
        start_worker(2)
        assert last.get(timeout=PATIENCE) == "last"
        assert ledger.items()[-1] == "last"
        assert "first" not in ledger.items()
        nothing_is_left()


class TestOtherOptions:
    @on_every_broker
    def test_a_cooldown_and_a_fence_go_with_it(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        first = tasks.latest_cooled.delay("k", "first", str(gate), "fence")
        running("first")
        calls = [tasks.latest_cooled.delay("k", number, 0, "fence") for number in range(3)]
        gate.open()
        fences = [first.get(timeout=PATIENCE), calls[2].get(timeout=PATIENCE)]
        assert fences[0] < fences[1]
        assert ledger.items() == ["first", "2"]
        assert ledger.runs()[1].start - ledger.runs()[0].end >= 1

    @pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
    def test_in_each_pool(self, tasks, start_worker, ledger, pool):
        need_pool(pool)
        calls = [tasks.latest.delay("k", number) for number in range(5)]
        others = [tasks.collected.delay("k", number, how="calls") for number in range(5)]
        start_worker(2, "-P", pool)
        assert [call.get(timeout=PATIENCE) for call in calls] == [4] * 5
        assert others[0].get(timeout=PATIENCE) == [0, 1, 2, 3, 4]
        slept = [tasks.debounced.delay("k", number) for number in range(5)]
        assert slept[0].get(timeout=PATIENCE) == 4


class TestDebounceOfManyCalls:
    @on_every_broker
    def test_one_run_begins_four_seconds_after_the_last_of_fifty_calls(self, tasks, start_worker, ledger):
        start_worker(2)
        for number in range(50):
            asked_at = time.monotonic()
            result = tasks.debounced_long.delay("k", number)
            time.sleep(0.02)
        assert result.get(timeout=PATIENCE) == 49
        (run,) = ledger.runs()
        print(f"{run.start - asked_at:.3f} s after the last call")
        assert run.start - asked_at >= 4

    @on_every_broker
    def test_a_maximum_lets_one_run_every_two_seconds_while_calls_go_on(
        self, tasks, start_worker, ledger, nothing_is_left
    ):
        """Where the machine pauses for half a second between two calls, one may begin sooner."""
        start_worker(2)
        asked_at, first_asked_at, results = [], {}, []

        def three_have_run():
            asked_at.append(time.monotonic())
            results.append(tasks.debounced_max.delay("k", len(results)))
            first_asked_at.setdefault(results[-1].id, asked_at[-1])
            return len(ledger.runs()) >= 3

        wait_until(three_have_run, "three have run, though there was a call at each look")
        assert results[-1].get(timeout=PATIENCE) == len(results) - 1
        for run in ledger.runs():
            is_over = run.start - first_asked_at[run.task_id] >= 2.0
            assert is_over or run.start - asked_at[int(run.item)] >= 0.5
        nothing_is_left()

    @counts_on_wake_ups("the last call tells the ticket that it is due")
    def test_a_hundred_collected_calls_do_not_wait_for_the_end_of_the_debounce(self, app, tasks, start_worker, locks):
        start_worker(2)
        first = tasks.collected_debounced.delay("k", 0, how="calls")
        wait_until(lambda: kept(app) == 1, "it sleeps: a hint that came before would be lost")
        wait_until(lambda: locks.client.pubsub_channels("redislock:room:all"), "its room hears hints")
        for number in range(1, 100):
            tasks.collected_debounced.delay("k", number, how="calls")
        assert first.get(timeout=20) == list(range(100))  # it would look by itself after a minute

    def test_the_call_after_a_hundred_collected_ones_gets_a_run_of_its_own(self, tasks, held, gate, nothing_is_left):
        held(tasks.collected)
        calls = [tasks.collected.delay("k", number, how="calls") for number in range(103)]
        assert len({call.id for call in calls[:100]}) == 1
        assert calls[100].id != calls[0].id
        assert len({call.id for call in calls[100:]}) == 1
        gate.open()
        assert calls[0].get(timeout=PATIENCE) == list(range(100))
        assert calls[100].get(timeout=PATIENCE) == [100, 101, 102]
        nothing_is_left()


@on_every_broker
def test_children_that_die_in_the_body_are_followed_by_runs_with_equal_arguments(
    tasks, start_worker, ledger, tmp_path, nothing_is_left
):
    start_worker(2)
    deaths = 20 if IS_MATRIX else 2
    for number in range(deaths):
        with tasks.latest.lock_for("k"):
            tasks.latest.delay("k", f"first {number}", 0, "dies", str(tmp_path / f"died{number}"))
            result = tasks.latest.delay("k", f"last {number}", 0, "dies", str(tmp_path / f"died{number}"))
        assert result.get(timeout=PATIENCE)
    assert ledger.items() == [f"last {number}" for number in range(deaths) for _ in range(2)]
    nothing_is_left()
