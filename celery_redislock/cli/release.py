"""Release: shows who holds a key, asks for confirmation, and takes the key from that holder only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click
from celery.bin.base import CeleryCommand

from celery_redislock.errors import LONGEST, shown

from .console import Nothing, Refused, asks
from .locks import Locks, silent
from .rows import Row, oldest_first, table
from .sentences import Say, counted
from .workers import Counts, Workers

_HARM = {
    "held": "Its run is not stopped. It goes on without its lock, is told so at its next renewal, and another may run.",
    "queued": "Its message is not lost: it runs when it comes; but an equal one may be sent before.",
    "cooling": "The next run may begin before the cooldown is over.",
    "offered": "The key goes to the next in line.",
}


@click.command(cls=CeleryCommand)
@click.argument("key", required=False)
@click.option("--match", metavar="GLOB", help="All keys that match this pattern, instead of a KEY.")
@click.option("--dry-run", is_flag=True, help="Only show what would be released.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--foreign", is_flag=True, help="Also keys that are no locks of this app: other programs' keys.")
@asks
def release(
    known: Locks, workers: Workers, key: str | None, match: str | None, dry_run: bool, yes: bool, foreign: bool
) -> None:
    """Take a lock from its holder, after asking."""
    if (key is None) is (match is None):
        raise click.UsageError("name either a KEY or a --match")
    if key is None:
        known.counts = Counts(workers)
        found = sorted((row for row in known.all(match, foreign=True) if row.state != "free"), key=oldest_first)
    else:
        found = _held_at(known, key)
    rows = [row for row in found if foreign or known.ours(row)]
    if key is not None and not rows:
        raise Refused(
            f"Nothing was released: {shown(key, LONGEST)} is no lock of this app. It holds {len(found[0].token)}"
            f" characters that are no token of this package, and does not begin with {shown(known.prefix)}. If it is a"
            " `Lock` with a token of its own, or you know the program that wrote it, add --foreign."
        )
    if left_out := len(found) - len(rows):
        click.echo(f"{counted(left_out, 'key')} left out, not being locks of this app; --foreign includes them.")
    if not rows:
        raise Nothing("No key of this app matches.")
    _show(known, rows, workers)
    if dry_run:
        click.echo(f"{len(rows)} would be released; nothing was.")
        return
    if not yes:
        _ask(len(rows))
    _release(known, rows)


def _held_at(known: Locks, key: str) -> list[Row]:
    """The holder of exactly this key.

    Raises:
        Nothing: The key is free.
    """
    rows = known.of(key)
    if found := [row for row in rows if row.part.key == key]:
        return found
    others = ", ".join(shown(row.part.key) for row in rows)
    raise Nothing(f"Nobody holds {shown(key)}{f'; held are {others}: name one of them' if others else ''}.")


def _show(known: Locks, rows: Sequence[Row], workers: Workers) -> None:
    now, strange = datetime.now(UTC), sum(row.token.since is None for row in rows)
    if len(rows) > 1:
        for line in table(rows, now):  # at full width: no key is cut
            click.echo(line)
        if strange:
            click.echo(f"{counted(strange, 'key')} without a token of this package: make sure that each is a lock.")
        return
    click.echo(known.held(rows[0], now))
    if strange:
        click.echo("It holds no token of this package: make sure that it is a lock.")
    for line in _answers(rows[0], workers):
        click.echo(line)
    click.echo(_HARM[rows[0].state])


def _answers(row: Row, workers: Workers) -> Iterator[str]:
    """Whether the holder's worker answers, and what it says about the run."""
    host, attempt = row.token.hostname or "", row.token.attempt
    if attempt is None or "@" not in host:  # a publisher's host is no worker
        yield "Its holder is no run of a worker, so no worker can be asked about it."
        return
    answers = workers.ask("redislock_task", {"task_id": attempt.task_id}, to=[host])
    yield from silent([row], answers)
    if workers.problem:
        yield Say.WORKERS_AWAY(error=workers.problem)
    for answer in answers.values():
        runs = "RUNS there now" if any(one["is"] == "running" for one in answer) else "does not run there"
        yield f"Its worker {shown(host)} answers: the task {runs}."


def _ask(count: int) -> None:
    """Ask the user to confirm.

    Raises:
        Refused: The user declines, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise Refused("Nothing was released: there is no terminal to ask at. With --yes nobody is asked.")
    if not click.confirm(f"Release {'it' if count == 1 else f'all {count}'}?"):
        raise Refused("Nothing was released.")


def _release(known: Locks, rows: Sequence[Row]) -> None:
    refused = [row for row in rows if not known.release(row)]
    for row in refused:
        click.echo(f"{shown(row.part.key)} was not released: it is not held by this holder any more.", err=True)
    click.echo(f"released: {len(rows) - len(refused)}")
    if refused:
        raise Refused(f"Not released, because their holders had changed: {len(refused)}.")
