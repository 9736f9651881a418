"""EarlyAcks: a message that is acked early is acked when its run begins, no longer when a child accepts it.

Until its key is granted, the message stays with the broker: a worker that dies while the message waits loses nothing.
The child tells its worker's main process by a pipe that it has inherited. Where the pool runs tasks in the main
process itself, in threads or greenlets, the call acks directly.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from celery import bootsteps
from celery.worker import state
from celery.worker.state import active_requests

from celery_redislock.message.delivery import Delivery

from .children import Run, expect_copies

#: The length of a nonce, in bytes. So few bytes are written to a pipe at once or not at all: what is read is whole.
_LENGTH = 22
#: How many bytes are read at once: those of a hundred runs.
_CHUNK = 100 * _LENGTH


class Acknowledgeable(Protocol):
    """A message that the main process can ack."""

    def acknowledge(self) -> None:
        """Ack the message, unless that was done."""


class EarlyAcks:
    """The messages of one worker that are acked when their runs begin.

    Attributes:
        reader: The end of the pipe that the main process reads; None before `open`.
    """

    def __init__(self) -> None:
        self.reader: int | None = None
        self._pipe: io.FileIO | None = None
        self._writer = -1
        self._main = 0
        #: The messages that were accepted, by the nonces of their deliveries, until it is known that their runs have
        #: begun or failed. A run's result may be read before that, and then nobody else keeps the message.
        self._accepted: dict[str, Acknowledgeable] = {}
        #: The deliveries whose runs have begun, and of which it is not known yet that a child has accepted them.
        self._begun: set[str] = set()
        #: Called when a child has accepted a message: what it says is to be read soon.
        self.on_accepted: Callable[[], None] | None = None
        self._reading = threading.RLock()

    def open(self) -> None:
        """Make the pipe. The worker's main process calls it once, before it forks its children."""
        if self._main != os.getpid():
            self.reader, self._writer = os.pipe()
            os.set_blocking(self.reader, False)
            # Not by os.read(): eventlet's waits for what never comes, where the runs are in this very process.
            self._pipe = io.FileIO(self.reader, closefd=False)
            self._main = os.getpid()

    def expect(self, nonce: str, message: Acknowledgeable) -> None:
        """Have `message` acked when the run of its delivery `nonce` begins, in this very process."""
        self._accepted[nonce] = message

    def accepted(self, nonce: str, message: Acknowledgeable) -> None:
        """A child has accepted `message`: it is acked when the run of its delivery `nonce` begins.

        The messages of the runs before it are acked now. So it is no begin of a run that wakes the main process, and
        while that waits for the broker, the child asks for its key.
        """
        with self._reading:  # or another thread reads the begin of this very run just before the message is noted
            if self._accepted:
                self.read()
            if nonce in self._begun:
                self._begun.remove(nonce)
                message.acknowledge()
                return
            self._accepted[nonce] = message
        if self.on_accepted is not None:
            self.on_accepted()

    @property
    def has_accepted(self) -> bool:
        """Whether a child has accepted a message and has not said yet that its run begins."""
        return bool(self._accepted)

    def has_begun(self, nonce: str) -> bool:
        """Whether the run of the delivery `nonce` has begun, and it is not known yet that a child has accepted it."""
        return nonce in self._begun

    def failed(self, nonce: str, message: Acknowledgeable) -> None:
        """The run of `message` and its delivery `nonce` has ended, and not by success: ack it now if it has begun."""
        self.read()
        if nonce in self._begun:
            message.acknowledge()
        self._accepted.pop(nonce, None)
        self._begun.discard(nonce)

    def report_begin(self, nonce: str) -> None:
        """Tell the main process that the run of the delivery `nonce` begins. Called where the run is."""
        if self._main == os.getpid():
            self._ack(nonce)
        elif self.reader is not None:
            os.write(self._writer, nonce.encode())

    def read(self) -> None:
        """Call the acks of the runs that have begun. Called in the main process, at any time."""
        if self._pipe is None:
            return
        with self._reading:  # a worker without an event loop reads in several threads
            self._read(self._pipe)

    def _read(self, pipe: io.FileIO) -> None:
        while chunk := pipe.read(_CHUNK):
            nonces = chunk.decode()
            for start in range(0, len(nonces), _LENGTH):
                self._ack(nonces[start : start + _LENGTH])
            if len(chunk) < _CHUNK:
                return

    def _ack(self, nonce: str) -> None:
        message = self._accepted.pop(nonce, None)
        if message is None:
            self._begun.add(nonce)
        else:
            message.acknowledge()


#: Those of this process, and of the children that it forks.
EARLY_ACKS = EarlyAcks()


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
        delivery = getattr(request, "delivery", None)
        if isinstance(delivery, Delivery) and EARLY_ACKS.has_begun(delivery.nonce):
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
        unacked = [one for one in tuple(active_requests) if for_good or (one.task.acks_late and not one.acknowledged)]
        expect_copies([run for one in unacked if isinstance(run := getattr(one, "run", None), Run)])
