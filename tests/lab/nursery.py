"""The nursery: a process that has imported Celery, and from which a worker is forked as if it had just been started.

Imports are two thirds of what a worker's start costs, and the tests start some hundreds of them. All else is as in a
process of its own: its command line, environment, log, process group and end. A worker of gevent or eventlet must patch
what it imports, and is started the ordinary way.

``python -m tests.lab.nursery SOCKET`` takes one order a connection, and tells the worker's pid and its exit code there.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from billiard.util import get_pdeathsig

from tests.lab.distributions import read_once

#: What a worker of the lab imports in any case. None of it reads the environment or opens a connection.
IMPORTS = (
    "billiard.popen_fork",
    "billiard.sharedctypes",
    "billiard.synchronize",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.fixups.django",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "celery.worker.worker",
    "celery_redislock.worker.request",
    "celery_redislock.worker.start",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "tests.lab.app",
    "tests.lab.receivers",
)


class Nursling:
    """A process that was forked from the nursery, with as much of Popen's interface as the tests need."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.words = connection.makefile()
        self.pid = int(self.words.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code of the process; None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = int(self.words.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises:
            TimeoutExpired: The process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            select.select([self.connection], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def close(self) -> None:
        self.words.close()
        self.connection.close()


def start(arguments: list[str], log: Path, env: dict[str, str]) -> Nursling:
    """Start ``celery`` with these arguments, in a process group of its own, with these variables added to ours."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_nursery())
    order = {"arguments": arguments, "log": str(log), "env": {**os.environ, **env}}
    connection.sendall(json.dumps(order).encode() + b"\n")
    return Nursling(connection)


@functools.cache
def _nursery() -> str:
    """The socket of this process's own nursery, which ends with this process."""
    folder = tempfile.mkdtemp(prefix="nursery-")  # a TemporaryDirectory would end with any forked child, too
    door = str(Path(folder, "door"))
    command = [sys.executable, "-m", "tests.lab.nursery", door]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def close() -> None:
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(close)
    assert process.stdout
    assert process.stdout.readline() == b"open\n"
    return door


def _main() -> None:
    read_once()
    for module in IMPORTS:
        import_module(module)
    with suppress(OSError):  # not on Linux
        get_pdeathsig()  # else each child of a pool would import cffi, and its parser of C, for the same
    gc.collect()
    gc.freeze()  # else a worker looks at all that was imported for each child that it forks, and copies its pages
    order = _serve(sys.argv[1])
    if order is not None:  # this process is the worker
        _become(order)


def _serve(path: str) -> dict[str, Any] | None:
    """Fork a child for each order; return the order in the child, and None in the nursery when the tests have ended."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    parents: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(64)
        print("open", flush=True)
        while True:
            ready, _, _ = select.select([door, told, 0], [], [])
            if 0 in ready:
                return None
            if told in ready:
                os.read(told, 1024)
                _bury(parents)
            if door in ready:
                connection, _ = door.accept()
                with connection.makefile() as words:
                    order: dict[str, Any] = json.loads(words.readline())
                pid = os.fork()
                if not pid:
                    os.setsid()
                    connection.sendall(f"{os.getpid()}\n".encode())
                    return order
                parents[pid] = connection


def _bury(parents: dict[int, socket.socket]) -> None:
    while parents:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with parents.pop(pid) as connection, suppress(BrokenPipeError):  # nobody waits for that worker any more
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(order: dict[str, Any]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.closerange(3, 1024)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream, source in {0: os.open(os.devnull, os.O_RDONLY), 1: log, 2: log}.items():
        os.dup2(source, stream)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv[1:] = order["arguments"]
    runpy.run_module("celery", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
