"""Receivers of signals that fail: every run ends as it would without them, and nothing stays locked."""

from __future__ import annotations

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockLost, signals
from tests.lab.servers import wait_until


@pytest.fixture
def told(config, ledger):
    """What the receivers of a signal were told by runs of a task: the names of the arguments, of each call."""
    config.settings["lab_broken_receivers"] = True

    def look(signal, task):
        lines = [line for line in ledger.lines() if line["event"] == "signal"]
        return [set(line["told"]) for line in lines if (line["name"], line["task"]) == (signal.name, f"lab.{task}")]

    return look


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_receiver_that_fails_never_harms_its_run(
    tasks, start_worker, told, running, locks, lock_proxy, nothing_is_left, tmp_path, pool
):
    worker = start_worker(2, "-P", pool)

    free = tasks.work.delay("free", "done")
    assert free.get(timeout=20) == "done"
    wait_until(lambda: told(signals.lock_released, "work"), "it is released")
    assert told(signals.lock_acquired, "work") == [signals.lock_acquired.providing_args]
    assert told(signals.lock_released, "work") == [signals.lock_released.providing_args]

    file = tmp_path / "end"
    holder = tasks.until.delay("held", "holder", str(file))
    running("holder")
    with pytest.raises(TaskRevokedError):
        tasks.until.delay("held", "duplicate", str(file)).get(timeout=20)
    file.touch()
    assert holder.get(timeout=20) == "holder"
    assert told(signals.lock_conflict, "until") == [signals.lock_conflict.providing_args]

    lost = tasks.aborted.delay("lost")
    wait_until(lambda: told(signals.lock_acquired, "aborted"), "it runs")
    locks.client.delete(tasks.aborted.lock_for("lost").name)
    with pytest.raises(LockLost):
        lost.get(timeout=20)
    wait_until(lambda: told(signals.lock_lost, "aborted") == [signals.lock_lost.providing_args], "it is told")

    lock_proxy.refuse()
    kept = tasks.once.delay("away", "back")
    wait_until(lambda: told(signals.lock_unavailable, "once"), "it is told")
    lock_proxy.mend()
    assert kept.get(timeout=20) == "back"
    assert told(signals.lock_unavailable, "once")[0] == signals.lock_unavailable.providing_args

    nothing_is_left()
    with pytest.raises(TaskRevokedError, match="superseded"):
        tasks.latest.delay("merged", "first", 0, "overtaken").get(timeout=20)
    for signal in (signals.lock_merged, signals.lock_superseded):
        assert told(signal, "latest") == [signal.providing_args]

    replaced = tasks.newest.delay("replaced", "older", str(file) + " that nobody makes")
    wait_until(lambda: told(signals.lock_acquired, "newest"), "it runs")
    assert tasks.newest.delay("replaced", "newer").get(timeout=20) == "newer"
    assert replaced.state == states.REVOKED
    assert told(signals.lock_replaced, "newest") == [signals.lock_replaced.providing_args]

    for name in signals.__all__:
        broken = f"a receiver of {name} is broken"
        wait_until(lambda broken=broken: broken in worker.output(), broken)
