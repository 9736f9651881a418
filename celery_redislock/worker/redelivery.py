"""Redelivery: a broker whose connection ends delivers again what was not acked, although it still runs."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.state import active_requests

from .children import expect_copies
from .request import LockedRequest


class ExpectCopies(bootsteps.StartStopStep):
    """Of the worker's consumer: says of each run whose ack may be lost that a copy of its message is to come.

    The copy may wait in the queue until the run has ended, unseen by it, and must be dropped then. A run that is given
    back unfinished leaves no note all the same, so that its message runs again.
    """

    def stop(self, parent: Any) -> None:
        """The consumer stops, to connect again or for good."""
        # For good, also the acks may be lost that Celery has just sent, or sends from now on: so it is with Redis. With
        # RabbitMQ the consumer stops when its runs have ended.
        for_good = parent.blueprint.state != bootsteps.RUN  # type: ignore[attr-defined]
        requests = [request for request in tuple(active_requests) if isinstance(request, LockedRequest)]
        unacked = [one for one in requests if for_good or (one.task.acks_late and not one.acknowledged)]
        expect_copies([run for one in unacked if (run := one.run) is not None])
