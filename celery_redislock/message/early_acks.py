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
from typing import Protocol

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

    def begins(self, nonce: str) -> None:
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
