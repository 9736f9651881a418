"""What the replies of the scripts mean to their callers."""

from typing import NamedTuple, Self

from celery_redislock.errors import LockInfo

from .scripts import GRANTED, Reply, Tag
from .tokens import Token, unescape


def info_of(token: Token, key: str, ttl: float | None) -> LockInfo:
    """Return the holder of `key`, which holds `token` and expires in `ttl` seconds unless renewed."""
    task_id = token.attempt.task_id if token.attempt else None
    return LockInfo(str(key), task_id, token.task, token.hostname, token.since, ttl, token.state)


class Granted(NamedTuple):
    """The reply to an acquire: the caller now holds the key."""

    sent_at: float
    """`time.monotonic()` just before the command was sent: the lease cannot have begun earlier."""
    fence: int | None = None
    """The fencing number, if the acquire asked for one: greater than any earlier holder's."""
    permit: int = 1
    """The number of the permit granted."""
    number: int = 0
    """The number of the call that the run is for; 0 if its message has none."""
    calls: tuple[bytes, ...] = ()
    """The arguments that the run is given in place of its message's, call by call."""

    @classmethod
    def of(cls, reply: Reply, sent_at: float) -> Self:
        """Return what the reply to a command sent at `sent_at` grants."""
        if len(reply) == 1:  # every run gets this one, and the class would take twice as long
            return tuple.__new__(cls, (sent_at, None, 1, 0, ()))
        fence, number = reply[2] if len(reply) > 2 else None, reply[3] if len(reply) > 3 else 0
        return cls(sent_at, fence, reply[1], number, tuple(reply[4:]))


class Conflict(NamedTuple):
    """The reply to an acquire, or to a room that stands in line: another owner has the key, or it is kept for one."""

    holder: Token
    ttl: float | None
    """Seconds until the key expires unless it is renewed; None for a key that never expires."""
    now: int = 0
    """The server's clock at the reply, in microseconds; 0 if not known."""
    waiting: int = 0
    """How many rooms stand in line for the key; 0 if the command did not ask."""
    others: tuple[Token, ...] = ()
    """The other holders, if the lock can have several."""
    cannot_wait: bool = False
    """Whether the holder is another delivery of the caller's message, with a permit. In line, the caller would be
    called for every other permit that becomes free, and refused each time."""
    rank: int = 0
    """The rank with which the caller waits; 0 if that goes by time."""

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return who holds the key, by a script's reply."""
        tag, ttl, now, waiting, *values = reply
        # Actual holders first, then the tokens of rooms and waiters that the key is kept for.
        holders = [*map(Token.of, values)]
        holder, *others = sorted(holders, key=lambda one: one.state == "offered") if len(holders) > 1 else holders
        rank, waiting = (waiting, 0) if tag == Tag.RANKED else (0, waiting)
        return cls(holder, ttl / 1000 if ttl >= 0 else None, now, waiting, tuple(others), tag == Tag.COPY, rank)

    @property
    def holders(self) -> tuple[Token, ...]:
        """All holders of the key."""
        return (self.holder, *self.others)

    @property
    def is_spent(self) -> bool:
        """Whether a rate is used up."""
        return self.holder.state == "spent"

    def info(self, key: str) -> LockInfo:
        """Return the holders of `key` as a `LockInfo`: the first one, with the others in `LockInfo.others`."""
        return info_of(self.holder, key, self.ttl)._replace(
            waiting_processes=self.waiting, others=tuple(info_of(other, key, None) for other in self.others)
        )


class Called(NamedTuple):
    """The reply to a room that stands in line: its first waiter is called."""

    now: int
    """The server's clock at the reply, in microseconds."""
    ttl: float | None
    """With a rate: seconds until the room checks the line again; None without."""


class Reserved(NamedTuple):
    """The reply to a publisher: it may send its message."""

    key: str
    """The key in Redis that is reserved for the message: the lock's, or the place in the queue."""
    number: int = 0
    """The number of the message's call; 0 if it has none."""
    due_in: float = 0.0
    """In how many seconds the message is due, if it can have merged calls."""


class Outstanding(NamedTuple):
    """The reply to a publisher: nothing is reserved for its message.

    A job is outstanding, another task's job has the place in the queue, or the window of an earlier job is open.
    """

    taken: tuple[tuple[Token, float | None], ...]
    """The tokens of the key and of the place in the queue, with the seconds until they expire unless renewed; or the
    token of the job whose window is open, with the seconds until it closes."""
    in_window: bool = False
    """Whether a window is open."""

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return the jobs that a script has reported."""
        tag, *pairs = reply
        taken = zip(pairs[::2], pairs[1::2], strict=True)
        return cls(
            tuple((Token.of(value), ttl / 1000 if ttl >= 0 else None) for value, ttl in taken if value is not None),
            tag == Tag.WINDOW,
        )

    def info(self, key: str) -> list[LockInfo]:
        """Return the jobs as `LockInfo`."""
        return [info_of(token, key, ttl) for token, ttl in self.taken]


class Merged(NamedTuple):
    """The reply to a publisher: its call was merged into a message that waits in the queue."""

    number: int
    """The number of the call."""
    ticket: Token | None
    """The token of that message; None if the run with the call's arguments, or later ones, has begun."""
    ttl: float | None = None
    """Seconds until the place of that message expires unless it is refreshed."""

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return what a script has merged."""
        _, number, *ticket = reply
        return cls(number, Token.of(ticket[0]), ticket[1] / 1000) if ticket else cls(number, None)

    def info(self, key: str) -> LockInfo:
        """Return that message's job as `LockInfo`."""
        assert self.ticket is not None  # noqa: S101
        return info_of(self.ticket, key, self.ttl)


class Finished:
    """The reply to an acquire: the caller's attempt has already ended in another execution."""


class NotDue(NamedTuple):
    """The reply to an acquire: the run is to begin later."""

    due_in: float
    """In how many seconds."""
    now: int
    """The server's clock at the reply, in microseconds."""


class Superseded(NamedTuple):
    """The reply to an acquire: the run must not begin, now or later."""

    task_id: str | None
    """The task whose run, with a newer call, has begun; None if the merged calls have expired."""


class Stopped(NamedTuple):
    """The reply to an acquire: a run of this job was asked to stop, so that none begins again."""

    task_id: str
    """The task that has replaced it."""


#: What the reply to an acquire may be.
Answer = Granted | Conflict | Finished | NotDue | Superseded | Stopped


def meaning(reply: Reply, sent_at: float) -> Answer:
    """Return what the reply to an acquire that was sent at `sent_at` means."""
    if reply[0] == GRANTED:
        return Granted.of(reply, sent_at)
    match reply[0]:
        case Tag.FINISHED:
            return Finished()
        case Tag.DUE:
            return NotDue(reply[1] / 1000, reply[2])
        case Tag.EXPIRED | Tag.SUPERSEDED:
            return Superseded(unescape(reply[1].decode(errors="replace")) if len(reply) > 1 else None)
        case Tag.STOPPED:
            return Stopped(unescape(reply[1].decode(errors="replace")))
    return Conflict.of(reply)


class Renewed(NamedTuple):
    """The reply to a renewal: the holder still has the key."""

    asked_by: str | None = None
    """The task that asks the holder to stop; None if none does."""

    @classmethod
    def of(cls, reply: bytes | list[bytes]) -> Self | None:
        """Return what a renewal's reply about one key means; None if the key is lost."""
        if isinstance(reply, list):
            return cls(unescape(reply[1].decode(errors="replace")))
        return cls() if reply == Tag.KEPT else None
