"""``celery locks web``: the page, served by this process until Ctrl-C."""

from __future__ import annotations

import logging
import sys

import click
from celery import Celery
from celery.bin.base import CeleryCommand

from celery_redislock.errors import LockConfigError

from .console import TIMEOUT, Unavailable

_TYPED_IN = "What visitors type in; at least 16 characters. Other users of this host see the option, not the variable."


@click.command(cls=CeleryCommand)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; any beyond this host needs a token."
)
@click.option("--port", type=click.IntRange(0, 65535), default=5566, show_default=True, help="0 for any free port.")
@click.option("--token", envvar="REDISLOCK_WEB_TOKEN", show_envvar=True, help=_TYPED_IN)
@click.option("--read-only", is_flag=True, help="Refuse to release, drop or revoke anything.")
@TIMEOUT
@click.pass_context
def web(context: click.Context, host: str, port: int, token: str | None, read_only: bool, timeout: float) -> None:
    """Serve a web page with the locks, what waits, and recent events."""
    try:
        from celery_redislock.web.guard import SHORTEST, is_loopback
        from celery_redislock.web.pages import Options
        from celery_redislock.web.server import listen, server_for
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f'{error.name} is not installed; the page needs it: pip install "celery-redislock[web]"'
        ) from None
    if token is None and not is_loopback(host):
        raise click.UsageError(f"--host {host} lets others in: set REDISLOCK_WEB_TOKEN to a token that they must enter")
    if token is not None and len(token) < SHORTEST:
        raise click.UsageError(f"the token has {len(token)} characters, and needs at least {SHORTEST}")
    app: Celery = context.obj.app
    app.loader.import_default_modules()
    logging.basicConfig(format="[%(asctime)s: %(levelname)s] %(message)s")
    try:
        server = server_for(app, Options(host, token, read_only, timeout))
        listener = listen(host, port)
    except LockConfigError as error:
        raise Unavailable(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"The page is at http://{shown}:{listener.getsockname()[1]} until Ctrl-C.", err=True)
    sys.setswitchinterval(0.001)  # of the processor: a page must not wait for the thread that takes snapshots
    with listener:
        server.run([listener])
