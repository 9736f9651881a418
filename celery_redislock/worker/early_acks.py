"""Early acks: an early-acked message is acked when its run begins, not when a child accepts it.

The broker keeps the message until its key is granted, so a worker that dies while the message waits loses nothing.
A child reports through a pipe that a run begins (`EarlyAcks`), and a consumer step reads the pipe (`AckWhatHasBegun`).
If the pool runs tasks inside the main process, in threads or greenlets, the report is a plain call. The step also
guards against lost acks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from celery import bootsteps
from celery.worker import state

from celery_redislock.message.delivery import STOPS

from .worker_port import before_close, hear_children, survive_lost_connections

#: The length of a nonce in bytes. Writes this short to a pipe are atomic, so every read returns whole nonces.
_LENGTH = 22
#: Bytes per read: the nonces of a hundred runs.
_CHUNK = 100 * _LENGTH

#: Seconds between two reads of the pipe in a worker without an event loop.
READ_EVERY = 0.1
#: With an event loop, the pipe is read when a child accepts the next message, or after this many seconds.
HEARD_AFTER = 0.01
#: If no message follows, the pipe is read only after this many rounds of the event loop have found it readable. A
#: message that arrives in an earlier round goes to the child first: the child then asks for its next key while this
#: process waits for the broker to answer the ack. Otherwise each message would cost one more round trip.
HEARD_IN_ROUND = 3


class EarlyAcks:
    """Acks the messages of one worker when their runs begin.

    Attributes:
        reader: The read end of the pipe, for the main process; None before `open`.
    """

    def __init__(self) -> None:
        self.reader: int | None = None
        self._pipe: io.FileIO | None = None
        self._writer = -1
        self._main = 0
        #: The messages whose runs are not known to have begun, by the nonces of their deliveries. Many will never run.
        self._expected: WeakValueDictionary[str, Any] = WeakValueDictionary()
        #: Those that a child has accepted: a run's result may be read before the report that it began, and then this is
        #: the only reference to the message.
        self._accepted: dict[str, Any] = {}
        #: Called when a child has accepted a message: the pipe should be read soon.
        self.on_accepted: Callable[[], None] | None = None

    def open(self) -> None:
        """Create the pipe. Called once in the worker's main process, before it forks its children."""
        if self._main != os.getpid():
            self.reader, self._writer = os.pipe()
            os.set_blocking(self.reader, False)
            # Not os.read(): eventlet's version would block forever, because runs in this process write nothing.
            self._pipe = io.FileIO(self.reader, closefd=False)
            self._main = os.getpid()

    def expect(self, nonce: str, message: Any) -> None:
        """Record `message`, which is acked when the run of its delivery `nonce` begins."""
        self._expected[nonce] = message

    def accepted(self, nonce: str, message: Any) -> None:
        """Record that a child has accepted `message`, which it runs as the delivery `nonce`.

        Earlier messages whose runs have begun are acked first, so the main process does not wake up for each of them.
        The child asks for its key while the main process waits for the broker.
        """
        if self._accepted:
            self.read()
        self._accepted[nonce] = message
        if nonce not in self._expected:  # its run has begun; another thread may have read that just now
            self._accepted.pop(nonce, None)
        elif self.on_accepted is not None:
            self.on_accepted()

    @property
    def has_accepted(self) -> bool:
        """Whether a child has accepted a message whose run is not yet known to have begun."""
        return bool(self._accepted)

    def failed(self, nonce: str) -> None:
        """Forget the message whose run, of the delivery `nonce`, raised an exception; ack it if the run had begun."""
        self.read()
        self._forget(nonce)

    def report_begin(self, nonce: str, *, exits: bool = False) -> None:
        """Report to the main process that the run of the delivery `nonce` begins, or exits. Called in its process."""
        if self._main == os.getpid():
            self._begun(nonce)
        elif self.reader is not None and not exits:  # the main process hears of the exit of a child
            os.write(self._writer, nonce.encode())

    def read(self, **_: Any) -> None:
        """Ack the messages of the runs that have begun. Called in the main process, at any time and in any thread."""
        while self._pipe is not None and (chunk := self._pipe.read(_CHUNK)):
            nonces = chunk.decode()
            for start in range(0, len(nonces), _LENGTH):
                self._begun(nonces[start : start + _LENGTH])
            if len(chunk) < _CHUNK:
                return

    def _begun(self, nonce: str) -> None:
        if (message := self._forget(nonce)) is not None:
            message.acknowledge()

    def _forget(self, nonce: str) -> Any:
        message = self._expected.pop(nonce, None)
        self._accepted.pop(nonce, None)
        return message


