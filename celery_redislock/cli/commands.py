"""Commands: ``celery locks`` and its read-only subcommands, list, show, why, export and watch."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_redislock.errors import LockKeyError
from celery_redislock.info import shown
from celery_redislock.worker import remote_control

from . import console
from .locks import Locks, oldest_first
from .release import release
from .scan import Row
from .sentences import silent
from .why import Why
from .workers import Counts, Workers, outside

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
#: Terminal codes that `watch` draws with: overwriting the last screen instead of clearing it avoids flicker.
HOME, CLEAR_RIGHT, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
#: The maximum number of rows that `watch` draws, which is more than a terminal shows.
SHOWN = 200


# Celery loads this module, and with it refuses no command of the workers: ``celery inspect locks``.
remote_control.connect()


@click.group(name="locks")
@click.pass_context
@handle_preload_options
def locks(context: click.Context, **_: Any) -> None:
    """Who holds which lock, who waits, and why a task has not run."""


@locks.command(name="list", cls=CeleryCommand)
@console.TASK
@console.MATCH
@click.option("--waiting", is_flag=True, help="Only locks for which messages wait.")
@JSON
@console.asks
def list_(
    context: click.Context, task: str | None, match: str | None, waiting: bool, as_json: bool, timeout: float
) -> None:
    """List who holds locks and how many messages wait for each, oldest first."""
    app = console.app_of(context)
    known, counts = Locks(app), Counts(Workers(app, timeout))
    rows = sorted((row for row in known.all(match, task, counts) if row.waiting or not waiting), key=oldest_first)
    if as_json:
        _print_json(known, rows)
    elif rows:
        for line in console.table(rows, datetime.now(UTC), console.width()):
            click.echo(line)
    if missing := counts.missing(rows):
        click.echo(missing, err=True)
    if not rows:
        raise console.Nothing(f"No lock is {'waited for' if waiting else 'held'} on {known.where}.")


@locks.command(cls=CeleryCommand)
@click.argument("key", required=False)
@click.option("--task", metavar="NAME", help="The task whose lock is shown, instead of a KEY.")
@click.option("--args", metavar="JSON", default="[]", help="The positional arguments of a call of the task.")
@click.option("--kwargs", metavar="JSON", default="{}", help="The keyword arguments of that call.")
@JSON
@console.asks
def show(
    context: click.Context,
    key: str | None,
    task: str | None,
    args: str,
    kwargs: str,
    as_json: bool,
    timeout: float,
) -> None:
    """Show who holds a lock, and who waits for it."""
    app = console.app_of(context)
    if (key is None) is (task is None):
        raise click.UsageError("name either a KEY or a --task")
    name = key or _key_of(console.task_of(app, str(task)), _read(args, list, "--args"), _read(kwargs, dict, "--kwargs"))
    known, workers = Locks(app), Workers(app, timeout)
    counts = Counts(workers)
    rows = known.of(name, counts)
    if as_json:
        _print_json(known, rows)
    else:
        now = datetime.now(UTC)
        for row in rows:
            if row.state != "free":
                click.echo(known.held(row, now))
        for line in _line(workers, counts, rows):
            click.echo(line)
    if all(row.state == "free" for row in rows):
        raise console.Nothing(f"{shown(name)} is free.")


def _key_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key that a call of `task` locks. Errors do not show the arguments."""
    try:
        name: str = task.lock_for(*args, **kwargs).name
    except (TypeError, LockKeyError) as error:
        raise click.UsageError(str(error)) from None
    if not name:
        raise click.UsageError("redislock_enabled is False: this app's tasks have no locks")
    return name


def _read(text: str, kind: type, option: str) -> Any:
    """Parse the arguments of a call. Errors do not show them."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise click.BadParameter(f"is no JSON {'array' if kind is list else 'object'}", param_hint=option)
    return value


def _line(workers: Workers, counts: Counts, rows: list[Row]) -> Iterator[str]:
    """Who waits for the lock of `rows`, according to the workers and the lock's line in Redis."""
    if counts.unasked:
        yield counts.unasked
    else:
        yield from silent(rows, counts.conflicts)
    if rows and not rows[0].waiting:
        yield "Nobody waits for it."
    elif rows:
        row, inside = rows[0], counts.workers(rows[0].part.lock)
        messages = console.counted(row.waiting - len(row.rooms), "message")
        found = [f"{messages} in {console.counted(len(inside), 'worker')}"]
        yield f"Waiting: {', and '.join(found[: len(inside)] + ([outside(len(row.rooms))] if row.rooms else []))}."
        yield from _first(workers, row.part.lock, inside)


