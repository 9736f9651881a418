"""The state of the model: Redis, the broker's queue, the executions, and what each attempt has come to.

Everything is an immutable tuple, so that a state is a key in the explorer's dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from celery_redislock.server.tokens import Attempt

from .commands import Command, Server
from .executions import CLOSED, Execution, Message
from .rules import Excuse, Promise

if TYPE_CHECKING:
    from .publishing import Publisher, Stage


class Faults(NamedTuple):
    """How many more may happen, together and of each."""

    together: int = 0
    timeouts: int = 0
    disconnects: int = 0
    deaths: int = 0
    lost_replies: int = 0
    pauses: int = 0
    failed_publishes: int = 0
    revokes: int = 0
    doublings: int = 0
    """A message that comes back is sent twice: the reply was lost."""

    def may(self, fault: str) -> bool:
        return self.together > 0 and getattr(self, fault) > 0

    def spend(self, fault: str) -> Faults:
        if self.together == 1:
            return Faults()
        return self._replace(together=self.together - 1, **{fault: getattr(self, fault) - 1})


class History(NamedTuple):
    """What the attempts have come to; nobody in the model's world can see it."""

    published: frozenset[Attempt] = frozenset()
    started: frozenset[Attempt] = frozenset()
    finished: frozenset[Attempt] = frozenset()
    """Their outcome is stored and their run has ended."""
    stored: frozenset[Attempt] = frozenset()
    """Their outcome is stored, whatever became of their run then."""
    settled: frozenset[Attempt] = frozenset()
    """Ended as their user wants it, without finishing: skipped before they began, or rejected."""
    excused: frozenset[tuple[Attempt, Excuse]] = frozenset()
    answered: frozenset[Attempt] = frozenset()
    """With these a publisher was answered."""
    failed: frozenset[Attempt] = frozenset()
    """Their publisher died, or its publish failed."""


class World(NamedTuple):
    """One state."""

    server: Server
    queue: tuple[Message, ...]
    executions: tuple[Execution, ...]
    history: History
    faults: Faults
    publishers: tuple[Publisher, ...] = ()

    @classmethod
    def of(cls, messages: tuple[Message, ...], faults: Faults, publishers: tuple[Publisher, ...] = ()) -> World:
        """The beginning: some messages in the queue, and who will send more."""
        history = History(published=frozenset(message.attempt for message in messages))
        return cls(Server(), _in_order(messages), (), history, faults, publishers)

    @property
    def is_over(self) -> bool:
        return not (self.queue or self.executions or self.publishers) and self.server.key is None

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether its outcome is stored, so that the result backend tells everybody."""
        return attempt in self.history.stored

    @property
    def is_stuck(self) -> bool:
        """The key is left to a message, and nobody has it."""
        key = self.server.key
        if key is None or key.nonce[0] != "h" or key.attempt in self.history.failed:
            return False
        claims = {message.claim for message in self.queue} | {publisher.claim for publisher in self.publishers}
        return key.nonce not in claims | {one.message.claim for one in self.executions}

    def enqueue(self, message: Message) -> World:
        return self._replace(queue=_in_order((*self.queue, message)))

    def dequeue(self, message: Message) -> World:
        left = list(self.queue)
        left.remove(message)
        return self._replace(queue=tuple(left))

    def put(self, execution: Execution) -> World:
        """With `execution` as it is now, or as a new one."""
        others = [other for other in self.executions if other.nonce != execution.nonce]
        return self._replace(executions=tuple(sorted((*others, execution), key=_nonce)))

    def without(self, execution: Execution) -> World:
        return self._replace(executions=tuple(other for other in self.executions if other.nonce != execution.nonce))

    def put_publisher(self, one: Publisher, stage: Stage) -> World:
        return self._replace(publishers=tuple(sorted((*self.publishers, one._replace(stage=stage)), key=str)))

    def without_publisher(self, one: Publisher) -> World:
        return self._replace(publishers=tuple(other for other in self.publishers if other != one))

    def remember(self, what: str, entry: object) -> World:
        """Add `entry` to the history's `what`."""
        known = getattr(self.history, what)
        return self._replace(history=self.history._replace(**{what: known | {entry}}))

    def excuse(self, attempt: Attempt, excuse: Excuse) -> World:
        """Of what follows only that is looked at which needs no other fault: there would be no end of it."""
        world = self.remember("excused", (attempt, excuse))
        return world if excuse is Excuse.ACKED_EARLY else world._replace(faults=Faults())

    def spend(self, fault: str) -> World:
        return self._replace(faults=self.faults.spend(fault))

    @property
    def is_calm(self) -> bool:
        """Nothing can go wrong any more."""
        return self.faults.together == 0

    def settle(self) -> World:
        """Once it is calm, whoever has only its message left parts with it: nothing else can come of it."""
        world = self
        for one in self.executions:
            if one.phase in CLOSED:
                world = world.part(one)
        return world

    def part(self, one: Execution) -> World:
        """Ack the message of `one`, or give it back."""
        gone = self.without(one)
        return gone.enqueue(one.message.again) if one.ending is not None and one.unacked else gone

    @property
    def canonical(self) -> World:
        """The same for worlds that differ by the names of their executions alone."""
        if any(message.claim[:1] == "n" for message in self.queue):  # a mistake lets it out of hand
            return self
        key, names = self.server.key, {}
        holder = key.nonce if key else ""
        for number, one in enumerate(sorted(self.executions, key=_shape(holder)), 1):
            names[one.nonce] = f"n{number}"
        if all(old == new for old, new in names.items()) and holder in {"", "dead", *names}:
            return self
        executions = []
        for one in self.executions:
            name = names[one.nonce]
            sent = one.sent._replace(nonce=name) if one.sent else None
            executions.append(one._replace(nonce=name, sent=sent))
        server = self.server
        if key is not None and holder[0] == "n":
            server = server._replace(key=key._replace(nonce=names.get(holder, "dead")))
        return self._replace(server=server, executions=tuple(sorted(executions, key=_nonce)))

    def fresh(self, kind: str) -> str:
        """A token that is in use nowhere. Used ones come back once forgotten, so that the states are finitely many."""
        used = {self.server.key.nonce} if self.server.key else set()
        used |= {message.claim for message in self.queue} | {one.claim for one in self.publishers} | self.server.gone
        for one in self.executions:
            used |= {one.nonce, one.gives, one.message.claim}
        return next(token for number in range(1, 100) if (token := f"{kind}{number}") not in used)


class Step(NamedTuple):
    """One transition, in words."""

    label: str
    world: World
    asked: tuple[Server, Command] | None = None
    """What Redis was asked, and its state before."""
    broken: Promise | None = None


def _in_order(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(sorted(messages))


def _nonce(one: Execution) -> str:
    return one.nonce


def _shape(holder: str) -> Callable[[Execution], tuple[object, ...]]:
    """What tells executions apart but for their names."""
    return lambda one: (one.phase.name, one.message, one.nonce == holder, one.unacked, one.overdue, one.lost)