#: Shared by this process and the children that it forks.
EARLY_ACKS = EarlyAcks()


class AckWhatHasBegun(bootsteps.StartStopStep):
    """A consumer step: reads which runs have begun, in the event loop or on a timer, and acks their messages.

    When acks may be lost, it makes runs leave notes for copies of their messages.
    """

    requires = ("celery.worker.consumer:Tasks",)  # the step that has a channel to the broker

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._reading: Any = None
        self._hub: Any = None
        self._is_timed = False
        #: How many rounds of the event loop have found the pipe readable.
        self._rounds = 0
        survive_lost_connections(parent, self._tell_of_stop)
        before_close(parent, lambda: self._before_close(parent))

    def start(self, parent: Any) -> None:
        """Start reading on a timer, in a worker without an event loop."""
        if parent.hub is None and self._reading is None:
            # This starts the timer's thread now. Otherwise two runs that end at the same time might both start it.
            self._reading = parent.timer.call_repeatedly(READ_EVERY, EARLY_ACKS.read)

    def stop(self, parent: Any) -> None:
        """Ack the messages of runs that have begun, while the channel is still open."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        EARLY_ACKS.read()

    def _before_close(self, parent: Any) -> None:
        """Tell all runs that the consumer is about to stop. Then hear of the runs that have ended before.

        Those have left no notes, so the pool must not forget their messages. (That is in a shutdown. When a connection
        is lost, Celery has reset the event loop by now, and acks are lost.)
        """
        self._tell_of_stop()
        hear_children(parent)

    @staticmethod
    def _tell_of_stop() -> None:
        """Tell all runs that the consumer stops, so that they leave notes.

        It stops to reconnect, or for good because the worker shuts down. A copy may stay in the queue until the run has
        ended, and must be dropped then. In a shutdown with Redis as the broker, acks that Celery sends now or has just
        sent may also be lost. A run that ends unfinished and requeues its message still leaves no note, so that the
        message runs again.
        """
        if EARLY_ACKS.reader is not None:  # else the children do not share the number
            STOPS.count[0] += 1

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Register with the event loop. Celery calls this each time the loop starts."""
        if EARLY_ACKS.reader is not None:
            self._hub, self._is_timed, self._rounds = hub, False, 0  # a new loop has neither readers nor timers
            EARLY_ACKS.on_accepted = self._accepted
            if EARLY_ACKS.has_accepted:  # accepted while the old loop ran
                self._listen()

    def _accepted(self) -> None:
        """Handle the acceptance of a message: listen to the pipe now, unless it will be read soon anyway."""
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
        # Do not read here: Celery sends the acks in the loop's next round, which starts at once only after an event.
        self._hub.add_reader(EARLY_ACKS.reader, self._hear)

    def _hear(self) -> None:
        """Handle a round of the event loop that finds the pipe readable, while this step listens."""
        self._rounds = (self._rounds + 1) % HEARD_IN_ROUND
        if self._rounds:
            return
        self._hub.remove_reader(EARLY_ACKS.reader)
        EARLY_ACKS.read()
        if EARLY_ACKS.has_accepted:  # another child is still asking for its key
            self._listen()


def has_more_to_come() -> bool:
    """Whether a child will accept another message after this one; the pipe is read then."""
    return len(state.reserved_requests) > len(state.active_requests) + 1
