"""A lock that is lost under its running body: the holder is told, and nobody else's lock is touched."""

from __future__ import annotations

import pytest

from celery_redislock import LockLost
from tests.lab.servers import wait_until


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
@pytest.mark.parametrize("thief", [None, "a thief's token"])
def test_abort_raises_lock_lost_in_the_body(tasks, start_worker, ledger, locks, pool, thief):
    worker = start_worker(2, "-P", pool)
    result = tasks.aborted.delay("k")
    wait_until(ledger.runs, "it runs")
    key = tasks.aborted.lock_for("k").name
    locks.client.set(key, thief) if thief else locks.client.delete(key)
    with pytest.raises(LockLost, match="its key was deleted, expired or taken") as caught:
        result.get(timeout=10)
    assert caught.value.key == key
    assert f"the lock {key} is lost: its key was deleted, expired or taken" in worker.output()
    assert locks.client.get(key) == (thief.encode() if thief else None)
    locks.client.delete(key)
    assert tasks.aborted.delay("k", 0.1).get(timeout=10) == "not aborted"  # the thread's next task is not struck


def test_by_default_a_body_goes_on_and_its_outcome_stands(tasks, start_worker, ledger, locks):
    worker = start_worker(1)
    result = tasks.late.delay("k", "item", 2.5)
    wait_until(ledger.runs, "it runs")
    locks.client.set(tasks.late.lock_for("k").name, "a thief's token")
    assert result.get(timeout=10) == "item"
    assert "is lost: its key was deleted, expired or taken" in worker.output()
    assert locks.client.get(tasks.late.lock_for("k").name) == b"a thief's token"
