"""Play six scenes with a real worker, and check that no two runs of one key overlap."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kombu.exceptions import OperationalError
from redis import RedisError
from rich.console import Console

from .processes import CHILDREN, DemoError, valkey, worker

if TYPE_CHECKING:
    from .verdict import Verdict

#: How many lines of the worker's log to show after a failure.
TAIL = 25
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the scenes and return the exit code: 0 only if nothing went wrong."""
    started = time.monotonic()
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)  # these signals then stop the processes too
    console = Console(highlight=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix="redislock-example-") as folder:
        log = Path(folder, "worker.log")
        try:
            verdict = _play(console, options, log)
        except KeyboardInterrupt:
            console.print("interrupted")
            return INTERRUPTED
        except (DemoError, RedisError, OperationalError) as error:
            console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
            _print_tail(console, log)
            return 1
        for fault in verdict.faults:
            console.print(fault, style="red", markup=False, soft_wrap=True)
        if verdict.faults:
            _print_tail(console, log)
    style = "bold red" if verdict.faults else "bold green"
    console.print(verdict.summary(time.monotonic() - started), style=style, soft_wrap=True)
    return 1 if verdict.faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_worker", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        help="the Redis or Valkey to use for everything, redis://HOST:PORT/DB, instead of an embedded Valkey. The demo "
        "deletes the keys that it creates",
    )
    where.add_argument(
        "--no-worker",
        action="store_true",
        help="use workers that are already running, on the servers in CELERY_BROKER_URL and CELERY_RESULT_BACKEND",
    )
    options = parser.parse_args(arguments)
    if options.url and not options.url.startswith(("redis://", "rediss://", "redis+socket://")):
        parser.error("--url must start with redis://, rediss:// or redis+socket://")
    if options.no_worker and not {"CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"} <= os.environ.keys():
        parser.error("--no-worker needs CELERY_BROKER_URL and CELERY_RESULT_BACKEND, as set for the workers")
    return options


def _play(console: Console, options: argparse.Namespace, log: Path) -> Verdict:
    if options.no_worker:
        from .demo import demonstrate

        return demonstrate(console, lambda: None)
    console.print(f"starting {'' if options.url else 'an embedded Valkey and '}a worker with {CHILDREN} processes ...")
    with _server(options.url, log.parent) as url:
        # Set these before importing the app, which reads them. The worker inherits them.
        name = f"redislock-example-{secrets.token_hex(4)}"
        os.environ.update(CELERY_BROKER_URL=url, CELERY_RESULT_BACKEND=url, EXAMPLE_NAME=name)
        from .demo import demonstrate, swept

        with swept(), worker(log) as process:
            return demonstrate(console, process.check)


def _server(url: str | None, folder: Path) -> AbstractContextManager[str]:
    return nullcontext(url) if url else valkey(folder)


def _print_tail(console: Console, log: Path) -> None:
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
        console.print("\nThe end of the worker's log:", *lines, sep="\n", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
