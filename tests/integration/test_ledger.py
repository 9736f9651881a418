"""The ledger's overlap checker finds what it must, and excuses only what it says."""

from __future__ import annotations

import pytest

from tests.conftest import on_every_broker
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import is_dead


@pytest.fixture
def ran(ledger):
    """Writes runs as bodies do: ``ran("a", 0, 10)``; without an end, the body was killed or goes on."""

    def write(item, start, end=None, key="k", pid=1, task_id="id"):
        mark = {"key": key, "item": item, "pid": pid, "task_id": task_id, "start": start}
        ledger.write({**mark, "event": "start"})
        if end is not None:
            ledger.write({**mark, "event": "end", "end": end})

    return write


def items(pairs):
    return [(first.item, second.item) for first, second in pairs]


def test_runs_one_after_another_and_of_different_keys_do_not_overlap(ran, ledger):
    ran("a", 0, 10)
    ran("b", 10, 20)
    ran("c", 5, 15, key="another")
    assert ledger.overlaps() == ledger.excused_overlaps() == []


def test_a_long_run_overlaps_all_that_begin_before_its_end(ran, ledger):
    """Also those that are no neighbours of it."""
    ran("long", 0, 10)
    ran("short", 1, 2)
    ran("third", 3, 4)
    ran("after", 10, 11)
    assert items(ledger.overlaps()) == [("long", "short"), ("long", "third")]


def test_a_run_has_an_end_where_a_signal_ends_it_as_soon_as_its_start_can_be_read(ledger, monkeypatch):
    write = ledger.write

    def write_and_be_ended(line):
        write(line)
        if line["event"] == "start":
            raise SystemExit

    monkeypatch.setattr(ledger, "write", write_and_be_ended)
    with pytest.raises(SystemExit), ledger.run("k", "ended"):
        pytest.fail("the body does not begin")
    assert [run.item for run in ledger.runs()] == ["ended"]
    assert ledger.running() == []


class TestDeath:
    def test_a_run_without_end_overlaps_all_that_come_later(self, ran, ledger):
        ran("killed?", 0)
        ran("b", 5, 6)
        ran("c", 7, 8)
        assert items(ledger.overlaps()) == [("killed?", "b"), ("killed?", "c")]
        assert [run.item for run in ledger.running()] == ["killed?"]

    def test_a_run_ends_with_its_process(self, ran, ledger):
        ran("killed", 0, pid=1)
        ran("too early", 4, 5, pid=2)
        ran("in time", 6, 7, pid=2)
        ledger.died(1, at=5.5)
        assert items(ledger.overlaps()) == [("killed", "too early")]
        assert ledger.running() == []

    def test_the_death_of_another_process_ends_nothing(self, ran, ledger):
        ran("goes on", 0, pid=1)
        ran("b", 6, 7, pid=2)
        ledger.died(3, at=5)
        assert items(ledger.overlaps()) == [("goes on", "b")]

    def test_a_death_before_its_start_was_another_with_the_same_pid(self, ran, ledger):
        ledger.died(1, at=5)
        ran("goes on", 6, pid=1)
        assert ledger.runs()[0].end == float("inf")

    def test_a_run_that_had_ended_does_not_end_later(self, ran, ledger):
        ran("a", 0, 5, pid=1)
        ran("b", 6, 7, pid=2)
        ledger.died(1, at=8)
        assert ledger.overlaps() == []


