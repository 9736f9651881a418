"""Redelivery: a broker whose connection was lost delivers again what was not acked, although it still runs."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.state import active_requests

from .children import expect_copies
from .request import LockedRequest


class ExpectCopies(bootsteps.StartStopStep):
    """Of the worker's consumer: says of each unacked run that a copy of its message is to come.

    The copy may wait in the queue until the run has ended, unseen by it, and must be dropped then.
    """

    def stop(self, parent: Any) -> None:
        """The consumer stops, to connect again or for good."""
        if parent.blueprint.state != bootsteps.RUN:  # type: ignore[attr-defined]
            return  # for good: its runs end, or are given back unfinished
        requests = [request for request in tuple(active_requests) if isinstance(request, LockedRequest)]
        runs = [request.run for request in requests if request.task.acks_late and not request.acknowledged]
        expect_copies([run for run in runs if run is not None])
