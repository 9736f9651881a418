"""The README's first screen as a new user tries it: a worker, and the calls from another shell."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.lab.servers import Valkey, running, wait_until
from tests.lab.workers import ROOT

README = (ROOT / "README.md").read_text()
#: What differs from one try to the next: the time, task ids, the child that a task is given to, and the host.
_VARIES = r"[\d-]{10} [\d:,]{12}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|ForkPoolWorker-\d+|celery@[\w.-]+"


def module(name: str) -> str:
    """The Python block that begins with the name of its file."""
    return block_with(f"# {name}\n")


def block_with(text: str) -> str:
    """The first Python block that has this text."""
    return next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block)


def console(command: str) -> tuple[str, str]:
    """What is typed after this beginning of a command line, and what is shown below it."""
    ((arguments, output),) = re.findall(rf"^\$ {re.escape(command)} ?(.*)\n((?:(?!\$|```).*\n)*)", README, re.MULTILINE)
    return str(arguments), str(output)


def alike(text: str) -> set[str]:
    """Its lines, without what differs from one try to the next."""
    return {re.sub(_VARIES, "...", line) for line in text.splitlines()}


def celerys_own(server: Valkey) -> dict[str, str]:
    """The variables by which Celery finds its broker and result backend, whatever its app names."""
    return {"CELERY_BROKER_URL": server.celery_url(0), "CELERY_RESULT_BACKEND": server.celery_url(1)}


def try_it(
    python: str | Path,
    folder: Path,
    variables: dict[str, str],
    *,
    shop: str | None = None,
    calls: str | None = None,
    concurrency: int = 2,
) -> tuple[str, str]:
    """Type what the first screen says, with this interpreter.

    Args:
        python: Of an environment in which celery-redislock is installed.
        folder: Where the two modules and the worker's log are written.
        variables: `celerys_own`, so that the example need not be changed to find the test's server, and what decides
            which celery-redislock is imported.
        shop: Instead of the README's `shop.py`.
        calls: Instead of its `calls.py`.
        concurrency: The worker's concurrency.

    Returns:
        What the calls printed, and the worker's log.
    """
    (folder / "shop.py").write_text(shop or module("shop.py"))
    (folder / "calls.py").write_text(calls or module("calls.py"))
    log = folder / "worker.log"
    env = {**os.environ, **variables}
    command = [str(python), "-m", "celery", *console("celery")[0].split(), "-c", str(concurrency)]
    with running(command, log, env, cwd=folder) as worker:
        wait_until(lambda: " ready." in log.read_text() or worker.poll() is not None, "the worker is ready", 60)
        called = subprocess.run(
            [str(python), "calls.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert called.returncode == 0, called.stderr + log.read_text()
        worker.terminate()  # by its end it has logged the ends of all runs, whose results it has stored before
        worker.wait(30)
    return called.stdout, log.read_text()
