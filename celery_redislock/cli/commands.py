"""Commands: ``celery locks`` and its read-only subcommands, list, show, why, export and watch."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from celery import Celery
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_redislock.errors import LockConfigError, LockKeyError, shown
from celery_redislock.task.locked_task import demands_of
from celery_redislock.worker import remote_control

from .check import check
from .console import JSON, MATCH, TASK, Nothing, asks, keys
from .locks import Locks, plan_of, silent
from .release import drop, release
from .rows import ORDERS, Row, Total, prometheus, table, totals, with_one_spent
from .sentences import counted, duration
from .web import web
from .why import Why
from .workers import Counts, Workers, groups_of

#: The most rows that `watch` draws: more than a terminal shows.
SHOWN = 200


# Celery loads this module. Connecting here makes ``celery inspect`` accept the commands of the workers.
remote_control.connect()


@click.group(name="locks")
@click.pass_context
@handle_preload_options
def locks(context: click.Context, **_: Any) -> None:
    """Show who holds which lock, what waits for it, and why a task has not run."""


@locks.command(name="list", cls=CeleryCommand)
@TASK
@MATCH
@click.option("--waiting", is_flag=True, help="Only locks that messages wait for.")
@click.option(
    "--older-than", metavar="SECONDS", type=click.FloatRange(0), default=0.0, help="Only keys older than this."
)
@click.option("--sort", type=click.Choice([*ORDERS]), default="age", show_default=True, help="What to sort by.")
@JSON
@asks
def list_(known: Locks, workers: Workers, task: str | None, match: str | None, as_json: bool, **chosen: Any) -> None:
    """List locks, their holders and how many wait, oldest first."""
    known.counts, waiting = Counts(workers), chosen["waiting"]
    now, older = datetime.now(UTC), chosen["older_than"]
    found = (row for row in known.all(match, task) if row.waiting or not waiting)
    if older:
        found = (row for row in found if row.token.since and (now - row.token.since).total_seconds() > older)
    rows = sorted(found, key=ORDERS[chosen["sort"]])
    if as_json:
        _print(json.dumps(known.to_json(row)) for row in rows)
    elif rows:
        _print(table(rows, datetime.now(UTC), _size()[0]))
    if missing := _missing(known.counts, rows):
        click.echo(missing, err=True)
    if not rows and (match or task or older):
        raise Nothing(f"No lock on {known.where} matches; there may be others.")
    if not rows:
        raise Nothing(f"No {'message waits for a lock' if waiting else 'lock is held'} on {known.where}.")


@locks.command(cls=CeleryCommand)
@click.argument("key", required=False, shell_complete=keys)
@click.option("--task", metavar="NAME", help="Show the locks that a call of this task takes, instead of a KEY.")
@click.option("--args", metavar="JSON", default="[]", help="The positional arguments of a call of the task.")
@click.option("--kwargs", metavar="JSON", default="{}", help="The keyword arguments of that call.")
@JSON
@asks
def show(
    known: Locks, workers: Workers, key: str | None, task: str | None, args: str, kwargs: str, as_json: bool
) -> None:
    """Show who holds a lock, and which messages wait for it."""
    if (key is None) is (task is None):
        raise click.UsageError("give either a KEY or a --task")
    call = _read(args, list, "--args"), _read(kwargs, dict, "--kwargs")
    names = [key] if key is not None else _keys_of(known.app, str(task), *call)
    known.counts, is_held = Counts(workers), False
    for name in names:
        rows, now = with_one_spent(known.of(name)), datetime.now(UTC)
        held = [known.held(row, now) for row in rows if row.state != "free"]
        is_held |= bool(held)
        if not held:
            click.echo(known.free(name), err=True)
        _print(map(json.dumps, map(known.to_json, rows)) if as_json else [*held, *_line(workers, known.counts, rows)])
    click.get_current_context().exit(0 if is_held else Nothing.exit_code)


def _keys_of(app: Celery, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The keys that a call of a task needs. Errors do not show the arguments."""
    if (plan := plan_of(app, name)) is None:
        known = "is not a LockedTask" if name in app.tasks else "is not a task of this app"
        raise click.BadParameter(f"{name} {known}", param_hint="--task")
    if not plan.enabled:
        raise click.UsageError("redislock_enabled is False: this app's tasks take no locks")
    try:
        return [one.key for one in demands_of(app.tasks[name], plan, args, kwargs)]
    except (TypeError, LockKeyError, LockConfigError) as error:
        raise click.UsageError(str(error)) from None


