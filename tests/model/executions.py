"""Messages and the executions that run them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from celery_redislock.server.tokens import Attempt

from .commands import Command


class Message(NamedTuple):
    """What the broker holds; one that is published is as the task's options and its header say."""

    attempt: Attempt
    acks_late: bool = True
    policy: str = "retry"
    parent: str = ""
    """The id of the task that published it."""
    claim: str = ""
    """The hand-over token that it carries."""
    redelivered: bool = False
    returned: bool = False
    """It has been sent back at least once."""
    begun: bool = False
    """Its header says that no policy may drop it."""
    after: str = ""
    """Its publisher has seen the end of that task."""

    @property
    def may_be_known_as_begun(self) -> bool:
        """Whether a process that ran it may have died before its ack: nobody can know."""
        return self.begun or (self.redelivered and self.acks_late)

    @property
    def again(self) -> Message:
        """As the broker delivers it again."""
        return self._replace(redelivered=True)

    def __str__(self) -> str:
        marks = [name for name in ("redelivered", "returned", "begun", "claim") if getattr(self, name)]
        return f"{self.attempt}" + (f" ({', '.join(marks)})" if marks else "")


class Ending(NamedTuple):
    """How a body ends. What it publishes, it publishes before: `self.retry()`, `replace()`, chains and `.delay()`."""

    state: str
    publishes: Message | None = None
    hands_over: bool = False
    requeues: bool = False
    caller: Message | None = None
    """What somebody publishes who has seen this end, before the key is given back."""
    caller_of_job: bool = False
    """It is of scope ``job``: its publisher takes the key for it."""


class Phase(Enum):
    """Where an execution is."""

    RESERVED = "before it asks"
    ASKED = "with its acquire unanswered"
    RUNNING = "in its body"
    PUBLISHED = "in its body, having published"
    ENDED = "before its release"
    RELEASING = "with its release unanswered"
    RELEASED = "before its ack"
    RETURNED = "sent back, before its ack"
    DROPPED = "dropped, before its ack"
    CHILD_DEAD = "with its child dead"

    __hash__ = object.__hash__  # the default hashes the name: the explorer does it a million times


#: A body may run in these.
IN_BODY = frozenset({Phase.RUNNING, Phase.PUBLISHED})
#: Only the message is left.
CLOSED = frozenset({Phase.RELEASED, Phase.RETURNED, Phase.DROPPED})
#: A pool child is at work in these: it can die alone.
IN_CHILD = IN_BODY | {Phase.ASKED, Phase.ENDED, Phase.RELEASING}


class Execution(NamedTuple):
    """One process running one delivered message."""

    nonce: str
    message: Message
    phase: Phase = Phase.RESERVED
    unacked: bool = True
    """The broker will deliver the message again if this process dies."""
    overdue: bool = False
    """It has had the message for longer than the visibility timeout."""
    lost: bool = False
    """It knows that its lock is lost."""
    ending: Ending | None = None
    """How the body ends; once CLOSED, only where the message is to be given back."""
    gives: str = ""
    """The hand-over token that it has put into a message."""
    sent: Command | None = None
    """The release that is sent again, as it was."""

    @property
    def attempt(self) -> Attempt:
        return self.message.attempt
