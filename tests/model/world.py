"""World: one state of the model: Redis, the broker's queue, the executions, and what has become of each attempt.

Everything is an immutable tuple, so that a state can be a key in the explorer's dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from .commands import Command, Release
from .executions import CLOSED, IN_BODY, Execution, Phase
from .memory import quick
from .messages import Message
from .server import Key, Server, limit_of, member_of, room_of

if TYPE_CHECKING:
    from .publishing import Publisher, Stage


class Faults(NamedTuple):
    """How many more faults may happen: in all, and of each kind."""

    together: int = 0
    timeouts: int = 0
    disconnects: int = 0
    deaths: int = 0
    lost_replies: int = 0
    pauses: int = 0
    failed_publishes: int = 0
    revokes: int = 0
    doublings: int = 0
    """A message that comes back is published twice, because the broker's reply was lost."""
    lapses: int = 0
    """An offer, or a call, that ends though its room lives."""
    late_undos: int = 0
    """An undo that is still on its way when its execution, which cannot send its message back, asks again."""
    handovers: int = 0
    """A message that waits is published again by its worker: in a shutdown, or after too long a wait."""
    slow_publishes: int = 0
    """A publisher that lives, but is so slow to send its message that another one takes its reservation over."""

    @property
    def spares_jobs(self) -> bool:
        """Whether no fault may happen by which a job loses what is reserved for it before it has ended.

        No reservation lapses then either whose message is yet to come.
        """
        return not (self.timeouts or self.disconnects or self.deaths or self.pauses or self.lost_replies)

    def may(self, fault: str) -> bool:
        return self.together > 0 and getattr(self, fault) > 0

    def spend(self, fault: str) -> Faults:
        if self.together == 1:
            return Faults()
        return self._replace(together=self.together - 1, **{fault: getattr(self, fault) - 1})


@quick
class History(NamedTuple):
    """What has become of the attempts. The promises are checked by it; no execution can see it."""

    published: frozenset[Attempt] = frozenset()
    started: frozenset[Attempt] = frozenset()
    finished: frozenset[Attempt] = frozenset()
    """Attempts whose outcome is stored and whose run has ended."""
    stored: frozenset[Attempt] = frozenset()
    """Attempts whose outcome is stored, whatever became of the run then."""
    settled: frozenset[Attempt] = frozenset()
    """Attempts that ended without finishing, as the user wants it: skipped before they began, revoked, or rejected."""
    excused: frozenset[tuple[Attempt, Excuse]] = frozenset()
    """Attempts of which a promise may be broken, and why."""
    answered: frozenset[Attempt] = frozenset()
    """Attempts with which another publisher was answered."""
    jobs: frozenset[Attempt] = frozenset()
    """Attempts that were sent with a reservation; noted only where `Faults.spares_jobs`. Where publishers may be slow,
    only those count that were said to be sent."""
    windows: frozenset[Attempt] = frozenset()
    """Attempts that were said to be sent and have opened a window that must be open still."""
    failed: frozenset[Attempt] = frozenset()
    """Attempts whose publisher has died or was too slow, or whose publish has failed."""