def _read(text: str, kind: type, option: str) -> Any:
    """Parse the arguments of a call. Errors do not show them."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise click.BadParameter(f"it is not a JSON {'array' if kind is list else 'object'}", param_hint=option)
    return value


def _line(workers: Workers, counts: Counts, rows: list[Row]) -> Iterator[str]:
    """Who waits for the lock of `rows`, according to the workers and the lock's line in Redis."""
    no_answer = [] if counts.conflicts else ["No worker answered."]
    yield from [counts.unasked] if counts.unasked else silent(rows, counts.conflicts) or no_answer
    if not rows:
        return
    row, inside = rows[0], counts.inside[rows[0].part.lock]
    messages = f"{counted(row.waiting - len(row.outside), 'message')} in {counted(len(inside), 'worker')}"
    found = ([messages] if inside else []) + ([_outside(len(row.outside))] if row.outside else [])
    yield f"Waiting: {', and '.join(found)}." if found else "Nothing waits for it."
    answers = workers.ask("redislock_waiting", {"key": row.part.lock}, to=sorted(inside)) if inside else {}
    told = ((worker, one) for worker, all_of_it in answers.items() for one in all_of_it)
    waiting = sorted(told, key=lambda one: one[1]["rank"])
    for number, (worker, one) in enumerate(waiting[:10], 1):
        yield f"  {number}. task {shown(str(one['id']))}, for {duration(one['waited'])} in worker {worker}"
    if len(waiting) > 10:
        yield f"  and {len(waiting) - 10} more"
    if groups := groups_of(one for _, one in waiting):
        yield f"Groups that take turns, the next one first: {len(groups)}."
        for group, number in [*groups.items()][:10]:
            yield f"  {shown(group)}: {counted(number, 'message')}"


@locks.command(cls=CeleryCommand)
@click.argument("task_id")
@JSON
@asks
def why(known: Locks, workers: Workers, task_id: str, as_json: bool) -> None:
    """Explain why the task TASK_ID has not run."""
    if not task_id.strip():
        raise click.BadParameter("it is empty", param_hint="TASK_ID")
    for one in Why(known, workers, task_id).said():
        if not as_json:
            click.echo(one.text)
        elif one.about is not None:
            click.echo(json.dumps({**one.about, "reason": one.text}))


@locks.command(cls=CeleryCommand)
@TASK
@MATCH
@asks
def export(known: Locks, workers: Workers, task: str | None, match: str | None) -> None:
    """Print totals in Prometheus' text format."""
    known.counts = Counts(workers)
    _print(prometheus(totals(known.all(match, task))))
    if known.counts.unasked:
        click.echo(known.counts.unasked, err=True)


@locks.command(cls=CeleryCommand)
@TASK
@MATCH
@click.option("--interval", type=click.FloatRange(0), default=2.0, show_default=True, help="Seconds between updates.")
@asks
def watch(known: Locks, workers: Workers, task: str | None, match: str | None, interval: float) -> None:
    """Show the list, and update it until Ctrl-C."""
    try:
        while True:
            began = time.monotonic()
            known.counts = Counts(workers)
            rows = list(known.all(match, task))
            took = time.monotonic() - began
            width, height = _size()
            lines = [*screen(rows, known.counts, took, width)]
            click.clear()  # only at a terminal
            _print(lines[: height and height - 1])
            time.sleep(max(interval - took, took))  # the lock server has other work too
    except KeyboardInterrupt:
        return


def screen(rows: Sequence[Row], counts: Counts, took: float, width: int | None = None) -> Iterator[str]:
    """The lines of one screen: the totals, what they leave out, and the table."""
    now = datetime.now(UTC)
    total = sum(totals(rows).values(), Total())
    oldest = f", oldest wait {duration(total.oldest_wait_seconds)}" if total.waiting else ""
    conflicts = counted(sum(counts.conflicts.values()), "conflict")
    head = (
        f"{now:%H:%M:%S} UTC  {total.held} held, {total.kept} kept, {total.waiting} waiting{oldest}, {conflicts}"
        f" in {counted(len(counts.conflicts), 'worker')}  (took {duration(took)})"
    )
    for line in filter(None, (head, _missing(counts, rows))):
        yield from [line] if width is None else textwrap.wrap(line, width)
    if rows:
        yield from table(sorted(rows, key=ORDERS["waiting"])[:SHOWN], now, width)


def _missing(counts: Counts, rows: Sequence[Row]) -> str | None:
    """What the numbers of `rows` leave out, as a sentence; None if they count everything."""
    rooms = {room for row in rows for room in row.outside}
    is_said = not rooms or counts.unasked
    return counts.unasked if is_said else f"Each counts as one message: {_outside(len(rooms))}."


def _outside(rooms: int) -> str:
    """How many others stand in line, such as a `Lock` that blocks, in words."""
    return f"{counted(rooms, 'other process', 'other processes')} in line"


def _size() -> tuple[int | None, int | None]:
    """The columns and lines of the terminal; None if the output is a pipe or a file."""
    return shutil.get_terminal_size() if sys.stdout.isatty() else (None, None)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


for _command in (release, check, drop, web):
    locks.add_command(_command)
