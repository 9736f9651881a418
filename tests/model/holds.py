"""Holds: the real `Hold`, with the tokens and the commands of the model."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from celery_redislock.protocol import hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Claim as ClaimOfMessage
from celery_redislock.protocol.scripts import Note
from celery_redislock.protocol.tokens import Attempt

from .commands import Acquire, Command, GiveUp, HandOver, Release, Reserve
from .server import member_of

#: In the model a lock has one name, and time does not pass.
KEY, PLACE, WINDOW, LEASE = "key", "key:queued", "key:window", 0.0
#: An Enum hashes its name each time, and the model asks a million times.
hold.Phase.__hash__ = object.__hash__  # type: ignore[method-assign]


class Token(str):
    """What a key holds: a nonce and an attempt."""

    __slots__ = ("attempt", "nonce", "times")

    nonce: str
    attempt: Attempt
    times: int
    """How many times it was minted anew."""

    @property
    def owner(self) -> str:
        return self.nonce

    @property
    def value(self) -> Token:
        return self


@cache  # so that the explorer, which compares holds a million times, compares the same few tokens
def token(nonce: str, attempt: Attempt, times: int = 0) -> Any:
    made = Token(f"{nonce} {attempt} {times}")
    made.nonce, made.attempt, made.times = nonce, attempt, times
    return made


class Call(NamedTuple):
    """What a permit holds for somebody who was called to it."""

    room: str
    rank: int
    number: int


class Words:
    """Makes the commands of the model, as `protocol.commands` makes those of the code."""

    @staticmethod
    def acquire(
        demand: Demand, token: Any, lease: float, *, note: Any, fence: bool, call: Any, claim: Any, numbered: object
    ) -> Acquire:
        called = (call.room, demand.capacity, call.rank, call.number) if call else ("", demand.capacity, 0, 0)
        nonce = "" if claim is None else claim.nonce
        return Acquire(token.nonce, token.attempt, note is not None, *called, token.times, nonce)

    @staticmethod
    def reserve(key: str, token: Any, ttl: float, passed: Any, *, in_queue: bool, window: float | None) -> Reserve:
        return Reserve(token.nonce, token.attempt, *passed, opens_window=window is not None)

    @staticmethod
    def release(demand: Demand, owner: Any, note: Any = None, *, places: tuple[str, ...] = ()) -> Release | GiveUp:
        if places:
            return GiveUp(owner.nonce, is_to_come=False, exactly=owner.attempt, closes_window=WINDOW in places)
        if isinstance(owner, Token):
            return Release(owner.nonce, None, False, demand.capacity, exactly=(owner.attempt, owner.times))
        if isinstance(owner, Call):
            called = f"!{member_of(owner.room, demand.capacity)}"
            return Release(called, None, False, demand.capacity, owner.rank, owner.number)
        return Release(owner, note and note.key, bool(note and note.in_any_case), demand.capacity)

    @staticmethod
    def hand_over(demand: Demand, token: Any, to: Any, ttl: float, note: Any = None) -> HandOver:
        unseen_copy = bool(note and note.in_any_case)
        return HandOver(token.nonce, note and note.key, unseen_copy, to.nonce, to.attempt, demand.capacity)


class Hold(hold.Hold):
    """A hold of the model."""

    __slots__ = ()

    words = Words

    @classmethod
    def of(cls, token: Any, limit: int = 1, claim: str = "", places: tuple[str, ...] = ()) -> Hold:
        return cls(Demand(KEY, limit), token, ClaimOfMessage(claim, LEASE) if claim else None, places=places)

    @property
    def limit(self) -> int:
        return self.demand.capacity

    @property
    def gives(self) -> str:
        """The claim under which the hold is handed over; empty if it is not."""
        return self.heir[0].nonce if self.heir else ""

    def passes_on(self) -> Command:
        """Pass on the call, which is not used."""
        return self.words.release(self.demand, self.call)

    def noted(self, attempt: Attempt | None, in_any_case: bool) -> Hold:
        """The hold as it ends, with the note of `attempt`."""
        return self.ended(0.0, None if attempt is None else Note(attempt, LEASE, in_any_case))

    def gives_to(self, claim: str, attempt: Attempt) -> Hold:
        return self.handed_over(token(claim, attempt), LEASE)