class TestLoss:
    @pytest.fixture
    def told(self, ledger):
        def write(at, pid=1, task_id="id"):
            line = {"event": "lost", "key": "redislock:{k}", "task_id": task_id, "reason": "gone"}
            ledger.write({**line, "pid": pid, "at": at})

        return write

    def test_an_overlap_is_excused_only_from_the_moment_the_holder_was_told(self, ran, told, ledger):
        ran("loser", 0, 10)
        ran("before", 4, 5, pid=2)
        told(5.5)
        ran("after", 6, 7, pid=2)
        assert items(ledger.overlaps()) == [("loser", "before")]
        assert items(ledger.excused_overlaps()) == [("loser", "after")]

    def test_to_tell_the_second_does_not_excuse_it(self, ran, told, ledger):
        ran("first", 0, 10, pid=1)
        ran("second", 4, 6, pid=2)
        told(5, pid=2)
        assert items(ledger.overlaps()) == [("first", "second")]

    @pytest.mark.parametrize("other", [{"pid": 2}, {"task_id": "another in this process"}])
    def test_to_tell_another_excuses_nothing(self, ran, told, ledger, other):
        ran("first", 0, 10)
        told(1, **other)
        ran("second", 4, 6, pid=3)
        assert items(ledger.overlaps()) == [("first", "second")]

    def test_an_earlier_loss_of_the_same_process_excuses_nothing(self, ran, told, ledger):
        ran("loser", 0, 2)
        told(1)
        ran("retried", 3, 10)
        ran("second", 4, 6, pid=2)
        assert items(ledger.overlaps()) == [("retried", "second")]


class TestWorkers:
    @pytest.fixture
    def work(self, config):
        """A task with a short lease."""
        config.settings["redislock_lease"] = 1.5
        with make_app(config) as app:
            yield app.tasks["lab.work"]

    def test_a_killed_childs_run_ends_with_it(self, work, start_worker, ledger):
        worker = start_worker(2)
        work.delay("k", "killed", 30)
        pid = worker.kill_child()
        assert pid not in {child.pid for child in worker.children()}
        assert work.delay("k", "waits").get(timeout=10) == "waits"
        killed, _ = ledger.runs()
        assert killed.pid == pid
        assert killed.start < killed.end < float("inf")
        assert ledger.overlaps() == []

    def test_a_killed_worker_leaves_nobody(self, tasks, start_worker, ledger):
        worker = start_worker(2)
        tasks.work.delay("a", 1, 30)
        tasks.work.delay("b", 2, 30)
        wait_until(lambda: len(ledger.running()) == 2, "both run")
        children = worker.children()
        assert {run.pid for run in ledger.runs()} <= {child.pid for child in children}
        worker.kill()
        assert worker.process.poll() is not None
        assert all(is_dead(child.pid) for child in children)
        assert ledger.running() == []

    def test_a_paused_worker_or_child_goes_on_where_it_stood(self, tasks, start_worker, ledger):
        worker = start_worker(2)
        tasks.work.delay("k", "long", 0.5)
        worker.busy_child()
        worker.pause()
        for process in worker.children():
            assert process.status() == "stopped"
        short = tasks.work.delay("another", "short")
        worker.resume()
        assert short.get(timeout=30) == "short"
        child = worker.pause_child(next(run.pid for run in ledger.runs() if run.item == "long"))
        assert tasks.work.delay("a third", "other").get(timeout=30) == "other"
        worker.resume_child(child)
        wait_until(lambda: ledger.running() == [], "the long run ends")

    def test_the_holder_who_is_told_of_a_loss_is_excused(self, work, start_worker, locks, ledger):
        start_worker(2)
        long_run = work.delay("k", "long", 2.0)
        wait_until(ledger.running, "it runs")
        locks.client.flushall()
        wait_until(ledger.losses, "the holder is told")
        assert work.delay("k", "second").get(timeout=10) == "second"
        assert long_run.get(timeout=10) == "long"
        assert ledger.overlaps() == []
        assert items(ledger.excused_overlaps()) == [("long", "second")]
        (loss,) = ledger.losses()
        assert (loss["task_id"], loss["pid"]) == (long_run.id, ledger.runs()[0].pid)


@on_every_broker
def test_a_worker_behind_both_proxies_survives_their_faults(broker_proxy, lock_proxy, tasks, start_worker, ledger):
    start_worker(1)
    assert tasks.work.delay("k", "before").get(timeout=10) == "before"
    fault = lock_proxy.drop_reply(to=b"EVALSHA")
    assert tasks.work.delay("k", "reply lost").get(timeout=10) == "reply lost"
    assert fault.struck == 1
    broker_proxy.cut()
    tasks.work.app.connection_for_write().ensure_connection(max_retries=5)
    assert tasks.work.apply_async(("k", "after"), retry=True).get(timeout=10) == "after"
