"""Rows: a lock, its holder and how many messages wait for it; rows as a table, and their totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from celery_redislock.errors import LockInfo, shown
from celery_redislock.protocol.names import LockPart
from celery_redislock.protocol.replies import info_of
from celery_redislock.protocol.tokens import RUNNING, Token

from .sentences import NOTHING, age, counted, duration
from .workers import Waits

#: The token in the `Row` of a free lock.
FREE = Token.of("")
_NEVER = datetime.max.replace(tzinfo=UTC)
#: The columns of a table, the most important first. If the terminal is too narrow for all, each cell is cut to a
#: length, with so many characters from its end (where a key names its permit), and columns are left out from the last.
COLUMNS = {
    "STATE": (8, 0),
    "AGE": (8, 0),
    "WAITING": (8, 0),
    "KEY": (34, 10),
    "HOST": (18, 0),
    "TASK ID": (9, 0),
    "ENDS IN": (8, 0),
    "TASK": (34, 0),
}
#: The gauges of ``export``, without their prefix.
METRICS = {
    "held": "Locks and permits that are held.",
    "kept": "Keys that are kept and have no holder: queued, being sent, cooling, spent or offered.",
    "reserved": "Those of them that are reserved for a message that has not started.",
    "waiting": "Messages that wait for a lock; a process in line whose messages are unknown counts as one.",
    "oldest_wait_seconds": "How long ago the first message in line was published.",
    "longest_hold_seconds": "How long ago the first of the locks that are held was acquired.",
}


class Calls(NamedTuple):
    """The calls that were merged into a message that waits in the queue, without their arguments."""

    number: int
    due: datetime | None
    """When the message is due, by the lock server's clock; None if that need not be waited for."""

    @classmethod
    def of(cls, token: Token, claim: bytes | None, number: bytes, due: bytes) -> Self | None:
        """Return the calls with these fields in Redis; None if the message of `token` has none."""
        with suppress(ValueError, TypeError, OverflowError, OSError):  # a damaged field
            if claim == token.nonce.encode():
                return cls(int(number), None if int(due) < 0 else datetime.fromtimestamp(int(due) / 1e6, UTC))
        return None

    def to_json(self) -> dict[str, Any]:
        """How many calls there are, and when they are due, as JSON can spell them."""
        return {"calls": self.number, "due": self.due and self.due.isoformat()}

    def said(self, now: datetime) -> str:
        """How many calls there are, and when they are due, in words."""
        due_in = (self.due - now).total_seconds() if self.due else 0.0
        return counted(self.number, "call") + (f", due in {duration(due_in)}" if due_in > 0 else "")


class Row(NamedTuple):
    """A lock, one of its permits, or the place in its queue, with its holder or the task that it is kept for."""

    part: LockPart
    token: Token
    ttl: float | None
    """Seconds until the key expires unless it is renewed; None for a key without expiry."""
    waits: Mapping[str, Waits] = {}
    """The messages that wait for the lock, by task. Each process in `outside` counts as one of the holder's task."""
    outside: Set[str] = frozenset()
    """The rooms in line for the lock whose messages no worker has reported, such as those of a `Lock` that blocks."""
    calls: Calls | None = None
    """The calls of the message that has the place in the queue; None if nothing can be merged into it."""

    @property
    def info(self) -> LockInfo:
        """The row as a `LockInfo`."""
        return info_of(self.token, self.part.key, self.ttl)._replace(state=self.state)

    @property
    def state(self) -> str:
        """The state, as in `LockInfo.state`, or ``free``."""
        return "free" if self.token is FREE else self.token.state

    @property
    def waiting(self) -> int:
        """How many messages wait for the lock."""
        return sum(waits.number for waits in self.waits.values())

    def is_of(self, task: str | None) -> bool:
        """Whether this task holds the key, or waits for the free lock; True for the task None."""
        return task is None or task in (self.waits if self.state == "free" else {self.token.task})


def with_one_spent(rows: Sequence[Row]) -> list[Row]:
    """The rows of a lock. Of the permits that its rate has spent, only the one that is free first is left."""
    spent = sorted((row for row in rows if row.state == "spent"), key=lambda row: row.ttl or 0.0)
    return [row for row in rows if row not in spent[1:]]