@quick
class World(NamedTuple):
    """One state."""

    server: Server
    queue: tuple[Message, ...]
    executions: tuple[Execution, ...]
    history: History
    faults: Faults
    publishers: tuple[Publisher, ...] = ()
    asleep: frozenset[str] = frozenset()
    """The rooms that wait for their wake-up: only where the mistake is made that rooms do not look."""
    late: tuple[Release, ...] = ()
    """Undos on their way: nobody waits for them, and they may still arrive."""
    busy: tuple[str, ...] = ()
    """The workers of which a task with another key has a slot, once for each such task."""

    @classmethod
    def of(
        cls, messages: tuple[Message, ...], faults: Faults, publishers: tuple[Publisher, ...] = (), permits: int = 1
    ) -> World:
        """The beginning: messages in the queue, publishers that will send more, and a lock with so many permits."""
        history = History(published=frozenset(message.attempt for message in messages))
        return cls(Server((None,) * permits), _in_order(messages), (), history, faults, publishers)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, and the lock is free."""
        return not (self.queue or self.executions or self.publishers) and self.server.is_free and not self.busy

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether the outcome of `attempt` is stored, so that the result backend tells it to everybody."""
        return attempt in self.history.stored

    def waiting_in(self, room: str, limit: int | None = None) -> list[Execution]:
        """Who waits in `room`, in the order of their ranks; those with this limit, or all."""
        waiting = [one for one in self.executions if one.phase is Phase.WAITING and one.home == room]
        if limit is not None:
            waiting = [one for one in waiting if one.limit == limit]
        return sorted(waiting, key=lambda one: one.message.rank)

    def take_slot(self, room: str) -> World:
        """This state with a slot of that worker taken by a task with another key."""
        return self._replace(busy=tuple(sorted((*self.busy, room))))

    def leave_slot(self, room: str) -> World:
        """This state after the end of such a task."""
        others = list(self.busy)
        others.remove(room)
        return self._replace(busy=tuple(others))

    @property
    def called(self) -> list[Execution]:
        """The executions that were called and have not asked yet."""
        return [one for one in self.executions if one.phase is Phase.CALLED]

    @property
    def claims(self) -> set[str]:
        """The claims of the messages that are on their way."""
        return {message.claim for message in self.queue} | {one.message.claim for one in self.executions}

    @property
    def stuck(self) -> list[Key]:
        """What is reserved for messages that are neither queued, nor to be sent, nor with an execution."""
        reserved = [key for key in self.server.reserved if key.attempt not in self.history.failed]
        if not reserved:
            return []
        claims = self.claims | {publisher.claim for publisher in self.publishers}
        claims |= {one.hold.gives for one in self.executions if one.phase is Phase.KEPT}
        return [key for key in reserved if key.nonce not in claims]

    def enqueue(self, message: Message) -> World:
        return self._replace(queue=_in_order((*self.queue, message)))

    def dequeue(self, message: Message) -> World:
        others = list(self.queue)
        others.remove(message)
        return self._replace(queue=tuple(others))

    def put(self, execution: Execution) -> World:
        """This state with `execution` added, or in place of what that execution was before."""
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
        """Excuse `attempt`. Further faults are not explored after that: there would be no end of what they can do.

        An early ack is the exception, for it ends what can happen to the attempt.
        """
        world = self.remember("excused", (attempt, excuse))
        return world if excuse is Excuse.ACKED_EARLY else world._replace(faults=Faults())

    def close_window(self, attempt: Attempt) -> World:
        """This state, in which the window of `attempt` need not be open any more."""
        return self._replace(history=self.history._replace(windows=self.history.windows - {attempt}))

    def spend(self, fault: str) -> World:
        return self._replace(faults=self.faults.spend(fault))

    @property
    def is_calm(self) -> bool:
        """Whether no fault can happen any more."""
        return self.faults.together == 0

    def settle(self) -> World:
        """This state after all acks that are still to come. Only for a calm state: their order changes nothing."""
        world = self
        for one in self.executions:
            if one.phase in CLOSED or (one.phase is Phase.IN_DOUBT and one.unacked):
                world = world.part(one)
            elif one.phase in IN_BODY and one.unacked and not one.message.acks_late:
                world = world.put(one._replace(unacked=False))
        return world

    def part(self, one: Execution) -> World:
        """The state after `one` has acked its message, or has put it back into the queue.

        Only a release that is in doubt keeps `one` in the world.
        """
        gone = self.put(one._replace(unacked=False, ending=None)) if one.is_in_doubt else self.without(one)
        return gone.enqueue(one.message.again) if one.ending is not None and one.unacked else gone

    @property
    def canonical(self) -> World:
        """One form for all states that differ only in the names of their executions."""
        if any(message.claim[:1] == "n" for message in self.queue):  # by a mistake a message carries an execution's
            return self
        names = {}
        for number, one in enumerate(sorted(self.executions, key=_shape(self.server)), 1):
            names[one.nonce] = f"n{number}"
        holders = {key.nonce for key in self.server.keys}
        is_same = all(old == new for old, new in names.items()) and holders <= {"dead", *names}
        if is_same and not (self.server.line or self.late):
            return self
        executions = sorted((one.named(names[one.nonce]) for one in self.executions), key=_nonce)
        late = tuple(undo._replace(nonce=names.get(undo.nonce, "dead")) for undo in self.late)
        return self._replace(server=_renamed(self.server, names), executions=tuple(executions), late=late)

    def fresh(self, kind: str) -> str:
        """A nonce that is in use nowhere. It may have been used before, so that the states are finitely many.

        Args:
            kind: ``"n"`` for an execution, ``"h"`` for a claim.
        """
        used = {key.nonce for key in self.server.keys} | {f"n{key.room[1:]}" for key in self.server.keys if key.room}
        used |= {key.nonce for key in (*self.server.reserved, self.server.window) if key is not None}
        used |= {undo.nonce for undo in self.late}
        used |= {message.claim for message in self.queue} | {one.claim for one in self.publishers} | self.server.gone
        used |= {f"n{room_of(member)[1:]}" for _, member in self.server.line}
        for one in self.executions:
            used |= {one.nonce, one.hold.gives, one.message.claim}
        return next(nonce for number in range(1, 100) if (nonce := f"{kind}{number}") not in used)


@quick
class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    """What happens, in words."""
    world: World
    """The state after it."""
    asked: tuple[Server, Command] | None = None
    """The state that Redis was in, and the command that it was asked."""
    broken: Promise | None = None
    """The promise that this step breaks."""
    is_too_late: bool = False
    """Whether nobody should have to wait until this happens: a reservation lapses whose message is on its way."""


def _in_order(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(sorted(messages))


def _nonce(one: Execution) -> str:
    return one.nonce


def _renamed(server: Server, names: dict[str, str]) -> Server:
    """`server` with other names for the executions, and for the rooms that are called after them."""
    rooms = {f"r{old[1:]}": f"r{new[1:]}" for old, new in names.items()}

    def member(old: str, dead: str) -> str:
        if old[0] != "r":
            return old
        return member_of(rooms.get(room_of(old), dead), limit_of(old))

    def renamed(key: Key) -> Key:
        nonce = key.nonce
        if nonce[0] in "?!":
            nonce = nonce[0] + member(key.member, "rdead")
        elif nonce[0] == "n":
            nonce = names.get(nonce, "dead")
        return key if nonce == key.nonce else key._replace(nonce=nonce)

    permits = tuple(key and renamed(key) for key in server.permits)
    line = tuple((rank, member(old, f"rdead{rank}")) for rank, old in server.line)
    return server._replace(permits=permits, line=line)


def _shape(server: Server) -> Callable[[Execution], tuple[object, ...]]:
    """A sort key of executions: all that tells them apart besides their names."""
    held = {key.nonce: permit for permit, key in enumerate(server.permits) if key}
    kept = {key.room: permit for permit, key in enumerate(server.permits) if key and key.member}
    ranks = {member: rank for rank, (_, member) in enumerate(server.line)}

    def shape(one: Execution) -> tuple[object, ...]:
        home = one.home
        known = (held.get(one.nonce, -1), kept.get(home, -1), ranks.get(member_of(home, one.limit), -1))
        return (one.phase.name, one.message, *known, one.unacked, one.overdue, one.lost, *one[-7:])

    return shape
