"""Console: what the commands share. Options, exit codes and one-line errors; tables, and times and numbers in words."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import IO, Any, NamedTuple

import click
from celery import Celery
from celery.platforms import EX_UNAVAILABLE
from redis.exceptions import RedisError

from celery_redislock.app import server_of
from celery_redislock.connection.connect import address
from celery_redislock.errors import LockConfigError, LockUnavailable, describe
from celery_redislock.info import LONGEST, shown

from .scan import Row

TASK = click.option("--task", metavar="NAME", help="Only locks that are held by this task.")
MATCH = click.option("--match", metavar="GLOB", help="Only keys that match this pattern, as Redis' SCAN takes it.")
_TIMEOUT = "Seconds to wait for the workers; 0 asks none of them."
TIMEOUT = click.option("--timeout", type=click.FloatRange(0), default=1.0, show_default=True, help=_TIMEOUT)


class Nothing(click.ClickException):
    """Nothing was found: no lock, no holder, no trace of the task. That is an answer, not an error."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message without click's ``Error:``."""
        click.echo(self.message, file=file, err=True)


class Refused(Nothing):
    """Not released: the user said no or could not be asked, the key is not this app's, or its holder has changed."""

    exit_code = 3


class Unavailable(click.ClickException):
    """The lock server cannot be reached, or none is set. Celery's own commands use this exit code without a broker."""

    exit_code = EX_UNAVAILABLE


def width() -> int | None:
    """The width of the terminal; None if the output is a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def app_of(context: click.Context) -> Celery:
    """The app of the command line, with its tasks loaded."""
    # Report an error only once: without a handler, Python prints logged warnings too.
    logging.getLogger("celery_redislock").addHandler(logging.NullHandler())
    app: Celery = context.obj.app
    app.loader.import_default_modules()
    return app


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command its context and ``--timeout``; have it say in one line which lock server cannot be reached."""

    @TIMEOUT
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, *args: Any, **kwargs: Any) -> None:
        try:
            command(context, *args, **kwargs)
        except LockConfigError as error:
            raise Unavailable(str(error)) from None
        except RedisError as error:
            why = shown(error.reason, LONGEST) if isinstance(error, LockUnavailable) else describe(error)
            where = address(server_of(context.obj.app).client)
            raise Unavailable(f"the lock server {where} cannot be asked: {why}") from None

    return run


def task_of(app: Celery, name: str) -> Any:
    """The locked task with this name.

    Raises:
        BadParameter: The app has no such task, or the task is not a `LockedTask`.
    """
    task = app.tasks.get(name)
    if getattr(task, "lock_plan", None) is None:
        known = "is no LockedTask" if task is not None else "is no task of this app"
        raise click.BadParameter(f"{name} {known}", param_hint="--task")
    return task


#: Most important first: a narrow terminal shows the first five of these columns, and whichever others fit.
HEAD = ("STATE", "AGE", "WAITING", "KEY", "HOST", "TASK ID", "ENDS IN", "TASK")
NOTHING, GAP = "-", "  "
_NEEDED, (_KEY, _HOST, _ID, _ENDS, _TASK) = 5, range(3, 8)
#: In a narrow terminal: the shortest length that a key or host is cut to, and the length of every task id.
_SHORTEST, _SHORT_ID = {_KEY: 32, _HOST: 8}, 9
#: How many characters of a cut key come from its end, which names the permit.
_END_OF_KEY = 10
METRICS = {
    "held": ("celery_redislock_held", "Locks and permits that are held now."),
    "kept": ("celery_redislock_kept", "Keys that are kept and have no holder: queued, cooling or offered."),
    "waiting": (
        "celery_redislock_waiting",
        "Messages that wait for a lock; where none are known, each process in line.",
    ),
    "oldest": ("celery_redislock_oldest_wait_seconds", "How long ago the first message in line was published."),
}