def oldest_first(row: Row) -> tuple[datetime, str]:
    """The sort key of rows: the holder that has held its key the longest comes first."""
    return row.token.since or _NEVER, row.part.key


#: The orders of a list, by name.
ORDERS: dict[str, Callable[[Row], Any]] = {
    "age": oldest_first,
    "waiting": lambda row: (-row.waiting, *oldest_first(row)),
    "key": lambda row: row.part.key,
    "task": lambda row: (row.token.task or "", *oldest_first(row)),
}


def table(rows: Iterable[Row], now: datetime, width: int | None = None) -> Iterator[str]:
    """The lines of a table, with its header.

    Args:
        rows: Its rows.
        now: The current time.
        width: The width of the terminal; None to show everything in full.
    """
    columns = [*zip(COLUMNS, *(_cells(row, now) for row in rows), strict=True)]
    if width is not None and _wide(columns) > width:
        sizes = COLUMNS.values()
        columns = [tuple(_cut(cell, *size) for cell in column) for column, size in zip(columns, sizes, strict=True)]
        while _wide(columns) > width and len(columns) > 1:
            columns.pop()
    padded = [[one.ljust(most) for one in column] for column, most in zip(columns, map(_longest, columns), strict=True)]
    yield from ("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def _cells(row: Row, now: datetime) -> tuple[str, ...]:
    info = row.info
    return (
        info.state,
        age(info.since, now),
        str(row.waiting or NOTHING),
        shown(info.key),
        shown(info.hostname or NOTHING),
        shown(info.task_id or NOTHING),
        NOTHING if info.ttl is None else duration(info.ttl),
        shown(info.task or NOTHING) + (f" ({row.calls.said(now)})" if row.calls else ""),
    )


def _longest(column: Iterable[str]) -> int:
    return max(map(len, column))


def _wide(columns: Sequence[Iterable[str]]) -> int:
    return sum(map(_longest, columns)) + 2 * (len(columns) - 1)


def _cut(text: str, most: int, behind: int) -> str:
    """`text` cut to at most `most` characters, `behind` of them from its end."""
    return text if len(text) <= most else f"{text[: most - behind - 1]}…{text[len(text) - behind :]}"


class Total(NamedTuple):
    """How many locks are held, and how many messages wait, for one task or all."""

    held: int = 0
    kept: int = 0
    """How many keys are kept without a holder: queued, cooling or offered."""
    reserved: int = 0
    """How many of these are reserved for a message that has not started."""
    waiting: int = 0
    """How many messages wait, as `Row.waiting` counts them."""
    oldest_wait_seconds: float = 0.0
    """How long ago the first waiting message was published; 0 if no message waits."""
    longest_hold_seconds: float = 0.0
    """How long ago the first of the held locks was acquired; 0 if none is held."""

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        return Total(*map(sum, zip(self[:4], other[:4], strict=True)), *map(max, self[4:], other[4:]))


def totals(rows: Iterable[Row]) -> dict[str, Total]:
    """The totals by task name; the name is empty for locks outside tasks."""
    lines: set[str] = set()
    found: defaultdict[str, Total] = defaultdict(Total)
    now = datetime.now(UTC)
    for row in rows:
        if row.state in RUNNING:
            held = (now - (row.token.since or now)).total_seconds()
            found[row.token.task or ""] += Total(held=1, longest_hold_seconds=max(0.0, held))
        elif row.state != "free":
            found[row.token.task or ""] += Total(kept=1, reserved=int(row.state in {"queued", "sending"}))
        if row.waiting and row.part.lock not in lines:  # all permits of a lock share one line
            lines.add(row.part.lock)
            for task, waits in row.waits.items():
                found[task] += Total(waiting=waits.number, oldest_wait_seconds=waits.oldest)
    return dict(found)


def prometheus(found: dict[str, Total]) -> Iterator[str]:
    """The totals in Prometheus' text format, line by line."""
    for field, text in METRICS.items():
        name = f"celery_redislock_{field}"
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for task, total in sorted(found.items()):
            label = shown(task).replace("\\", "\\\\").replace('"', '\\"')
            yield f'{name}{{task="{label}"}} {round(getattr(total, field), 3)}'
