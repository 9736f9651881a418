"""Console: what the commands share: options, exit codes and one-line errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import IO, Any

import click
from celery.platforms import EX_UNAVAILABLE
from redis.exceptions import RedisError

from celery_redislock.app import server_of
from celery_redislock.connection.connect import address
from celery_redislock.errors import LONGEST, LockConfigError, LockUnavailable, describe, shown

from .locks import Locks
from .workers import Workers

TASK = click.option("--task", metavar="NAME", help="Only locks that this task holds.")
MATCH = click.option("--match", metavar="GLOB", help="Only keys that match this pattern, as in Redis' SCAN.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
_TIMEOUT = "Seconds to wait for the workers' answers; 0 asks no worker."
TIMEOUT = click.option("--timeout", type=click.FloatRange(0), default=1.0, show_default=True, help=_TIMEOUT)


class Nothing(click.ClickException):
    """Nothing was found: no lock, no holder or no trace of the task. This is an answer, not an error."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message without click's ``Error:``."""
        click.echo(self.message, file=file, err=True)


class Refused(Nothing):
    """Not released: not confirmed, no terminal to confirm at, not this app's key, or its holder has changed."""

    exit_code = 3


class Unavailable(click.ClickException):
    """The lock server cannot be reached, or none is set. Celery's own commands use this exit code without a broker."""

    exit_code = EX_UNAVAILABLE


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the app's locks and workers, and ``--timeout``; report in one line what is unreachable."""

    @TIMEOUT
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, /, timeout: float, **options: Any) -> None:
        # Report an error only once: without a handler, Python prints logged warnings too.
        logging.getLogger("celery_redislock").addHandler(logging.NullHandler())
        app = context.obj.app
        app.loader.import_default_modules()
        try:
            command(Locks(app), Workers(app, timeout), **options)
        except LockConfigError as error:
            raise Unavailable(str(error)) from None
        except RedisError as error:
            why = shown(error.reason, LONGEST) if isinstance(error, LockUnavailable) else describe(error)
            where = address(server_of(app).client)
            raise Unavailable(f"could not reach the lock server {where}: {why}") from None

    return run
