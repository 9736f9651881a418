"""Real prefork workers, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.lab.app import Config
from tests.lab.servers import running, wait_until

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A running worker; its main process and its pool children can be signalled."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ask for a shutdown, warm by default, and wait for its end."""
        self.process.send_signal(sig)
        self.process.wait(30)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def worker(config: Config, folder: Path, concurrency: int = 4, *options: str) -> Iterator[Worker]:
    """A worker that is ready to work; what still runs at the end of the block is killed."""
    number = len(list(folder.glob("worker*.log")))
    log, ready = folder / f"worker{number}.log", folder / f"ready{number}"
    command = [sys.executable, "-m", "celery", "-A", "tests.lab.worker", "worker", "-l", "INFO"]
    command += ["-c", str(concurrency), "-n", f"w{number}@lab", "-Q", config.queue]
    command += ["--without-gossip", "--without-mingle", *options]
    env = {"LAB_CONFIG": config.dump(), "LAB_READY": str(ready), "PYTHONPATH": str(ROOT)}
    with running(command, log, env) as process:
        started = Worker(process, log)
        wait_until(lambda: ready.exists() or process.poll() is not None, "the worker is ready", timeout=60)
        assert process.poll() is None, started.output()
        yield started
