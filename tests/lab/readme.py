"""The README and the page "Getting started" as a new user follows them: a worker, and calls from another shell."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.servers import Valkey, running, wait_until
from tests.lab.workers import ROOT

#: What differs from one try to the next: times, task ids, the child that runs a task, the host, and the server.
_VARIES = "|".join(
    (
        r"[\d-]{10} [\d:,]{12}",
        r"[\d-]{10} [\d:]{8} UTC \([\d.]+s ago\)",
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"ForkPoolWorker-\d+",
        r"celery@[\w.-]+",
        r"(?:redis|unix)://[^,\s]+",
    )
)


class Shown:
    """A document: the files to write, the commands to type, and what it says that they print.

    Args:
        document: Its path in the repository.
    """

    def __init__(self, document: str) -> None:
        self.text = (ROOT / document).read_text()

    def module(self, name: str) -> str:
        """The Python block that begins with the name of its file."""
        return self.block_with(f"# {name}\n")

    def block_with(self, text: str) -> str:
        """The first Python block that has this text."""
        return next(block for block in re.findall(r"```python\n(.*?)```", self.text, re.DOTALL) if text in block)

    def console(self, command: str) -> tuple[str, str]:
        """What is typed after this beginning of a command line, and what is shown below it."""
        ((arguments, output),) = re.findall(
            rf"^\$ {re.escape(command)} ?(.*)\n((?:(?!\$|```).*\n)*)", self.text, re.MULTILINE
        )
        return str(arguments), str(output)

    def log_lines(self) -> str:
        """The lines of the worker's log."""
        return "\n".join(re.findall(r"^\[\d.*", self.text, re.MULTILINE))


README = Shown("README.md")
GETTING_STARTED = Shown("docs/getting-started.md")


def alike(text: str) -> set[str]:
    """Its lines, without what differs from one try to the next."""
    return {re.sub(_VARIES, "...", line) for line in text.splitlines()}


def celerys_own(server: Valkey) -> dict[str, str]:
    """The variables by which Celery finds its broker and result backend, whatever its app names."""
    return {"CELERY_BROKER_URL": server.celery_url(0), "CELERY_RESULT_BACKEND": server.celery_url(1)}


class Shell:
    """A folder with the user's files, in which commands are typed.

    Args:
        python: The interpreter of an environment in which celery-redislock is installed.
        folder: Where the files and the worker's log are.
        variables: `celerys_own`, so that an example finds the test's server without a change, and what decides which
            celery-redislock is imported.
    """

    def __init__(self, python: str | Path, folder: Path, variables: dict[str, str]) -> None:
        self._python, self._folder = str(python), folder
        self._env = {**os.environ, **variables}
        self._log = folder / "worker.log"

    @property
    def log(self) -> str:
        """What the worker has logged."""
        return self._log.read_text()

    def write(self, **files: str) -> None:
        """Write Python files, by their names without the ending."""
        for name, text in files.items():
            (self._folder / f"{name}.py").write_text(text)

    def type(self, command: str) -> str:
        """What this command prints; it must succeed."""
        done = subprocess.run(
            self._words(command),
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log
        return done.stdout

    @contextmanager
    def worker(self, command: str) -> Iterator[None]:
        """A worker that this command starts; it has ended, and logged the end of each run, when the block has."""
        with running(self._words(command), self._log, self._env, cwd=self._folder) as worker:
            wait_until(lambda: " ready." in self.log or worker.poll() is not None, "the worker is ready", 60)
            yield
            worker.terminate()
            worker.wait(30)

    def _words(self, command: str) -> list[str]:
        program, *arguments = command.split()
        return [self._python, *(["-m", "celery"] if program == "celery" else []), *arguments]


def try_it(
    python: str | Path,
    folder: Path,
    variables: dict[str, str],
    *,
    shop: str | None = None,
    calls: str | None = None,
    concurrency: int = 2,
) -> tuple[str, str]:
    """Type what the README's first screen says, with this interpreter.

    Args:
        python: As for `Shell`.
        folder: As for `Shell`.
        variables: As for `Shell`.
        shop: Instead of the README's `shop.py`.
        calls: Instead of its `calls.py`.
        concurrency: The worker's concurrency.

    Returns:
        What the calls printed, and the worker's log.
    """
    shell = Shell(python, folder, variables)
    shell.write(shop=shop or README.module("shop.py"), calls=calls or README.module("calls.py"))
    with shell.worker(f"celery {README.console('celery')[0]} -c {concurrency}"):
        printed = shell.type("python calls.py")
    return printed, shell.log
