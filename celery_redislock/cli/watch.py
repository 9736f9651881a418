"""Watch: what is held and waited for, again and again; what is waited for comes first."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from celery.bin.base import CeleryCommand

from .console import MATCH, TASK, TIMEOUT, app_of, reports_errors, width
from .counts import Counts
from .locks import Locks, oldest_first
from .scan import Row
from .summary import Total, totals
from .table import counted, duration, table
from .workers import Workers

#: Moves the cursor home; and clears what is right of it, and what is below it. So nothing flickers.
HOME, CLEAR_RIGHT, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
#: The most rows of the table: more than a terminal shows.
SHOWN = 200


class Rate:
    """How many runs a second find their key held, as the workers count them."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._at = 0.0

    def told(self, counts: dict[str, int]) -> str:
        """The rate since the last call, in words. A worker counts once it has answered twice."""
        now = time.monotonic()
        both = counts.keys() & self._counts.keys()
        new = sum(max(0, counts[worker] - self._counts[worker]) for worker in both)
        text = (
            f"{new / (now - self._at):.1f} conflicts/s in {counted(len(both), 'worker')}"
            if both
            else "conflicts/s not known"
        )
        self._counts, self._at = counts, now
        return text


@click.command(cls=CeleryCommand)
@TASK
@MATCH
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between two looks.")
@TIMEOUT
@click.pass_context
@reports_errors
def watch(
    context: click.Context, task: str | None, match: str | None, interval: float, timeout: float, **_: Any
) -> None:
    """Show the list again and again, until Ctrl-C."""
    app = app_of(context)
    known, rate = Locks(app), Rate()
    try:
        while True:
            began = time.monotonic()
            counts = Counts(Workers(app, timeout))
            told = rate.told(counts.conflicts)
            rows = list(known.all(match, task, counts))
            took = time.monotonic() - began
            _draw([*screen(rows, told, took, counts.missing(rows), width())])
            time.sleep(max(interval - took, took))  # the lock server has other work too
    except KeyboardInterrupt:
        return


def screen(
    rows: Sequence[Row], conflicts: str, took: float, missing: str | None = None, width: int | None = None
) -> Iterator[str]:
    """One picture: the totals, what they do not count, and the table."""
    now = datetime.now(UTC)
    total = sum(totals(rows).values(), Total())
    oldest = f", oldest wait {duration(total.oldest)}" if total.waiting else ""
    head = (
        f"{now:%H:%M:%S} UTC  {total.held} held, {total.kept} kept, {total.waiting} waiting{oldest}, {conflicts}"
        f"  (looked for {duration(took)})"
    )
    for line in filter(None, (head, missing)):
        yield from [line] if width is None else textwrap.wrap(line, width)
    if rows:
        yield from table(sorted(rows, key=lambda row: (-row.waiting, *oldest_first(row)))[:SHOWN], now, width)


def _draw(lines: Sequence[str]) -> None:
    if not sys.stdout.isatty():
        click.echo("\n".join(lines))
        return
    columns, height = shutil.get_terminal_size()
    cut = [line[:columns] for line in lines[: height - 1]]
    click.echo(HOME + "".join(f"{line}{CLEAR_RIGHT}\n" for line in cut) + CLEAR_BELOW, nl=False)
