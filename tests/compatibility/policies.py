"""Policies: a duplicate of every policy, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from tests.lab.ledger import Ledger
from tests.lab.servers import wait_until

#: How a duplicate ends: with an error, or with what a run has returned.
ENDS = {"skip": TaskRevokedError, "raise": LockConflict, "wait": "duplicate", "join": "holder"}


def meet_every_policy(tasks: Any, ledger: Ledger) -> None:
    """For each policy, send a duplicate while its holder runs, and see how it ends."""
    for policy, end in ENDS.items():
        task = getattr(tasks, f"on_{policy}")
        holder = task.delay(policy, "holder", "holds")
        wait_until(lambda: len(ledger.running()) == 1, "the holder runs")
        duplicate = task.delay(policy, "duplicate")
        assert holder.get(timeout=20) == "holder"
        if isinstance(end, str):
            assert duplicate.get(timeout=20) == end
        else:
            with pytest.raises(end):
                duplicate.get(timeout=20)
