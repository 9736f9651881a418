"""Hold: one owner's life with the key that it demands. It does no I/O: its driver reports what happened, and sends.

The drivers are a run, a `Lock`, a publish, and the main process of a worker whose child has died. The model in
tests/model is another.

A hold is a value, and each transition returns a new one. So an exception from outside, such as a time limit, arrives
before or after a transition, never halfway. A driver does the I/O in three steps: it stores what `asked` or `ended`
returns, sends the command, and stores what `answered` returns for the reply. If it is interrupted between two steps,
the stored hold shows what may have reached the server. An asyncio driver takes the same steps.

How long the holder may rely on the key is in `celery_redislock.hold.held_lock.Term`, which other threads read too. A
lost lock is ended like any other, because copies of its message need the note.
"""

from enum import Enum
from typing import NamedTuple, Protocol, Self

from . import commands
from .names import Demand
from .scripts import Call, Claim, Command, Note, Numbered, Passed, Tag
from .tokens import Token


class Phase(Enum):
    """Where a hold is in its life."""

    WANTED = "nothing was asked yet"
    ASKED = "asked: the key may have been granted"
    IN_DOUBT = "the reply never came; a release of the token was sent once, and may arrive at any time"
    WAITING = "refused: the owner may be called"
    HELD = "held"
    ENDING = "the command that ends the hold may have been sent"
    OVER = "over"


#: The phases by their own names: until Python 3.12, `Phase.HELD` takes ten times as long as `HELD`.
WANTED, ASKED, IN_DOUBT, WAITING, HELD, ENDING, OVER = Phase
#: Makes a hold from the values of all its fields. The class itself takes twice as long, and `_replace` four times.
_made = tuple.__new__
#: The phases in which the key may hold the owner's token.
_MAY_BE_HELD = (HELD, ENDING, ASKED)
#: The tags by which a script grants the key, or the place in its queue.
_GRANTS = (Tag.GRANTED, Tag.QUEUED)


class _Hold(NamedTuple):
    demand: Demand
    """What the owner demands."""
    token: Token
    """What the key holds if it is granted."""
    claim: Claim | None = None
    """The message's claim to a reservation that has not been used."""
    call: bytes | None = None
    """If the owner was called: what the key holds until the owner has asked for it."""
    places: tuple[str, ...] = ()
    """If the owner is a publish: the keys that it may get too, of the place in the queue and of its job's window."""
    phase: Phase = WANTED
    asks: int = 0
    """How many times the owner has asked: the id of the last command, by which its reply is recognized."""
    heir: tuple[Token, float] | None = None
    """If the key is handed over: the token of the next attempt's reservation, and for how many seconds."""
    cooldown: float = 0.0
    """How long the key cools down after the hold, in seconds; 0 for no cooldown."""
    note: Note | None = None
    """The note that the end leaves for copies of the owner's message."""


