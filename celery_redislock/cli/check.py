"""``celery locks check``: what is wrong with an app's locks, before anything runs. For continuous integration."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click
from celery import Celery
from celery.bin.base import CeleryCommand

from celery_redislock.app import settings_of
from celery_redislock.errors import describe
from celery_redislock.task.check import Finding, check_tasks
from celery_redislock.task.plan import LockAttributes
from celery_redislock.worker.server_check import locked_tasks, try_lock_server, warn_of_broker

from .console import JSON
from .sentences import counted


@click.command(cls=CeleryCommand)
@click.option("--offline", is_flag=True, help="Connect neither to the lock server nor to the broker.")
@JSON
@click.pass_context
def check(context: click.Context, offline: bool, as_json: bool) -> None:
    """Check every task's lock options, the lock server and the broker."""
    app: Celery = context.obj.app
    app.set_default()  # as a worker does
    findings = [*findings_of(app, offline=offline)]
    locked = sum(isinstance(task, LockAttributes) for name, task in app.tasks.items() if not name.startswith("celery."))
    if not locked:
        findings.append(Finding("warning", "no locked task was found: is -A right, and are the task modules imported?"))
    for one in findings:
        click.echo(json.dumps(one._asdict()) if as_json else f"{one.level}: {one.text}")
    errors = sum(one.level == "error" for one in findings)
    problems = f"{counted(errors, 'error')}, {counted(len(findings) - errors, 'warning')}"
    click.echo(f"Checked {counted(locked, 'locked task')}: {problems}.", err=True)
    context.exit(1 if errors else 0)


def findings_of(app: Celery, *, offline: bool) -> Iterator[Finding]:
    """What is wrong: the options first, then what a worker would log at its start about its servers."""
    with _warnings() as logged:
        yield from check_tasks(app)
        is_on = bool(locked_tasks(app)) and settings_of(app).get("enabled", True) is True  # none if a setting is wrong
        if is_on and not offline and not try_lock_server(app):
            logged[-1] = logged[-1]._replace(level="error")
        if is_on:
            warn_of_broker(app)
    yield from logged
    if not offline:
        yield from _broker_error(app)


def _broker_error(app: Celery) -> Iterator[Finding]:
    with app.connection_for_write() as connection:
        try:
            connection.connect()
        except Exception as error:  # noqa: BLE001 - each transport has errors of its own
            where = connection.as_uri()  # without the password
            yield Finding("error", f"the broker {where} cannot be reached: {describe(error)}; check broker_url")


@contextmanager
def _warnings() -> Iterator[list[Finding]]:
    """What the package logs as a warning or an error until the block ends."""
    logged: list[Finding] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(Finding("error" if record.levelno >= logging.ERROR else "warning", record.getMessage()))

    logger, handler = logging.getLogger("celery_redislock"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
