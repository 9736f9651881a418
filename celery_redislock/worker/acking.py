"""Acking: the worker's main process acks the early-acked messages whose runs have begun."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker import state
from celery.worker.state import active_requests

from celery_redislock.message.early_acks import EARLY_ACKS

from .children import expect_copies
from .request import LockedRequest

#: Where a worker has no event loop, seconds between two looks which runs have begun.
READ_EVERY = 0.1
#: Where it has one, what a child says is read when a child accepts the next message, or after so many seconds.
HEARD_AFTER = 0.01
#: And where no message follows, in this round of the event loop that finds something to read, not in the first: in the
#: rounds before, a child may be given its next message after all. So it asks for its next key while this process waits
#: for the broker's answer to the ack; else each message would take a round trip more.
HEARD_IN_ROUND = 3


class AckWhatHasBegun(bootsteps.StartStopStep):
    """A step of the worker's consumer: reads which runs have begun, in the event loop or by a timer, and acks them."""

    requires = ("celery.worker.consumer:Tasks",)  # the step that has a channel to the broker

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._reading: Any = None
        self._hub: Any = None
        self._is_timed = False
        #: Rounds of the event loop that have found something to read.
        self._rounds = 0

    def start(self, parent: Any) -> None:
        """Begin to read, where there is no event loop."""
        if parent.hub is None and self._reading is None:
            # It also starts the timer's thread, which two runs that end at once would both start.
            self._reading = parent.timer.call_repeatedly(READ_EVERY, EARLY_ACKS.read)

    def stop(self, parent: Any) -> None:
        """Ack what has begun, while there is a channel."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        ack_what_has_begun()

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called by Celery whenever the event loop starts, where there is one."""
        if EARLY_ACKS.reader is not None:
            self._hub, self._is_timed, self._rounds = hub, False, 0  # a new loop has neither readers nor timers
            EARLY_ACKS.on_accepted = self._accepted
            if EARLY_ACKS.has_accepted:  # while the old loop ran
                self._listen()

    def _accepted(self) -> None:
        """Called when a child has accepted a message: listen to it, at once if nothing else has it read soon."""
        if not has_more_to_come():
            self._listen()
        elif not self._is_timed:
            self._is_timed = True
            self._hub.call_later(HEARD_AFTER, self._time_is_over)

    def _time_is_over(self) -> None:
        self._is_timed = False
        if EARLY_ACKS.has_accepted:
            self._listen()

    def _listen(self) -> None:
        # Not read here: Celery sends acks in the loop's next round, which comes at once after an event alone.
        self._hub.add_reader(EARLY_ACKS.reader, self._hear)

    def _hear(self) -> None:
        """Called in each round of the event loop that finds something to read, while it listens."""
        self._rounds += 1
        if self._rounds < HEARD_IN_ROUND:
            return
        self._rounds = 0
        self._hub.remove_reader(EARLY_ACKS.reader)
        EARLY_ACKS.read()
        if EARLY_ACKS.has_accepted:  # by another child, which still asks for its key
            self._listen()


def ack_what_has_begun() -> None:
    """Ack the early-acked messages whose runs have begun, also those of which no child's acceptance was heard.

    In a cold or soft shutdown the event loop will not do it.
    """
    EARLY_ACKS.read()
    for request in tuple(state.requests.values()):
        if isinstance(request, LockedRequest) and EARLY_ACKS.has_begun(request.delivery.nonce):
            request.acknowledge()


def has_more_to_come() -> bool:
    """Whether a child is to accept one more message besides this one, at which what children have said is read."""
    return len(state.reserved_requests) > len(state.active_requests) + 1


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
