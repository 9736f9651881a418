"""The executions that run messages."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from celery_redislock.protocol.hold import Phase as HoldPhase
from celery_redislock.protocol.tokens import Attempt

from .holds import Call, Hold, token
from .memory import quick, remembered
from .messages import Ending, Message


class Phase(Enum):
    """Where an execution is. "Reserved" is Celery's word: the worker has received the message, and not begun it."""

    RESERVED = "before it asks"
    WAITING = "in its room"
    CALLED = "called, before it asks"
    ASKED = "with its acquire unanswered"
    RUNNING = "in its body"
    PUBLISHED = "in its body, having published"
    ENDED = "before its release"
    IN_DOUBT = "with its release in doubt"
    RELEASED = "before its ack"
    RETURNED = "sent back, before its ack"
    DROPPED = "dropped, before its ack"
    CHILD_DEAD = "with its child dead"
    KEPT = "with its child dead, and its key kept for its retry"

    __hash__ = object.__hash__  # fast: an Enum hashes its name anew each time, and the explorer asks a million times


#: The phases in which the body runs.
IN_BODY = frozenset({Phase.RUNNING, Phase.PUBLISHED})
#: The phases in which the run is over, and only the ack is to come.
CLOSED = frozenset({Phase.RELEASED, Phase.RETURNED, Phase.DROPPED})
#: The phases in which a pool child is at work, which can die while the main process lives on.
IN_CHILD = IN_BODY | {Phase.CALLED, Phase.ASKED, Phase.ENDED, Phase.IN_DOUBT}
#: The phases in which an execution takes one of its worker's slots.
IN_SLOT = (IN_CHILD - {Phase.IN_DOUBT}) | {Phase.CHILD_DEAD, Phase.KEPT}


#: The hold of an execution that has none any more.
OVER = Hold.of(token("", Attempt("", 0, 0))).over()


@quick
class Execution(NamedTuple):
    """One process running one delivered message."""

    nonce: str
    message: Message
    phase: Phase = Phase.RESERVED
    unacked: bool = True
    """The broker still has the message, and delivers it again if this process dies."""
    overdue: bool = False
    """The execution has had the message for longer than the visibility timeout."""
    lost: bool = False
    """The execution knows that its lock is lost."""
    ending: Ending | None = None
    """How the body ends. Once the release was sent it is set only where the message is to be requeued."""
    hold: Hold = OVER
    """While a release is in doubt, the keeper sends it again. The execution parts with its message meanwhile, and stays
    in the world for this alone."""
    permit: int = 1
    """The number of the permit that it was granted."""
    room: str = ""
    """The room of the worker, where the scenario says how many slots each worker has; empty: a worker of its own."""
    resent: bool = False
    """The worker has published the message again, as far as it knows in vain, and goes on with it. The message's header
    says so, but only in this worker: the broker's copy of the message is as it was."""
    begun: bool = False
    """The same header says that the work has begun."""
    number: int = 0
    """What tells it from others of its room with the same rank: what a key holds for it names both."""

    @property
    def attempt(self) -> Attempt:
        return self.message.attempt

    @property
    def limit(self) -> int:
        """How many may hold the lock at once, as this worker knows it."""
        return self.hold.demand.capacity

    @property
    def call(self) -> Call:
        """What a permit holds for the execution if it is called."""
        return Call(self.home, self.message.rank, self.number)

    @remembered
    def named(self, nonce: str) -> Execution:
        """The execution under another name."""
        if nonce == self.nonce:
            return self
        one, hold = self._replace(nonce=nonce), self.hold
        if hold.token.nonce == self.nonce:
            hold = hold._replace(token=token(nonce, hold.token.attempt, hold.token.times))
        return one._replace(hold=hold._replace(call=one.call) if hold.call else hold)

    @property
    def is_in_doubt(self) -> bool:
        """Whether nobody has read the answer to the release."""
        return self.hold.phase is HoldPhase.ENDING

    @property
    def has_parted(self) -> bool:
        """Whether the run is over and its message is gone: only its release is in doubt."""
        return self.phase is Phase.IN_DOUBT and not self.unacked

    @property
    def home(self) -> str:
        """The room of the worker."""
        return self.room or f"r{self.nonce[1:]}"

    @property
    def header(self) -> Message:
        """The message with its header as the worker has changed it."""
        message = self.message
        return message._replace(returned=message.returned or self.resent, begun=message.begun or self.begun)
