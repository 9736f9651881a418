"""Targets, which faults strike one after the other; a post is one with a worker in it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from chaos.complaints import error_that_ended
from tests.lab.app import Config
from tests.lab.workers import Worker, worker

CHILDREN = 3
#: Seconds after which a shutdown is slow, and the worker's stack is written down. A body may take as long.
SLOW = 8
#: How many more seconds a slow shutdown may take. A child waits up to 30 s for its worker to read its last result,
#: which a worker that shuts down may never do (billiard's _ensure_messages_consumed).
HANGS = 40


class Target:
    """What one thing at a time happens to, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[Any] | None = None

    def do(self, action: Callable[[], object]) -> None:
        """Begin `action` once the last one has ended; raise what that one raised."""
        self.wait()
        self._last = self._thread.submit(action)

    def wait(self) -> None:
        """Wait until the last action is over; raise what it raised."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Begin nothing more, and wait for the last action."""
        self._thread.shutdown(cancel_futures=True)


class Post(Target):
    """A target with a worker; where one has ended, another is started."""

    def __init__(self, config: Config, folder: Path, app: str) -> None:
        super().__init__()
        self.worker: Worker
        self.config = config
        """That of the next worker."""
        self.name = ""
        """That of the worker, for Celery's remote control."""
        self._folder, self._app = folder, app
        self._end = ExitStack()
        self._leaving: list[tuple[Worker, ExitStack, float, str]] = []
        self._started = 0
        folder.mkdir()

    def do(self, action: Callable[[], object]) -> None:
        """As `Target.do`, with a worker that lives when `action` begins."""

        def act() -> None:
            self.see_off(0.0)
            self.replace_dead()
            action()

        super().do(act)

    def replace_dead(self) -> None:
        """Start a successor to a worker that ended although nobody told it to: a complaint, if no error is known."""
        if self._started and self.worker.process.poll() is not None:
            error = error_that_ended(self.worker.log)
            if not error or "/celery_redislock/" in error:
                self._complain("a worker ended by itself", self.worker)
            crash = {"event": "crash", "worker": self.worker.process.pid, "log": str(self.worker.log), "error": error}
            self.worker.ledger.write(crash)
            self.start()

    def start(self) -> None:
        """Start another worker after the last one."""
        self._end.close()
        self._started += 1
        self.name = f"{self._folder.name}-{self._started}@chaos"
        context = worker(self.config, self._folder, CHILDREN, "-n", self.name, app=self._app)
        self.worker = self._end.enter_context(context)

    def end(self, sig: signal.Signals) -> None:
        """Ask for a shutdown, and wait for its end; one that takes long goes on beside the next worker."""
        main = self.worker.process
        main.send_signal(sig)
        with suppress(subprocess.TimeoutExpired):
            main.wait(SLOW)
        if main.poll() is None:
            self._leaving.append((self.worker, self._end, time.monotonic() + HANGS, self._where_it_hangs()))
            self._end = ExitStack()

    def see_off(self, patience: float = HANGS) -> None:
        """Wait for the workers that are still shutting down. A worker that never ends is killed, and counted."""
        for leaving in self._leaving.copy():
            gone, end, deadline, stack = leaving
            with suppress(subprocess.TimeoutExpired):
                gone.process.wait(min(patience, max(0.0, deadline - time.monotonic())))
            if gone.process.poll() is None and time.monotonic() > deadline:
                if "/celery_redislock/" in stack.partition(" in _handle_request")[0]:  # what a signal has interrupted
                    self._complain(f"a worker hangs in celery_redislock{stack}", gone)
                gone.ledger.write({"event": "hang", "worker": gone.process.pid, "log": str(gone.log), "stack": stack})
                gone.kill()
            if gone.process.poll() is not None:
                end.close()
                self._leaving.remove(leaving)

    def _complain(self, text: str, about: Worker) -> None:
        about.ledger.write({"event": "complaint", "text": f"{text}: {about.log}"})

    def _where_it_hangs(self) -> str:
        """The stack of the worker's main thread; its log gets those of its children too."""
        length = len(self.worker.output())
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(self.worker.process.pid), *self.worker.children()]:
                process.send_signal(signal.SIGUSR2)
                time.sleep(0.2)
        _, _, stack = self.worker.output()[length:].partition("Current thread")
        return stack.partition("Thread 0x")[0].partition("Current thread")[0]

    def close(self) -> None:
        """Close the target, and end its workers."""
        super().close()
        self._end.close()
        for _, end, *_ in self._leaving:
            end.close()
