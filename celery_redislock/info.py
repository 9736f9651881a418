"""LockInfo: who holds a key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self


class LockInfo(NamedTuple):
    """Who holds a key, as its token tells."""

    key: str
    """The key in Redis."""
    task_id: str | None
    """The id of the task that holds it; None where the holder is no task."""
    task: str | None
    """The name of that task; None where the holder is no task."""
    hostname: str | None
    """The worker or host that holds it; None where another library's lock holds the key."""
    since: datetime | None
    """When the holder acquired the key, by the clock of its own host: an aware datetime in UTC."""
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""
    state: str = "held"
    """``"held"``: its holder runs; ``"queued"``: the key is reserved for a task that has not started yet;
    ``"cooling"``: the task has succeeded, and nobody gets the key until its `lock_cooldown` is over; ``"offered"``:
    nobody holds the key, and it is kept for a moment for the first in line."""
    waiting_processes: int = 0
    """How many processes stand in line for the key: a worker counts as one, however many messages wait in it. Only
    `lock_info` asks for this; elsewhere it is 0."""
    others: tuple[LockInfo, ...] = ()
    """Who else holds the lock, where more than one may."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Make one of another `LockInfo`, or of what a serializer has made of its `plain` values."""
        info = cls(*values)
        since: Any = info.since
        if isinstance(since, str):
            info = info._replace(since=datetime.fromisoformat(since))
        return info._replace(others=tuple(cls.of(other) for other in info.others))

    @property
    def plain(self) -> tuple[Any, ...]:
        """Its values in types that every serializer can carry: `since` is ISO 8601 text."""
        since = self.since and self.since.isoformat()
        others = tuple(other.plain for other in self.others)
        return (*self[:4], since, self.ttl, self.state, self.waiting_processes, others)

    def to_json(self, scope: str | None, waiting: int = 0) -> dict[str, Any]:
        """What the command line and ``celery inspect locks`` tell of it, in types that JSON has.

        Args:
            scope: The `lock_scope` of the task; None where that is not known, or the holder is no task.
            waiting: How many messages wait for the key.
        """
        return {
            "key": self.key,
            "task": self.task,
            "task_id": self.task_id,
            "hostname": self.hostname,
            "since": self.since and self.since.isoformat(),
            "ttl": self.ttl,
            "state": self.state,
            "scope": scope,
            "waiting": waiting,
        }

    @property
    def holders(self) -> tuple[LockInfo, ...]:
        """All who hold the lock: one, unless it has a limit."""
        return (self._replace(others=()), *self.others)

    @property
    def who(self) -> str:
        """The holders in words, for messages: their task ids and hosts."""
        named = [holder._name for holder in self.holders[:3]]
        more = len(self.holders) - 3
        return ", ".join(named if more <= 0 else [*named, f"and {more} more"])

    @property
    def _name(self) -> str:
        host, task = shown(self.hostname or "an unknown host"), f"task {shown(str(self.task_id))}"
        if self.state == "offered":
            return f"the first in line, on {host}"
        if self.state == "queued":
            return f"{task}, queued by {host}"
        if self.state == "cooling":
            return f"{task}, which has succeeded on {host} and cools down"
        return f"{task} on {host}" if self.task_id else f"a lock outside tasks on {host}"


#: How many characters of a name are shown.
MAX_SHOWN = 200
#: The same of the name of a lock, which people must find again in Redis, and of an error.
LONGEST = 1000


def shown(name: str, longest: int = MAX_SHOWN) -> str:
    """`name`, cut and with unprintable characters escaped, so that it can neither break, forge nor fill a log line.

    It is cut first, to `longest` characters, so that a name of a megabyte costs no time.
    """
    start = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return start if start.isprintable() else start.encode("unicode_escape").decode()


def run_named(task: str, task_id: object) -> str:
    """A run, a message or a job in log lines: ``task shop.bill[<id>]``."""
    return f"task {task}[{shown(str(task_id))}]"


def fields(event: str, **about: object) -> dict[str, str]:
    """What a log line tells, as the fields of its record: ``extra=fields("lost", key=key)`` sets `redislock_key`.

    Args:
        event: What has happened, as a fixed word.
        about: What it concerns: ``task``, ``task_id``, ``key``, ``holder`` (in words), ``holder_id``, ``reason``; what
            is None is left out.
    """
    about = {"event": event, **about}
    return {f"redislock_{name}": shown(str(value), LONGEST) for name, value in about.items() if value is not None}