def table(rows: Iterable[Row], now: datetime, width: int | None = None) -> Iterator[str]:
    """The lines of a table, with its header.

    Args:
        rows: Its rows.
        now: The current time.
        width: The width of the terminal; None to show everything in full.
    """
    found = [HEAD, *(cells(row, now) for row in rows)]
    return columns(found if width is None else fitted(found, width))


def cells(row: Row, now: datetime) -> tuple[str, ...]:
    """The cells of one row."""
    info = row.info
    return (
        info.state,
        age(info.since, now),
        str(row.waiting or NOTHING),
        shown(info.key),
        shown(info.hostname or NOTHING),
        shown(info.task_id or NOTHING),
        NOTHING if info.ttl is None else duration(info.ttl),
        shown(info.task or NOTHING),
    )


def fitted(rows: Sequence[Sequence[str]], width: int) -> Sequence[Sequence[str]]:
    """`rows` cut to fit into `width`: a narrow terminal gets fewer columns and shorter names."""
    found = [*zip(*rows, strict=True)]
    if _wide(found) <= width:
        return rows
    found[_ID] = tuple(_cut(cell, _SHORT_ID) for cell in found[_ID])
    chosen, spare = found[:_NEEDED], max(0, _longest(found[_KEY]) - _SHORTEST[_KEY])
    for column, spared in ((_ID, spare), (_ENDS, 0), (_TASK, 0)):
        if _wide([*chosen, found[column]]) - spared <= width:
            chosen.append(found[column])
    for column, behind in ((_KEY, _END_OF_KEY), (_HOST, 0)):
        most = max(_SHORTEST[column], _longest(found[column]) + min(0, width - _wide(chosen)))
        chosen[column] = tuple(_cut(cell, most, behind) for cell in found[column])
    return [*zip(*chosen, strict=True)]


def _longest(column: Sequence[str]) -> int:
    return max(map(len, column))


def _wide(columns: Sequence[Sequence[str]]) -> int:
    return sum(_longest(column) + len(GAP) for column in columns) - len(GAP)


def _cut(text: str, most: int, behind: int = 0) -> str:
    """`text` cut to at most `most` characters, `behind` of them from its end."""
    return text if len(text) <= most else f"{text[: most - behind - 1]}…{text[len(text) - behind :]}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as one line, its cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number of things in words: ``1 worker``, ``2 workers``."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago `since` was, in words; zero if the clock it was read from is ahead of this host's."""
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
    """A date and time in UTC, and how long ago that was."""
    if since is None:
        return "an unknown time"
    return f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(since, now)} ago)"


class Total(NamedTuple):
    """How many locks are held, and how many messages wait, for one task or all."""

    held: int = 0
    kept: int = 0
    """How many keys are kept without a holder: queued, cooling or offered."""
    waiting: int = 0
    """How many messages wait, as `Row.waiting` counts them."""
    oldest: float = 0.0
    """How long ago the first waiting message was published, in seconds; 0 if no message waits."""

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        oldest = max(self.oldest, other.oldest)
        return Total(self.held + other.held, self.kept + other.kept, self.waiting + other.waiting, oldest)


def totals(rows: Iterable[Row]) -> dict[str, Total]:
    """The totals by task name; the name is empty for locks outside tasks."""
    lines: set[str] = set()
    found: defaultdict[str, Total] = defaultdict(Total)
    for row in rows:
        if row.state != "free":
            found[row.token.task or ""] += Total(int(row.state == "held"), int(row.state != "held"))
        if row.waiting and row.part.lock not in lines:  # all permits of a lock share one line
            lines.add(row.part.lock)
            for task, waits in row.waits.items():
                found[task] += Total(waiting=waits.number, oldest=waits.oldest)
    return dict(found)


def prometheus(found: dict[str, Total]) -> Iterator[str]:
    """The totals in Prometheus' text format, line by line."""
    for field, (name, text) in METRICS.items():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for task, total in sorted(found.items()):
            yield f'{name}{{task="{_escaped(task)}"}} {round(getattr(total, field), 3)}'


def _escaped(label: str) -> str:
    return shown(label).replace("\\", "\\\\").replace('"', '\\"')