def _first(workers: Workers, lock: str, inside: list[str]) -> Iterator[str]:
    """The first ten messages that wait for `lock` in the workers `inside`."""
    answers = workers.ask("redislock_waiting", {"key": lock}, to=inside) if inside else {}
    waiting = sorted((one["rank"], worker, one) for worker, found in answers.items() for one in found)
    for number, (_, worker, one) in enumerate(waiting[:10], 1):
        yield f"  {number}. task {shown(str(one['id']))}, for {console.duration(one['waited'])} in worker {worker}"
    if len(waiting) > 10:
        yield f"  and {len(waiting) - 10} more"


@locks.command(cls=CeleryCommand)
@click.argument("task_id")
@JSON
@console.asks
def why(context: click.Context, task_id: str, as_json: bool, timeout: float) -> None:
    """Say why the task TASK_ID has not run."""
    app = console.app_of(context)
    reason = Why(app, Locks(app), Workers(app, timeout), task_id)
    for one in reason.said():
        if not as_json:
            click.echo(one.text)
        elif one.about is not None:
            click.echo(json.dumps({**one.about, "reason": one.text}))
    if not reason.is_known:
        raise console.Nothing(f"Nobody who was asked knows the task {shown(task_id)}.")


@locks.command(cls=CeleryCommand)
@console.TASK
@console.MATCH
@console.asks
def export(context: click.Context, task: str | None, match: str | None, timeout: float) -> None:
    """Print totals in Prometheus' text format."""
    app = console.app_of(context)
    counts = Counts(Workers(app, timeout))
    for line in console.prometheus(console.totals(Locks(app).all(match, task, counts))):
        click.echo(line)
    if counts.unasked:
        click.echo(counts.unasked, err=True)


def _print_json(known: Locks, rows: list[Row]) -> None:
    for row in rows:
        click.echo(json.dumps(known.to_json(row)))


class Rate:
    """How many runs per second find their key held, according to the workers."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._at = 0.0

    def text(self, counts: dict[str, int]) -> str:
        """The rate since the last call, in words. Only workers that answered both times are counted."""
        now = time.monotonic()
        both = counts.keys() & self._counts.keys()
        new = sum(max(0, counts[worker] - self._counts[worker]) for worker in both)
        seconds, self._counts, self._at = now - self._at, counts, now
        where = console.counted(len(both), "worker")
        return f"{new / seconds:.1f} conflicts/s in {where}" if both else "conflicts/s not known"


@locks.command(cls=CeleryCommand)
@console.TASK
@console.MATCH
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between two looks.")
@console.asks
def watch(
    context: click.Context, task: str | None, match: str | None, interval: float, timeout: float, **_: Any
) -> None:
    """Keep showing the list until Ctrl-C."""
    app = console.app_of(context)
    known, rate = Locks(app), Rate()
    try:
        while True:
            began = time.monotonic()
            counts = Counts(Workers(app, timeout))
            rate_text = rate.text(counts.conflicts)
            rows = list(known.all(match, task, counts))
            took = time.monotonic() - began
            _draw([*screen(rows, rate_text, took, counts.missing(rows), console.width())])
            time.sleep(max(interval - took, took))  # the lock server has other work too
    except KeyboardInterrupt:
        return


def screen(
    rows: Sequence[Row], conflicts: str, took: float, missing: str | None = None, width: int | None = None
) -> Iterator[str]:
    """The lines of one screen: the totals, what they leave out, and the table."""
    now = datetime.now(UTC)
    total = sum(console.totals(rows).values(), console.Total())
    oldest = f", oldest wait {console.duration(total.oldest)}" if total.waiting else ""
    head = (
        f"{now:%H:%M:%S} UTC  {total.held} held, {total.kept} kept, {total.waiting} waiting{oldest}, {conflicts}"
        f"  (looked for {console.duration(took)})"
    )
    for line in filter(None, (head, missing)):
        yield from [line] if width is None else textwrap.wrap(line, width)
    if rows:
        yield from console.table(sorted(rows, key=lambda row: (-row.waiting, *oldest_first(row)))[:SHOWN], now, width)


def _draw(lines: Sequence[str]) -> None:
    if not sys.stdout.isatty():
        click.echo("\n".join(lines))
        return
    columns, height = shutil.get_terminal_size()
    cut = [line[:columns] for line in lines[: height - 1]]
    click.echo(HOME + "".join(f"{line}{CLEAR_RIGHT}\n" for line in cut) + CLEAR_BELOW, nl=False)


locks.add_command(release)
