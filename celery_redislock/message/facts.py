"""What is known of a delivered message, as values: decisions are made of it."""

from __future__ import annotations

from typing import NamedTuple

from celery_redislock.server.tokens import Attempt


class Delivered(NamedTuple):
    """How a message has come to its worker."""

    acks_late: bool
    """The broker hears only at the end of the run that it has been received."""
    is_redelivered: bool
    """The broker says that it has delivered it before."""
    is_overdue: bool
    """It has been here for about the visibility timeout: the broker takes it for lost, and delivers it again."""
    is_marked_begun: bool
    """Its header says that it has begun."""
    has_come_back: bool
    """It has been sent back at least once."""

    @property
    def is_delivered_again(self) -> bool:
        """Whether the broker has given the message to more than one worker, or is about to."""
        return self.is_overdue or self.is_redelivered or self.is_marked_begun

    @property
    def may_be_a_copy(self) -> bool:
        """Whether another delivery of the message may have begun before, or be still to come.

        Such a message reads the note of its attempt, and leaves one. One that has come back may be there twice: kombu
        sends again what the broker has not confirmed.
        """
        return self.has_come_back or self.is_delivered_again

    @property
    def has_begun(self) -> bool:
        """Whether a process that ran the message may have died in the midst, so that no policy may drop it.

        With a late ack nobody can know. An early ack is sent before the body begins: what the broker delivers again has
        not begun then. Nor has what is merely old.
        """
        return self.is_marked_begun or (self.acks_late and self.is_redelivered)


class Facts(NamedTuple):
    """What is known of a message that meets a conflict."""

    delivered: Delivered
    attempt: Attempt
    causes: frozenset[str]
    """The ids of its own task, of its parent and of its root, as tokens know them."""
    is_claimed: bool = False
    """It carries a claim: its key, or the place of the one that waits, was left to it."""
    joins: str | None = None
    """The task whose outcome it waits for."""
    has_expired: bool = False
    waited: float = 0.0
    """Seconds since it was sent back for the first time."""
