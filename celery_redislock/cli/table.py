"""Table: rows of text in columns, and times as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from celery_redislock.shown import shown

from .scan import Row

#: The key is the last column: it may be long, and a line that is too long for the terminal breaks there.
HEAD = ("STATE", "HELD FOR", "ENDS IN", "WAITING", "TASK", "TASK ID", "HOST", "KEY")
NOTHING = "-"


def table(rows: Iterable[Row], now: datetime) -> Iterator[str]:
    """The lines of a table, with its head."""
    return columns([HEAD, *(cells(row, now) for row in rows)])


def cells(row: Row, now: datetime) -> tuple[str, ...]:
    """What the table tells of one holder."""
    info = row.info
    return (
        info.state,
        age(info.since, now),
        NOTHING if info.ttl is None else duration(info.ttl),
        str(info.waiting or NOTHING),
        shown(info.task or NOTHING),
        shown(info.task_id or NOTHING),
        shown(info.hostname or NOTHING),
        shown(info.key),
    )


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as one line, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def counted(number: int, noun: str) -> str:
    """A number of things in words: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_line(messages: int, workers: int) -> str:
    """How many messages wait for a lock, as the workers tell."""
    return f"{counted(messages, 'message')} in {counted(workers, 'worker')} that answered"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago `since` was. Where the clock of its host is ahead of ours: no time at all."""
    return NOTHING if since is None else duration(max(0.0, (now - since).total_seconds()))


def duration(seconds: float) -> str:
    """Seconds in words: ``0.4s``, ``12s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit, size, small, of_small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // of_small:02}{small}"
    return f"{whole}s"


def moment(since: datetime | None, now: datetime) -> str:
    """A time of day in UTC, and how long ago that was."""
    if since is None:
        return "an unknown time"
    return f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(since, now)} ago)"
