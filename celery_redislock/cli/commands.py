"""Commands: ``celery locks`` and its commands that only look: list, show, why and export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_redislock.errors import LockKeyError
from celery_redislock.shown import shown

from .console import MATCH, TASK, TIMEOUT, Nothing, app_of, reports_errors, task_of
from .holders import silent
from .locks import Locks, oldest_first
from .release import release
from .scan import Row
from .summary import prometheus, totals
from .table import duration, in_line, table
from .watch import watch
from .why import Why
from .workers import Workers

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group(name="locks")
@click.pass_context
@handle_preload_options
def locks(context: click.Context, **_: Any) -> None:
    """Who holds which lock, who waits, and why a task has not run."""


@locks.command(name="list", cls=CeleryCommand)
@TASK
@MATCH
@click.option("--waiting", is_flag=True, help="Only locks for which somebody waits.")
@JSON
@click.pass_context
@reports_errors
def list_(context: click.Context, task: str | None, match: str | None, waiting: bool, as_json: bool) -> None:
    """List who holds locks; the oldest comes first."""
    known = Locks(app_of(context))
    rows = sorted((row for row in known.all(match, task) if row.waiting or not waiting), key=oldest_first)
    _print(known, rows, as_json=as_json)
    if not rows:
        which = " for which somebody waits" if waiting else ""
        raise Nothing(f"No lock is held{which} on {known.where}.")


@locks.command(cls=CeleryCommand)
@click.argument("key", required=False)
@click.option("--task", metavar="NAME", help="The task whose lock is shown, in place of a KEY.")
@click.option("--args", metavar="JSON", default="[]", help="The positional arguments of a call of the task.")
@click.option("--kwargs", metavar="JSON", default="{}", help="The keyword arguments of that call.")
@JSON
@TIMEOUT
@click.pass_context
@reports_errors
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
    app = app_of(context)
    if (key is None) is (task is None):
        raise click.UsageError("name either a KEY or a --task")
    name = key or _key_of(task_of(app, str(task)), _read(args, list, "--args"), _read(kwargs, dict, "--kwargs"))
    known = Locks(app)
    rows = known.of(name)
    if as_json:
        _print(known, rows, as_json=True)
    else:
        now = datetime.now(UTC)
        for row in rows:
            click.echo(known.held(row, now))
        for line in _line(Workers(app, timeout), name, rows):
            click.echo(line)
    if not rows:
        raise Nothing(f"{shown(name)} is free.")


def _key_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of the lock of a call of `task`. The error of a call that does not fit shows no argument."""
    try:
        name: str = task.lock_for(*args, **kwargs).name
    except (TypeError, LockKeyError) as error:
        raise click.UsageError(str(error)) from None
    if not name:
        raise click.UsageError("redislock_enabled is False: this app's tasks have no locks")
    return name


def _read(text: str, kind: type, option: str) -> Any:
    """The arguments of a call; an error does not show them."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise click.BadParameter(f"is no JSON {'array' if kind is list else 'object'}", param_hint=option)
    return value


def _line(workers: Workers, key: str, rows: list[Row]) -> list[str]:
    """Who waits for the lock, as the workers and its line tell."""
    rooms = max((row.waiting for row in rows), default=0)
    answers = workers.ask("redislock_waiting", {"key": rows[0].place.lock if rows else key})
    waiting = sorted((one["place"], worker, one) for worker, found in answers.items() for one in found)
    told = [
        f"  {number}. task {shown(str(one['id']))}, for {duration(one['waited'])} in worker {worker}"
        for number, (_, worker, one) in enumerate(waiting[:10], 1)
    ]
    more = [f"  and {len(waiting) - 10} more"] if len(waiting) > 10 else []
    if workers.problem is not None:
        return [f"In line: {rooms}. The workers could not be asked: {workers.problem}."]
    if not rows and not waiting:
        return []
    rooms_in_line = f"{rooms} {'worker or process' if rooms == 1 else 'workers or processes'}"
    waits = f"In line: {rooms_in_line}; {in_line(len(waiting), len(answers))}."
    head = waits if rooms or waiting else "Nobody waits for it."
    return [*silent(rows, answers), head, *told, *more]


@locks.command(cls=CeleryCommand)
@click.argument("task_id")
@JSON
@TIMEOUT
@click.pass_context
@reports_errors
def why(context: click.Context, task_id: str, as_json: bool, timeout: float) -> None:
    """Say why the task TASK_ID has not run."""
    app = app_of(context)
    reason = Why(app, Locks(app), Workers(app, timeout), task_id)
    for one in reason.said():
        if not as_json:
            click.echo(one.text)
        elif one.told is not None:
            click.echo(json.dumps({**one.told, "reason": one.text}))
    if not reason.is_known:
        raise Nothing(f"Nobody who was asked knows the task {shown(task_id)}.")


@locks.command(cls=CeleryCommand)
@TASK
@MATCH
@click.pass_context
@reports_errors
def export(context: click.Context, task: str | None, match: str | None) -> None:
    """Print totals, as Prometheus takes them."""
    for line in prometheus(totals(Locks(app_of(context)).all(match, task))):
        click.echo(line)


def _print(known: Locks, rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps(known.told(row)))
    elif rows:
        for line in table(rows, datetime.now(UTC)):
            click.echo(line)


locks.add_command(release)
locks.add_command(watch)
