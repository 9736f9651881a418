"""Redelivery: a broker that has lost its connection delivers unacked messages again, while they still run."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.state import active_requests

from .children import expect_copies
from .request import LockedRequest


class ExpectCopies(bootsteps.StartStopStep):
    """A step of the worker's consumer. Where acks may be lost, it has the runs leave notes for copies of their message.

    A copy may wait in the queue until its run has ended, and must be dropped then. A run that ends unfinished, with its
    message requeued, leaves no note all the same, so that its message runs again.
    """

    def stop(self, parent: Any) -> None:
        """Called when the consumer stops: to connect again, or for good because the worker shuts down."""
        # In a shutdown with Redis as the broker, acks that Celery sends now or has just sent may be lost as well, so
        # every run counts as unacked. With RabbitMQ the consumer stops only after its runs have ended: there are none.
        for_good = parent.blueprint.state != bootsteps.RUN  # type: ignore[attr-defined]
        requests = [request for request in tuple(active_requests) if isinstance(request, LockedRequest)]
        unacked = [one for one in requests if for_good or (one.task.acks_late and not one.acknowledged)]
        expect_copies([run for one in unacked if (run := one.run) is not None])
