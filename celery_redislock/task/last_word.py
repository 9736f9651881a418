"""LastWord: the command that ends a run's hold of its key. Its answer comes when the run is over."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from celery_redislock.hold.held import NOT_OURS, HeldLock
from celery_redislock.hold.keeper import Keeper
from celery_redislock.protocol import commands
from celery_redislock.protocol.answers import Note
from celery_redislock.protocol.scripts import Command
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)


class LastWord(NamedTuple):
    """How a run leaves its key. It keeps nothing of the run: neither its request nor its arguments."""

    lock: HeldLock
    handed_over: tuple[Token, float] | None
    """What the key holds next, and for how many seconds, where the next attempt takes it over."""
    cooldown: float
    """How long the key cools down, in seconds."""
    note: Note | None
    """What is left for copies of the run's message."""
    was_sent_before: bool
    """Whether a time limit has interrupted the run's hooks after the command was sent: the key may be free already."""

    @property
    def command(self) -> Command:
        """The key is handed over, cools down, or is released."""
        key, token = self.lock.key, self.lock.token
        if self.handed_over is not None:
            return commands.hand_over(key, token, *self.handed_over, self.note)
        if self.cooldown:
            return commands.cool_down(key, token, self.cooldown, self.note)
        return commands.release(key, token.owner, self.note)

    def told(self, was_held: int) -> None:
        """Deal with the answer: whether the key was still the run's."""
        if not was_held and self.lock.was_granted and not self.was_sent_before:
            self.lock.lose(NOT_OURS)

    def send_again(self, keeper: Keeper, why: object) -> None:
        """Have the keeper send the command until Redis answers.

        Args:
            keeper: The keeper of the lock's server.
            why: What is known of the command that was sent, in words.
        """
        soon = f"the lock is released once Redis answers, or ends in {self.lock.lease:g} s"
        about = self.lock.fields("release_delayed")
        logger.warning("%s has ended, but %s; %s", self.lock.token.name, why, soon, extra=about)
        # The broker may be away too, with the ack unsent: a copy of the message must find the note in any case.
        note = self.note and self.note._replace(in_any_case=True)
        command, until = self._replace(note=note).command, self.lock.ends_at
        if note is not None:  # it is needed also where the lock has ended by itself
            until = max(until, time.monotonic() + note.ttl)
        keeper.later(self.lock.key, until, lambda store: store.send(command))
