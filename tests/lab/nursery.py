"""The nursery: a process that has imported Celery, and from which others are forked as if they had just been started.

Imports are two thirds of what a worker's start costs, and nearly all that a command costs; the tests start hundreds of
them. All else is as in a process of its own: its command line, environment, folder, input and output, process group and
end, except that it leaves its modules to the system. A worker of gevent or eventlet must patch what it imports, and is
started the ordinary way; so is what a test of imports or of installed commands starts.

``python -m tests.lab.nursery SOCKET`` takes one order a connection, and tells its pid and its exit code there.
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
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def close(self) -> None:
        self.words.close()
        self.connection.close()


def start(
    module: str,
    arguments: Sequence[str],
    *,
    env: dict[str, str],
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: int = 1,
    stderr: int = 2,
) -> Nursling:
    """Start ``python -m module`` with these arguments, as Popen would, in a process group of its own.

    It has no input unless one is given, and obeys SIGINT even if a shell runs the tests in the background, where
    processes ignore it.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_nursery())
    with open(os.devnull) as nothing:
        socket.send_fds(connection, [b"."], [nothing.fileno() if stdin is None else stdin, stdout, stderr])
    order = {"module": module, "arguments": arguments, "env": env, "cwd": str(cwd or Path.cwd())}
    connection.sendall(json.dumps(order).encode() + b"\n")
    return Nursling(connection)


def run(
    module: str, *arguments: str, env: dict[str, str], cwd: Path | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """What ``python -m module`` prints with these arguments, and its exit code."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(module, arguments, env=env, cwd=cwd, stdout=stdout.fileno(), stderr=stderr.fileno())
        with closing(process):
            try:
                code = process.wait(timeout)
            finally:
                process.send_signal(signal.SIGKILL)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, stdout.read(), stderr.read())


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
    if order is not None:  # this process is the one that was ordered
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
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile() as words:
                    order: dict[str, Any] = json.loads(words.readline())
                pid = os.fork()
                if not pid:
                    os.setsid()
                    connection.sendall(f"{os.getpid()}\n".encode())
                    return {**order, "streams": streams}
                parents[pid] = connection
                for stream in streams:
                    os.close(stream)


def _bury(parents: dict[int, socket.socket]) -> None:
    while parents:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with parents.pop(pid) as connection, suppress(BrokenPipeError):  # nobody waits for that process any more
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(order: dict[str, Any]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(order["streams"]):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:1] = [order["cwd"], *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = order["arguments"]
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> None:
    """End as Python does, but do not take the modules apart: that would copy every page of the nursery."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
