"""Release: shows who holds a key, asks for confirmation, and takes the key from that holder only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click
from celery.bin.base import CeleryCommand

from celery_redislock.errors import LONGEST, shown
from celery_redislock.protocol.tokens import RUNNING

from .console import Nothing, Refused, Unavailable, asks, keys
from .locks import Locks, silent
from .rows import Row, oldest_first, table
from .sentences import Say, counted
from .workers import Counts, Workers

#: What a release means, by the state of the key.
HARM = {
    **dict.fromkeys(
        RUNNING, "The holder is not stopped: it learns of the loss at its next renewal or release. Another may start."
    ),
    "queued": "Its message stays: if it is still in the queue, it runs. A duplicate may be sent before it starts.",
    "sending": "Its message is still sent, and runs. A duplicate may be sent before it starts.",
    "cooling": "The next run may start before the cooldown is over.",
    "spent": "One more run may begin than the rate allows.",
    "offered": "The key goes to the next in line.",
}


@click.command(cls=CeleryCommand)
@click.argument("key", required=False, shell_complete=keys)
@click.option("--match", metavar="GLOB", help="All keys that match this pattern, instead of a KEY.")
@click.option("--dry-run", is_flag=True, help="Only show what would be released.")
@click.option("--yes", is_flag=True, help="Release without asking.")
@click.option("--foreign", is_flag=True, help="Include keys of other programs.")
@asks
def release(
    known: Locks, workers: Workers, key: str | None, match: str | None, dry_run: bool, yes: bool, foreign: bool
) -> None:
    """Take a lock from its holder, after asking."""
    if (key is None) is (match is None):
        raise click.UsageError("give either a KEY or a --match")
    if key is None:
        known.counts = Counts(workers)
        found = sorted((row for row in known.all(match, foreign=True) if row.state != "free"), key=oldest_first)
    else:
        found = _held_at(known, key)
    rows = [row for row in found if foreign or known.ours(row)]
    if key is not None and not rows:
        raise Refused(
            f"Nothing was released: {shown(key, LONGEST)} is not a lock of this app. Its value ({len(found[0].token)}"
            f" characters) is not a token of this package, and the key does not begin with {shown(known.prefix)}. If it"
            " is a `Lock` with a custom token, or you know the program that wrote it, add --foreign."
        )
    if left_out := len(found) - len(rows):
        click.echo(f"Left out {counted(left_out, 'key')} of other programs; add --foreign to include such keys.")
    if not rows:
        raise Nothing("No key of this app matches.")
    _show(known, rows, workers)
    if dry_run:
        click.echo(f"{len(rows)} would be released; nothing was.")
        return
    if not yes:
        _ask("Release it?" if len(rows) == 1 else f"Release all {len(rows)}?")
    _release(known, rows)


@click.command(cls=CeleryCommand)
@click.argument("key", shell_complete=keys)
@click.option("--yes", is_flag=True, help="Drop without asking.")
@asks
def drop(known: Locks, workers: Workers, key: str, yes: bool) -> None:
    """End the messages that wait for a lock, after asking. The run that holds it goes on."""
    line = WaitingLine(known, workers, key)
    click.echo(line.would_end)
    if not yes:
        _ask("Drop them?")
    click.echo(f"dropped: {line.drop()}")
    if line.silent:
        raise Refused(f"These workers did not answer; ask again: {', '.join(line.silent)}")


class WaitingLine:
    """The messages that wait for a key, and those that may come to wait for it, to be dropped.

    Attributes:
        would_end: What dropping them means, in two sentences.
        silent: The workers that did not answer to `drop`, of those that had answered before.

    Raises:
        Nothing: The key is free, and no message waits for it.
        Refused: No worker answered.
        Unavailable: The workers could not be asked.
    """

    def __init__(self, known: Locks, workers: Workers, key: str) -> None:
        self._rows, self._workers, self.silent = known.of(key), workers, list[str]()
        self._lock = self._rows[0].part.lock if self._rows else key
        self._found = workers.ask("redislock_waiting", {"key": self._lock})
        if workers.problem:
            raise Unavailable(f"nothing was dropped: {Say.WORKERS_AWAY(error=workers.problem)}")
        if not self._found:
            raise Refused("Nothing was dropped: no worker answered. Ask again with --timeout 5, or once a worker runs.")
        if not self._rows and not any(self._found.values()):
            raise Nothing(known.free(self._lock))
        numbers = [len(messages) for messages in self._found.values() if messages]
        self.would_end = (
            f"{counted(sum(numbers), 'message')} in {counted(len(numbers), 'worker')} would end as REVOKED, each with"
            " the rest of its chain and its chord. So would messages published before now that come to wait within"
            " the next hour."
        )

    def drop(self) -> int:
        """Drop them, and those that come to wait within an hour. Return how many were dropped."""
        holders = [one.attempt.task_id for row in self._rows if (one := row.token).is_running and one.attempt]
        answers = self._workers.ask("redislock_drop", {"key": self._lock, "spared": holders})
        self.silent = sorted(self._found.keys() - answers.keys())
        return sum(answers.values())


def _held_at(known: Locks, key: str) -> list[Row]:
    """The holder of exactly this key.

    Raises:
        Nothing: The key is free.
    """
    rows = known.of(key)
    if found := [row for row in rows if row.part.key == key]:
        return found
    others = ", ".join(shown(row.part.key) for row in rows)
    raise Nothing(known.free(key) + (f" Other keys of this lock are held: {others}. Name one of them." if rows else ""))


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
        click.echo("Its value is not a token of this package: make sure that it is a lock.")
    for line in (*answers_of(rows[0], workers), HARM[rows[0].state]):
        click.echo(line)


def answers_of(row: Row, workers: Workers) -> Iterator[str]:
    """Whether the holder's worker answers, and what it says about the run."""
    host, attempt = row.token.hostname or "", row.token.attempt
    if attempt is None or "@" not in host:  # a publisher's host is not a worker
        yield "Its holder is not a run in a worker, so no worker knows about it."
        return
    answers = workers.ask("redislock_task", {"task_id": attempt.task_id}, to=[host])
    yield from [Say.WORKERS_AWAY(error=workers.problem)] if workers.problem else silent([row], answers)
    for answer in answers.values():
        runs = "RUNS there now" if any(one["is"] == "running" for one in answer) else "does not run there"
        yield f"Its worker {shown(host)} answers: the task {runs}."


def _ask(question: str) -> None:
    """Ask the user to confirm.

    Raises:
        Refused: The user declines, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise Refused("Nothing was done: there is no terminal to confirm at. Add --yes to go ahead without asking.")
    if not click.confirm(question):
        raise Refused("Nothing was done.")


def _release(known: Locks, rows: Sequence[Row]) -> None:
    refused = [row for row in rows if not known.release(row)]
    for row in refused:
        click.echo(f"{shown(row.part.key)} was not released: its holder has changed.", err=True)
    click.echo(f"released: {len(rows) - len(refused)}")
    if refused:
        raise Refused(f"not released, because the holder had changed: {len(refused)}")
