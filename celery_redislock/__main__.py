"""``python -m celery_redislock -A proj``: the same as ``celery -A proj locks``."""

from __future__ import annotations

import click
from celery.bin.celery import celery

from .cli.commands import locks


def main() -> None:
    """Run the command line with Celery's own global options, and load the app as Celery does."""
    program = click.Group("celery_redislock", params=celery.params, callback=celery.callback, help=locks.help)
    program.invoke_without_command = True
    for name, command in locks.commands.items():
        program.add_command(command, name)
    program(auto_envvar_prefix="CELERY", prog_name="python -m celery_redislock")


main()
