"""Messages, and how their bodies end."""

from __future__ import annotations

from typing import NamedTuple

from celery_redislock.protocol.tokens import Attempt

from .memory import quick, remembered

#: The state of an ending that is none of the body's: its process dies, and the main process publishes its retry.
LOST = "LOST"


@quick
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
    window: bool = False
    """The message is a job of a task that has windows."""
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

    @remembered
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