class Hold(_Hold):
    """One owner's life with its key: see the module. All fields except `demand` and `token` have defaults."""

    __slots__ = ()

    #: Makes the commands. The model has its own.
    words = commands

    @property
    def may_be_held(self) -> bool:
        """Whether the key may hold the owner's token, so that the hold must be ended."""
        return self.phase in _MAY_BE_HELD

    # What happens.

    def asked(self) -> Self:
        """The owner is about to ask, by `acquire` or `reserve`.

        Raises:
            RuntimeError: The hold is in doubt: without a new token, a release that is still on its way would end what
                is granted now.
        """
        if self.phase is IN_DOUBT:
            raise RuntimeError(f"{self.demand.key}: a hold in doubt needs a new token before it asks again")
        demand, token, claim, call, places, _, asks, _, _, _ = self
        return _made(type(self), (demand, token, claim, call, places, ASKED, asks + 1, None, 0.0, None))

    def answered(self, asks: int, tag: Tag | bytes) -> Self:
        """Command number `asks` was answered. Only a reply to the last command changes anything."""
        if asks != self.asks or self.phase is not ASKED:
            return self
        if tag in _GRANTS:
            demand, token, _, _, places, _, _, _, _, _ = self
            return _made(type(self), (demand, token, None, None, places, HELD, asks, None, 0.0, None))
        return self._replace(phase=WAITING, call=None)  # the call is used up: another owner has the key

    def doubted(self, asks: int) -> Self:
        """Command number `asks` got no reply, and `undo` was sent."""
        return self._replace(phase=IN_DOUBT) if asks == self.asks and self.phase is ASKED else self

    def minted(self, token: Token) -> Self:
        """After a doubt, the owner asks with another token from now on. With the same one, it stays in doubt."""
        is_new = self.phase is IN_DOUBT and token != self.token
        return self._replace(token=token, phase=WANTED) if is_new else self

    def renamed(self, token: Token) -> Self:
        """The held key now holds `token`, which the caller of a `Lock` has chosen."""
        return self._replace(token=token)

    def called(self, call: bytes) -> Self:
        """The owner's turn in line has come."""
        return self._replace(call=call)

    def handed_over(self, token: Token, seconds: float) -> Self:
        """The next attempt's message was sent: the end of this hold reserves the key for it."""
        return self._replace(heir=(token, seconds))

    def ended(self, cooldown: float = 0.0, note: Note | None = None) -> Self:
        """The owner is about to send `release`. It may have done so before, and been interrupted."""
        if self.phase not in _MAY_BE_HELD:
            return self
        demand, token, claim, call, places, _, asks, heir, _, _ = self
        return _made(type(self), (demand, token, claim, call, places, ENDING, asks, heir, cooldown, note))

    def released_for_now(self) -> Self:
        """`undo` has released the key, and the owner will ask again."""
        return self._replace(phase=IN_DOUBT) if self.may_be_held else self

    def unclaimed(self) -> Self:
        """The reservation was given up."""
        return self._replace(claim=None)

    def over(self) -> Self:
        """Nothing is left to do: the owner is gone, or the key belongs to the process that forked this one."""
        demand, token, *_ = self
        return _made(type(self), (demand, token, None, None, (), OVER, 0, None, 0.0, None))

    # What is sent.

    def acquire(
        self, lease: float, note: str | None = None, *, fence: bool = False, numbered: Numbered | None = None
    ) -> Command:
        """Ask for the key. Arguments as for `LockStore.acquire`."""
        demand, token, claim, call, *_ = self
        return self.words.acquire(
            demand, token, lease, note=note, fence=fence, call=call, claim=claim, numbered=numbered
        )

    def reserve(self, ttl: float, passed: Passed, *, in_queue: bool, window: float | None) -> Command:
        """Ask for a reservation. Arguments as for `LockStore.reserve`."""
        return self.words.reserve(self.demand.key, self.token, ttl, passed, in_queue=in_queue, window=window)

    def merge(self, ttl: float, queued_ttl: float, passed: Passed, call: Call) -> Command:
        """Ask for the place in the queue, or to be merged. Arguments as for `LockStore.merge`."""
        return self.words.merge(self.demand.key, self.token, ttl, queued_ttl, passed, call)

    def undo(self) -> Command:
        """Take back what may have been granted.

        The release matches the whole token. By the time it arrives, the same owner may have been granted the key with
        another token, and must keep it.
        """
        return self.words.release(self.demand, self.token.value, places=self.places)

    def release(self, *, in_any_case: bool = False) -> Command:
        """End the hold: hand the key over, let it cool down, or release it.

        Args:
            in_any_case: Whether the note is left even if no copy was seen.
        """
        demand, token = self.demand, self.token
        note = self.note and self.note._replace(in_any_case=True) if in_any_case else self.note
        if self.heir is not None:
            return self.words.hand_over(demand, token, *self.heir, note)
        if self.cooldown:
            return self.words.cool_down(demand, token, self.cooldown, note)
        return self.words.release(demand, token.owner, note)


class Owner(Protocol):
    """The driver of a hold. Only one thread drives it."""

    hold: Hold
