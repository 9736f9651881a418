"""Console: the options, exit codes and one-line errors that the commands share."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
from collections.abc import Callable
from typing import IO, Any

import click
from celery import Celery
from celery.platforms import EX_UNAVAILABLE
from redis.exceptions import RedisError

from celery_redislock.app import server_of
from celery_redislock.connection.connect import address
from celery_redislock.errors import LockConfigError, LockUnavailable, describe
from celery_redislock.info import LONGEST, shown

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
