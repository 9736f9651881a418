"""Console: what the commands share: options, exit codes and one-line errors."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import IO, Any

import click
from celery import Celery
from celery.app.utils import find_app
from celery.platforms import EX_UNAVAILABLE
from redis.exceptions import RedisError, ResponseError

from celery_redislock.app import server_of, source_of
from celery_redislock.connection.connect import OPTIONS_SETTINGS, address
from celery_redislock.errors import LONGEST, LockConfigError, LockUnavailable, describe, shown
from celery_redislock.worker.server_check import remedy_for

from .locks import Locks, literal
from .workers import Workers

#: How many keys a shell is offered.
MOST_KEYS = 100
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


def keys(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a key, for the shell, if the app can be loaded and its lock server answers."""
    with suppress(Exception):  # a shell shows no errors
        app = find_app(context.find_root().params["app"])
        app.loader.import_default_modules()
        return [row.part.key for row in islice(Locks(app).all(f"{literal(incomplete)}*"), MOST_KEYS)]
    return []


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the app's locks and workers, and ``--timeout``; report in one line what is unreachable."""

    @TIMEOUT
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, /, timeout: float, **options: Any) -> None:
        # Report an error only once: without a handler, Python prints logged warnings too.
        logging.getLogger("celery_redislock").addHandler(logging.NullHandler())
        with suppress(AttributeError):  # a key may have characters that the terminal's encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        app = context.obj.app
        app.loader.import_default_modules()
        try:
            command(Locks(app), Workers(app, timeout), **options)
        except LockConfigError as error:
            if context.find_root().params.get("app") is None:
                raise click.UsageError(f"name the app, as in celery -A yourapp locks list ({error})") from None
            raise Unavailable(str(error)) from None
        except RedisError as error:
            raise Unavailable(unreachable(app, error)) from None
        except UnicodeEncodeError:  # the scripts take only keys that are text
            raise Refused("Not released: a key that is not UTF-8 is not a lock. Delete it with redis-cli.") from None

    return run


def unreachable(app: Celery, error: RedisError) -> str:
    """What an error of the lock server means, and what to do."""
    why = describe(error)
    if isinstance(error, LockUnavailable):
        why = f"{shown(error.key, LONGEST)}: {shown(error.reason, LONGEST)}"
    where, setting = address(server_of(app).client), source_of(app.conf).setting
    remedy = remedy_for(error)[1].format(url=setting, options=OPTIONS_SETTINGS[setting])
    what = "refused by" if isinstance(error.__cause__ or error, ResponseError) else "could not reach"
    return f"{what} the lock server {where}: {why}; {remedy}"
