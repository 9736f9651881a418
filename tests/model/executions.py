"""Messages, how their bodies end, and the executions that run them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from celery_redislock.protocol.hold import Phase as HoldPhase
from celery_redislock.protocol.tokens import Attempt

from .holds import Call, Hold, token


class Message(NamedTuple):
    """A message in the broker's queue, or with an execution: its task's options, and what its header says."""

    attempt: Attempt
    acks_late: bool = True
    policy: str = "wait"
    parent: str = ""
    """The id of the task that published the message."""
    claim: str = ""
    """The claim that the message carries: the key is reserved for it under this nonce."""
    queued: bool = False
    """The claim is of the place in the queue, and says nothing of the key."""
    redelivered: bool = False
    """The broker says that it has delivered the message before."""
    returned: bool = False
    """The message has been published again at least once."""
    begun: bool = False
    """The header says that the work has begun, so that no policy may drop the message."""
    after: str = ""
    """The id of a task whose end the publisher had seen. The message must not be dropped in favour of that task."""
    rank: int = 0
    """The message's rank in a line. Copies of it have the same."""

    @property
    def may_be_known_as_begun(self) -> bool:
        """Whether nobody can know that the work has not begun: a process may have died before its ack."""
        return self.begun or (self.redelivered and self.acks_late)

    @property
    def again(self) -> Message:
        """The message as the broker delivers it once more."""
        return self._replace(redelivered=True)

    def __str__(self) -> str:
        marks = [name for name in ("redelivered", "returned", "begun", "claim") if getattr(self, name)]
        return f"{self.attempt}" + (f" ({', '.join(marks)})" if marks else "")


class Ending(NamedTuple):
    """How a body ends, and what it publishes before: by `self.retry()`, `replace()`, a chain or `delay()`."""

    state: str
    publishes: Message | None = None
    hands_over: bool = False
    """The key is handed over to what the body publishes."""
    requeues: bool = False
    """The message goes back into the queue."""
    caller: Message | None = None
    """The message of somebody who has seen this end, published before the key is released."""
    caller_of_job: bool = False
    """That message is of scope ``job``: its publisher reserves the key for it."""


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
#: The state of an ending that is none of the body's: its process dies, and the main process publishes its retry.
LOST = "LOST"


#: The hold of an execution that has none any more.
OVER = Hold.of(token("", Attempt("", 0, 0))).over()


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

    def named(self, nonce: str) -> Execution:
        """The execution under another name."""
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
