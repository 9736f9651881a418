"""The newest call replaces the run that holds the key, with real workers."""

from __future__ import annotations

import time

import pytest
from celery import chain, chord, states
from celery.exceptions import ChordError, TaskRevokedError

from celery_redislock.protocol.names import keys_of
from tests.conftest import in_pools, on_every_broker
from tests.lab.servers import wait_until
from tests.lab.workers import kept

PATIENCE = 30


def replaced_by(newer, older):
    """Whether the older result is REVOKED because of the newer one."""
    with pytest.raises(TaskRevokedError, match=f"^replaced by {newer.id}$"):
        older.get(timeout=PATIENCE)
    return True


@pytest.fixture
def nobody_opens(tmp_path):
    """The name of a file that there will never be."""
    return str(tmp_path / "nobody opens this")


class TestTheNewestCall:
    @on_every_broker
    def test_ends_the_running_one_and_runs_after_its_finally(
        self, tasks, start_worker, ledger, running, nobody_opens, gate, nothing_is_left
    ):
        start_worker(2)
        older = tasks.newest.delay("k", "older", nobody_opens, "cleans", str(gate))
        running("older")
        newer = tasks.newest.delay("k", "newer")
        wait_until(lambda: kept(tasks.newest.app) == 1, "the newer one waits")
        assert ledger.items() == ["older"]
        gate.open()
        assert newer.get(timeout=PATIENCE) == "newer"
        assert replaced_by(newer, older)
        (cleaned,) = [line for line in ledger.lines() if line["event"] == "cleaned"]
        assert (cleaned["state"], cleaned["replaced"]) == ("held", newer.id)
        assert ledger.overlaps() == []
        assert [one for one in ledger.items()] == ["older", "newer"]
        nothing_is_left()

    @on_every_broker
    def test_ends_the_running_one_where_no_slot_is_free(
        self, tasks, start_worker, ledger, running, nobody_opens, nothing_is_left
    ):
        start_worker(1)
        older = tasks.newest.delay("k", "older", nobody_opens)
        running("older")
        called = time.monotonic()
        newer = tasks.newest.delay("k", "newer")
        assert newer.get(timeout=PATIENCE) == "newer"
        assert replaced_by(newer, older)
        assert ledger.runs()[0].end - called < 10
        nothing_is_left()

    def test_that_is_merged_ends_the_running_one(self, tasks, start_worker, ledger, running, nobody_opens):
        start_worker(1)
        older = tasks.newest.delay("k", "older", nobody_opens)
        running("older")
        newer, newest = tasks.newest.delay("k", "newer"), tasks.newest.delay("k", "newest")
        assert newest.id == newer.id
        assert newest.get(timeout=PATIENCE) == "newest"
        assert replaced_by(newer, older)
        assert ledger.items() == ["older", "newest"]
