"""Several locks for one run: all of them or none, whatever becomes of a run, a child, a worker or a message."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

import pytest
from celery import states
from celery.bin.base import CLIContext
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from click.testing import CliRunner

from celery_redislock import LockConflict, LockKeyError, LockLost, LockUnavailable, locked
from celery_redislock.cli.commands import locks as group
from celery_redislock.testing import busy
from tests.acceptance.test_limits import IMPATIENT
from tests.acceptance.test_metrics import samples
from tests.acceptance.test_redelivery import came_back, dropped
from tests.conftest import on_every_broker
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

PATIENCE = 30
A, B = "redislock:{account:a}", "redislock:{account:b}"


@pytest.fixture
def account(tasks):
    """The lock of one account, for the test itself: ``with account("a"):``."""
    return lambda name: busy(tasks.account_only.lock_for(name))


@pytest.fixture
def waits(app):
    """Waits until so many messages are kept waiting."""
    return lambda count=1, workers=1: wait_until(lambda: kept(app, workers) == count, f"{count} wait")


@pytest.fixture
def both_are_free(tasks):
    """Another task runs with each account, sooner than a lease ends."""

    def check():
        for name in "ab":
            assert tasks.account_only.delay(name, f"then {name}").get(timeout=15) == f"then {name}"

    return check


def keys_of_waiting(app):
    """Which key each waiting message waits for, by its task id."""
    replies = app.control.broadcast("locks", reply=True, limit=1, timeout=5) or []
    found = [one for reply in replies for locks in reply.values() for one in locks]
    return {one["task_id"]: one["key"] for one in found if one["state"] == "waiting"}


class TestBothOrNeither:
    @on_every_broker
    def test_a_run_holds_all_of_its_keys_and_a_message_that_waits_holds_none(
        self, app, tasks, start_worker, ledger, running, gate, account, waits, nothing_is_left
    ):
        start_worker(4)
        holder = tasks.transfer.delay("a", "b", "holder", gate)
        running("holder")
        others = [tasks.account_only.delay(name, name) for name in "ab"]
        waits(2)
        with account("c"):
            blocked = tasks.transfer.delay("c", "d", "blocked")
            waits(3)
            free = tasks.account_only.delay("d", "free")
            wait_until(free.ready, "the other account is free", 15)
            assert keys_of_waiting(app)[blocked.id] == "redislock:{account:c}"
        assert blocked.get(timeout=PATIENCE) == "blocked"
        assert not any(other.ready() for other in others)
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (holder, *others)] == ["holder", "a", "b"]
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_a_message_moves_to_the_line_of_the_key_that_is_held_at_its_turn(
        self, app, tasks, start_worker, ledger, account, waits, nothing_is_left
    ):
        start_worker(2)
        with account("b"):
            with account("a"):
                moves = tasks.transfer.delay("a", "b", "moves")
                waits()
                assert keys_of_waiting(app) == {moves.id: A}
            wait_until(lambda: keys_of_waiting(app) == {moves.id: B}, "it waits for the other account")
            assert tasks.account_only.delay("a", "free").get(timeout=PATIENCE) == "free"
        assert moves.get(timeout=PATIENCE) == "moves"
        nothing_is_left()

    @counts_on_wake_ups("forty messages have their turn, one every five seconds")
    @on_every_broker
    def test_transfers_there_and_back_all_run_and_no_two_at_once(self, tasks, start_worker, ledger, nothing_is_left):
        for _ in range(2):
            start_worker(3)
        pairs = ["ab", "ba", "bc", "cb", "ac", "ca", "aa", "dc"] * 5
        results = [tasks.transfer.delay(*pair, number, 0.01) for number, pair in enumerate(pairs)]
        assert [result.get(timeout=60) for result in results] == list(range(40))
        assert Counter(ledger.items()) == {str(number): len(set(pair)) for number, pair in enumerate(pairs)}
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_a_callable_may_return_one_key_or_several(self, tasks, start_worker, account, waits, nothing_is_left):
        start_worker(2)
        for keys in ("account:a", ["account:a"], ["account:b", "account:a", "account:b"]):
            with account("a"):
                result = tasks.of_list.delay(keys, "ran")
                waits()
            assert result.get(timeout=PATIENCE) == "ran"
        nothing_is_left()


class TestPolicies:
    def test_each_is_met_at_each_key(self, tasks, start_worker, account, waits, ledger, nothing_is_left):
        start_worker(2)
        for name, key in (("a", A), ("b", B)):
            with account(name):
                with pytest.raises(TaskRevokedError, match="duplicate of"):
                    tasks.transfer_skips.delay("b", "a", "skipped").get(timeout=PATIENCE)
                with pytest.raises(LockConflict) as refused:
                    tasks.transfer_raises.delay("b", "a", "refused").get(timeout=PATIENCE)
                assert refused.value.key == key
                waiting = tasks.transfer.delay("b", "a", f"after {name}")
                waits()
            assert waiting.get(timeout=PATIENCE) == f"after {name}"
        assert set(ledger.items()) == {"after a", "after b"}
        nothing_is_left()

    def test_what_is_in_lock_also_is_always_waited_for(
        self, tasks, start_worker, account, waits, ledger, running, gate, nothing_is_left
    ):
        start_worker(3)
        first = tasks.job_of_machine.delay("x", "m1", gate)
        running("m1")
        waiting = tasks.job_of_machine.delay("y", "m1")
        waits()
        with pytest.raises(TaskRevokedError, match="duplicate of"):
            tasks.job_of_machine.delay("x", "m2").get(timeout=PATIENCE)
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (first, waiting)] == ["m1", "m1"]
        assert "m2" not in ledger.items()
        nothing_is_left()

    def test_five_at_once_in_all_and_one_of_each_customer(self, tasks, start_worker, ledger, gate, nothing_is_left):
        start_worker(8)
        results = [tasks.job_of_customer.delay(number // 2, number, gate if number < 12 else 0) for number in range(24)]
        wait_until(lambda: len(ledger.running()) == 10, "five run")
        gate.open()
        assert [result.get(timeout=PATIENCE) for result in results] == list(range(24))
        assert ledger.most_at_once() == 10, "each is there twice: with its customer, and among all"
        assert [pair for pair in ledger.overlaps() if pair[0].key != "all"] == []
        nothing_is_left()


class TestEveryWayOut:
    def test_of_a_body_gives_all_keys_back(self, app, tasks, start_worker, ledger, both_are_free, nothing_is_left):
        start_worker(2)
        for how, runs in (
            *(("", 1), ("fails", 1), ("ignores", 1), ("rejects", 1)),
            *(("retries", 2), ("requeues", 2), ("replaces", 2)),
        ):
            tasks.transfer.delay("a", "b", how, 0, how)
            wait_until(lambda how=how, runs=runs: ledger.items().count(how) == 2 * runs, f"{how!r} has run")
            both_are_free()
        assert ledger.overlaps() == []
        nothing_is_left()

    @pytest.mark.parametrize("way", ["soft", "hard", "terminated"])
    def test_by_force_gives_all_keys_back(
        self, app, tasks, start_worker, ledger, running, both_are_free, nothing_is_left, way
    ):
        start_worker(2)
        limits = {"soft": {"soft_time_limit": 2}, "hard": {"time_limit": 2}, "terminated": {}}[way]
        result = tasks.transfer.apply_async(("a", "b", "struck", 30), **limits)
        pid = running("struck")
        if way == "terminated":
            app.control.revoke(result.id, terminate=True, signal="SIGKILL")
        errors = {"soft": SoftTimeLimitExceeded, "hard": TimeLimitExceeded, "terminated": TaskRevokedError}
        with pytest.raises(errors[way]):
            result.get(timeout=PATIENCE)
        ledger.died(pid)
        both_are_free()
        nothing_is_left()

    def test_by_being_revoked_while_it_waits_leaves_the_line(
        self, app, tasks, start_worker, account, waits, ledger, nothing_is_left
    ):
        start_worker(2)
        with account("b"):
            revoked = tasks.transfer.delay("a", "b", "revoked")
            waits()
            revoked.revoke()
            waits(0)
        assert tasks.transfer.delay("a", "b", "next").get(timeout=PATIENCE) == "next"
        assert set(ledger.items()) == {"next"}
        nothing_is_left()


class TestDeaths:
    @on_every_broker
    def test_a_killed_child_frees_all_keys_at_once_and_its_message_runs_again(
        self, tasks, start_worker, ledger, running, gate, both_are_free, nothing_is_left
    ):
        worker = start_worker(3)
        result = tasks.transfer.delay("a", "b", "twice", gate)
        worker.kill_child(running("twice"))
        gate.open()
        wait_until(result.ready, "it has run again", 15)
        assert result.get() == "twice"
        assert ledger.overlaps() == []
        both_are_free()
        nothing_is_left()

    def test_a_child_that_dies_before_it_knows_what_it_was_granted_frees_that(
        self, lock_proxy, tasks, start_worker, ledger, locks, both_are_free, nothing_is_left
    ):
        worker = start_worker(1)
        tasks.transfer.delay("a", "b", "warm").get(timeout=PATIENCE)
        nothing_is_left()
        held_back = lock_proxy.hold(b"EVALSHA", b"account:b", before=False)
        result = tasks.transfer.delay("a", "b", "runs")
        held_back.wait()
        wait_until(lambda: len(locks.held()) == 2, "it holds both")
        (child,) = worker.children()
        worker.kill_child(child.pid)
        held_back.let_go()
        assert result.get(timeout=15) == "runs"
        both_are_free()
        nothing_is_left()

    def test_a_child_that_dies_between_the_call_and_the_run_passes_all_keys_on(
        self, tasks, start_worker, account, waits, both_are_free, nothing_is_left
    ):
        worker = start_worker(1)
        with account("b"):
            result = tasks.transfer.delay("a", "b", "called")
            waits()
            (child,) = worker.children()
            worker.pause_child(child.pid)
        wait_until(lambda: "its turn came" in worker.output(), "it is called")
        worker.kill_child(child.pid)
        assert result.get(timeout=20) == "called"
        both_are_free()
        nothing_is_left()

    def test_a_killed_worker_keeps_all_keys_for_a_lease_and_its_message_runs_then(
        self, config, tasks, start_worker, ledger, running, locks, broker_server, gate
    ):
        config.settings["broker_transport_options"] = {**IMPATIENT, "visibility_timeout": 120}
        config.settings["task_annotations"] = {"lab.transfer": {"lock_lease": 3.0}}
        first = start_worker(1)
        result = tasks.transfer.delay("a", "b", "again", gate)
        running("again")
        first.kill()
        assert len(locks.held()) == 2
        gate.open()
        broker_server.ages()
        start_worker(2)
        others = [tasks.account_only.delay(name, name) for name in "ab"]
        assert [one.get(timeout=PATIENCE) for one in (*others, result)] == ["a", "b", "again"]
        assert ledger.overlaps() == []


class TestCopies:
    @pytest.mark.parametrize("pair", ["ab", "ba"])
    def test_a_copy_waits_for_its_run_and_is_dropped_then(
        self, config, tasks, start_worker, ledger, gate, nothing_is_left, pair
    ):
        config.settings["broker_transport_options"] = IMPATIENT
        worker = start_worker(4)
        result = tasks.transfer.delay(*pair, "once", gate)
        wait_until(lambda: came_back(worker, result), "a copy has met it")
        gate.open()
        assert result.get(timeout=20) == "once"
        wait_until(lambda: dropped(worker, result), "a copy is dropped", 40)
        assert ledger.items() == ["once", "once"], "one run, with two accounts"
        assert result.state == states.SUCCESS
        nothing_is_left()

    def test_messages_that_wait_for_longer_than_the_visibility_timeout_run_once(
        self, config, tasks, start_worker, ledger, account, nothing_is_left
    ):
        config.settings["broker_transport_options"] = IMPATIENT
        for _ in range(2):
            start_worker(3)
        with account("c"):
            results = [tasks.transfer.delay(*pair, pair) for pair in ("ac", "cb", "ca")]
            wait_until(lambda: kept(tasks.transfer.app, 2) >= 3, "they wait")
            begin = time.monotonic()
            wait_until(lambda: time.monotonic() > begin + 5, "the visibility timeout has passed twice")
        assert [result.get(timeout=60) for result in results] == ["ac", "cb", "ca"]
        assert Counter(ledger.items()) == {"ac": 2, "cb": 2, "ca": 2}
        nothing_is_left()

    def test_a_message_that_the_holder_sends_waits_where_others_would_be_skipped(
        self, tasks, start_worker, ledger, nothing_is_left
    ):
        start_worker(2)
        assert tasks.transfer_skips.delay("a", "b", "first", 0, "publishes").get(timeout=PATIENCE) == "first"
        wait_until(lambda: "first's successor" in ledger.items(), "it runs")
        assert ledger.overlaps() == []
        nothing_is_left()


class TestOutages:
    def test_of_the_lock_server_are_waited_out_and_nothing_is_kept(
        self, lock_proxy, tasks, start_worker, ledger, account, waits, nothing_is_left
    ):
        start_worker(3)
        with account("c"):
            waiting = tasks.transfer.delay("c", "d", "waited")
            waits()
            lock_proxy.refuse()
            result = tasks.transfer.delay("a", "b", "retried")
            unlocked = tasks.transfer_unlocked.delay("a", "b", "unlocked")
            assert unlocked.get(timeout=PATIENCE) == "unlocked"
            with pytest.raises(LockUnavailable) as caught:
                tasks.transfer_refuses.delay("b", "a", "refused").get(timeout=PATIENCE)
            assert caught.value.key == A
            lock_proxy.mend()
        assert [one.get(timeout=PATIENCE) for one in (result, waiting)] == ["retried", "waited"]
        assert Counter(ledger.items()) == {"unlocked": 2, "retried": 2, "waited": 2}
        nothing_is_left()

    def test_that_begin_between_two_keys_give_the_first_one_back(
        self, config, lock_proxy, tasks, start_worker, ledger, both_are_free, nothing_is_left
    ):
        config.settings["redislock_lease"] = 3.0  # what cannot be taken back ends with it
        worker = start_worker(2)
        for task in (tasks.transfer_unlocked, tasks.transfer_refuses, tasks.transfer):
            between = lock_proxy.hold(b"EVALSHA", b"account:b", before=True)
            result = task.delay("a", "b", "ran")
            between.wait()
            lock_proxy.refuse()
            between.let_go()
            if task is not tasks.transfer:
                wait_until(result.ready, "it has ended without its locks")
            lock_proxy.mend()
            if task is tasks.transfer_refuses:
                with pytest.raises(LockUnavailable):
                    result.get(timeout=PATIENCE)
            else:
                assert result.get(timeout=PATIENCE) == "ran"
            both_are_free()
        assert "runs without its lock" in worker.output()
        nothing_is_left()


class TestShutdown:
    @on_every_broker
    def test_a_worker_hands_over_what_waits_and_holds_nothing_for_it(
        self, tasks, start_worker, ledger, running, gate, account, waits, nothing_is_left
    ):
        first = start_worker(3)
        holder = tasks.transfer.delay("a", "b", "holder", gate)
        running("holder")
        results = [tasks.transfer.delay(*pair, pair) for pair in ("bc", "ca", "dc")[:2]]
        waits(2)
        first.begin_to_stop(signal.SIGTERM)
        start_worker(3)
        waits(2)
        gate.open()
        first.wait()
        assert [one.get(timeout=PATIENCE) for one in (holder, *results)] == ["holder", "bc", "ca"]
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_a_worker_gives_back_what_it_keeps_for_a_message_that_waits_for_long(
        self, config, app, tasks, start_worker, locks, account, waits, nothing_is_left
    ):
        config.settings["lab_starves_after"] = 0.0
        first = start_worker(2)
        a, b = account("a"), account("b")
        a.__enter__()
        b.__enter__()
        kept_for = tasks.transfer.delay("a", "b", "kept for")
        waits()
        a.__exit__(None, None, None)
        wait_until(lambda: keys_of_waiting(app) == {kept_for.id: B}, "its turn came in vain")
        locks.client.client_kill_filter(_type="pubsub")  # a room that missed hints looks at each of its lines
        wait_until(lambda: (locks.client.get(A) or b"")[:1] == b"!", "the room keeps what it has got")
        blocked = tasks.account_only.delay("a", "later")
        waits(2)
        first.stop()
        assert locks.client.get(A) is None
        start_worker(2)
        assert blocked.get(timeout=PATIENCE) == "later"
        b.__exit__(None, None, None)
        assert kept_for.get(timeout=PATIENCE) == "kept for"
        nothing_is_left()


class TestTheLockInTheBody:
    def test_stands_for_all_and_names_its_parts(self, tasks, start_worker, ledger):
        start_worker(1)
        for number in range(2):
            assert tasks.transfer_fenced.delay("b", "a", number, 0, "tells").get(timeout=PATIENCE) == number
        first, second = [line for line in ledger.lines() if line["event"] == "parts"]
        assert [(key, state) for key, _, state in first["parts"]] == [(B, "held"), (A, "held")]
        assert [fence for _, fence, _ in first["parts"]] == [first["fence"], None]
        assert second["fence"] > first["fence"]

    @pytest.mark.parametrize("key", [A, B])
    def test_is_lost_if_any_is_lost(self, tasks, start_worker, ledger, locks, running, gate, nothing_is_left, key):
        start_worker(2)
        aborted = tasks.transfer_aborts.delay("a", "b", "aborted", gate)
        running("aborted")
        locks.client.delete(key)
        with pytest.raises(LockLost) as lost:
            aborted.get(timeout=PATIENCE)
        assert lost.value.key == key
        nothing_is_left()
        checks = tasks.transfer.delay("a", "b", "checks", gate, "checks")
        running("checks")
        locks.client.delete(key)
        wait_until(lambda: len(ledger.losses()) == 2, "it is noticed", 15)
        gate.open()
        with pytest.raises(LockLost) as lost:
            checks.get(timeout=PATIENCE)
        assert lost.value.key == key
        nothing_is_left()

    def test_ends_after_lock_max_hold_with_all_keys(self, tasks, start_worker, ledger, running, gate):
        start_worker(3)
        too_long = tasks.transfer_briefly.delay("a", "b", "too long", gate)
        running("too long")
        others = [tasks.account_only.delay(name, name) for name in "ab"]
        assert [other.get(timeout=PATIENCE) for other in others] == ["a", "b"]
        assert {loss["key"] for loss in ledger.losses()} == {A, B}
        gate.open()
        too_long.get(timeout=PATIENCE)

    def test_leaves_its_main_keys_cooling_down_and_frees_the_others(self, tasks, start_worker, locks):
        start_worker(1)
        assert tasks.transfer_cools.delay("a", "b", "cools").get(timeout=PATIENCE) == "cools"
        wait_until(lambda: {locks.client.get(key)[:1] for key in (A, B)} == {b"="}, "both cool down")
        with pytest.raises(LockConflict) as refused:
            tasks.transfer_raises.delay("c", "b", "too soon").get(timeout=PATIENCE)
        assert (refused.value.key, refused.value.holder.state) == (B, "cooling")


class TestRates:
    def test_no_more_than_the_rate_begin_though_runs_need_other_keys_too(
        self, tasks, start_worker, ledger, nothing_is_left
    ):
        start_worker(4)
        results = [tasks.job_with_rate.delay(number % 3, number) for number in range(13)]
        assert [result.get(timeout=PATIENCE) for result in results] == list(range(13))
        begins = sorted(run.start for run in ledger.runs() if run.key == "all")
        assert all(later - earlier > 1.5 for earlier, later in zip(begins, begins[5:], strict=False))
        nothing_is_left()

    def test_a_permit_is_given_back_where_another_rate_refuses(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        results = [tasks.job_with_two_rates.delay(number, number) for number in range(2)]
        assert [result.get(timeout=PATIENCE) for result in results] == [0, 1]
        third = tasks.job_with_two_rates.delay(2, 2)
        wait_until(lambda: third.state == states.RETRY, "it waits for an hour")
        rates = {"redislock:{rate-a}", "redislock:{rate-b}"}
        wait_until(lambda: tasks.job_with_two_rates.lock_info(2).key in rates, "only a rate refuses it")


def test_what_a_callable_of_lock_also_returns_is_refused_by_the_name_of_that_option(tasks, start_worker, locks):
    start_worker(2)
    for task, text in (
        (tasks.job_with_wrong_limit, "lock_also: limit must return a whole number from 1 to 50, not a str"),
        (tasks.job_with_wrong_rate, 'lock_also: rate must return "100/m"'),
    ):
        with pytest.raises(LockKeyError, match=text):
            task.delay("a", "often").get(timeout=PATIENCE)
    assert locks.held() == []


class TestOutsideAWorker:
    def test_an_eager_run_shares_what_the_code_around_it_holds_and_takes_the_rest(self, tasks, locks, nothing_is_left):
        for around in (
            tasks.transfer.lock_for("a", "b"),
            *(tasks.account_only.lock_for(name) for name in "ab"),
        ):
            with around:
                assert tasks.transfer.apply(("a", "b", "nested", 0, "checks")).get() == "nested"
                assert tasks.transfer_raises.apply(("b", "a", "nested")).get() == "nested"
                with busy(tasks.account_only.lock_for("c")), pytest.raises(LockConflict) as refused:
                    tasks.transfer_raises.apply(("a", "c", "refused")).get()
                assert refused.value.key == "redislock:{account:c}"
                assert len(locks.held()) == len(getattr(around, "parts", [around]))
            nothing_is_left()

    def test_code_and_coroutines_take_all_keys_as_a_run_does(
        self, app, tasks, start_worker, ledger, running, gate, waits, nothing_is_left
    ):
        start_worker(2)
        accounts = ["account:{source}", "account:{target}"]

        @locked(accounts, app=app, block_for=0)
        def transfer(source, target):
            return "done"

        async def transfer_in_a_loop():
            async with locked(["account:b", "account:a"], app=app, block_for=PATIENCE) as lock:
                return [part.key for part in lock.parts]

        result = tasks.transfer.delay("a", "b", "runs", gate)
        running("runs")
        for pair, key in (("ax", A), ("xb", B)):
            with pytest.raises(LockConflict) as refused:
                transfer(*pair)
            assert refused.value.key == key
        assert transfer("x", "y") == "done"
        gate.open()
        assert asyncio.run(transfer_in_a_loop()) == [B, A]
        with tasks.transfer.lock_for("b", "a"):
            waiting = tasks.transfer_early.delay("a", "b", "waits")
            waits()
        assert waiting.get(timeout=PATIENCE) == "waits"
        assert result.get(timeout=PATIENCE) == "runs"
        nothing_is_left()


class TestWhatIsSaid:
    def test_why_and_lock_info_name_the_key_that_is_held(self, app, tasks, start_worker, account, waits):
        start_worker(1)
        assert tasks.transfer.lock_info("a", "b") is None
        with account("b"):
            waiting = tasks.transfer.delay("a", "b", "waits")
            waits()
            context = CLIContext(app, no_color=True, workdir=None)
            said = CliRunner().invoke(group, ["why", waiting.id], obj=context).output
            assert f"WAITS in line for {B}" in said
            assert f"{B} is held by a lock outside tasks" in said
            assert A not in said
            assert tasks.transfer.lock_info("a", "b").key == B
        assert waiting.get(timeout=PATIENCE) == "waits"

    def test_signals_are_sent_once_for_a_run_and_metrics_count_it_once(
        self, config, tasks, start_worker, ledger, account, waits, tmp_path, monkeypatch
    ):
        folder = tmp_path / "metrics"
        folder.mkdir()
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        config.settings |= {"lab_metrics": True, "lab_broken_receivers": True}
        start_worker(2)
        with account("b"):
            waiting = tasks.transfer.delay("a", "b", "waits")
            waits()
        assert waiting.get(timeout=PATIENCE) == "waits"

        def sent():
            lines = [line for line in ledger.lines() if line["event"] == "signal" and line["task"] == "lab.transfer"]
            return Counter(line["name"] for line in lines)

        wait_until(lambda: sent()["lock_released"], "it is released")
        assert sent() == {"lock_acquired": 1, "lock_released": 1, "lock_conflict": 1}
        names = [f"celery_redislock_{name}" for name in ("acquired_total", "hold_seconds_count")]
        wait_until(lambda: [one.value for one in samples(folder) if one.name in names] == [1, 1], "it counts once")


class TestAMessageThatNeedsTwoBusyKeys:
    @counts_on_wake_ups("many messages have their turn, one every five seconds")
    @on_every_broker
    def test_runs_before_the_others_are_done(self, config, tasks, start_worker, ledger, nothing_is_left):
        config.settings["lab_starves_after"] = 0.5
        for _ in range(2):
            start_worker(2)
        flood = [tasks.account_only.delay("ab"[number % 2], number, 0.1) for number in range(20)]
        wait_until(lambda: len(ledger.running()) == 2, "both accounts are busy")
        result = tasks.transfer.delay("a", "b", "between")
        flood += [tasks.account_only.delay("ab"[number % 2], number, 0.1) for number in range(20, 120)]
        assert result.get(timeout=60) == "between"
        for one in flood:
            one.get(timeout=60)
        items = ledger.items()
        assert items.index("between") < 90
        assert ledger.overlaps() == []
        nothing_is_left()


@pytest.mark.parametrize("option", [{"lock_scope": "job"}, {"lock_on_conflict": "join"}], ids=str)
def test_a_call_with_an_option_that_needs_one_key_runs_where_a_callable_returns_one(
    tasks, start_worker, ledger, nothing_is_left, option
):
    start_worker(2)
    results = [tasks.computed_key.apply_async(("a", number), **option) for number in range(2)]
    assert {one.get(timeout=PATIENCE) for one in results} <= {0, 1}
    assert ledger.overlaps() == []
    nothing_is_left()
