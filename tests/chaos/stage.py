"""The stage: servers, proxies and workers of one chaos run on one broker."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.lab.app import Config
from tests.lab.ledger import Ledger
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, rabbitmq
from tests.lab.workers import Worker, worker

SLOTS = 3
CHILDREN = 3
#: A shutdown that takes longer is asked why, in seconds.
SLOW = 8
#: How long it may take on top. Celery waits up to 30 s for a child whose last result is not read any more (billiard's
#: _ensure_messages_consumed).
HANGS = 40
#: After which the Redis broker gives a message again, in seconds.
VISIBILITY = 10
TRANSPORT = {
    "redis": {"visibility_timeout": VISIBILITY, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    # Else what is published just when the connection is cut is lost without a word.
    "rabbitmq": {"confirm_publish": True},
}


class Place:
    """Where one thing at a time happens, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[Any] | None = None

    def do(self, action: Callable[[], object]) -> None:
        """Begin `action` once the last one has ended; raise what that one raised."""
        self.wait()
        self._last = self._thread.submit(action)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class Slot(Place):
    """A place for a worker; where one has ended, another is started."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__()
        self.worker: Worker
        self._config, self._folder = config, folder
        self._end = ExitStack()
        self._leaving: list[tuple[Worker, ExitStack, float]] = []
        self._started = 0
        folder.mkdir()

    def do(self, action: Callable[[], object]) -> None:
        def act() -> None:
            self.see_off(0.0)
            self.replace_dead()
            action()

        super().do(act)

    def replace_dead(self) -> None:
        """A worker that ended although nobody told it to is a complaint; it gets a successor."""
        if self._started and self.worker.process.poll() is not None:
            self._complain("a worker ended by itself", self.worker)
            self.start()

    def start(self) -> None:
        """Another worker, in place of the last one."""
        self._end.close()
        self._started += 1
        name = f"{self._folder.name}-{self._started}@chaos"
        context = worker(self._config, self._folder, CHILDREN, "-n", name, app="tests.chaos.worker")
        self.worker = self._end.enter_context(context)

    def end(self, sig: signal.Signals) -> None:
        """Ask for a shutdown, and wait for its end; one that takes long goes on beside the next worker."""
        main = self.worker.process
        main.send_signal(sig)
        with suppress(subprocess.TimeoutExpired):
            main.wait(SLOW)
        if main.poll() is None:
            self._ask_where_it_hangs()
            self._leaving.append((self.worker, self._end, time.monotonic() + HANGS))
            self._end = ExitStack()

    def see_off(self, patience: float = HANGS) -> None:
        """Wait for those that are still shutting down; one that never ends is a complaint."""
        for leaving in self._leaving.copy():
            gone, end, deadline = leaving
            with suppress(subprocess.TimeoutExpired):
                gone.process.wait(min(patience, max(0.0, deadline - time.monotonic())))
            hangs = gone.process.poll() is None and time.monotonic() > deadline
            if hangs:
                self._complain("a worker did not shut down", gone)
                gone.kill()
            if gone.process.poll() is not None:
                end.close()
                self._leaving.remove(leaving)

    def _complain(self, text: str, about: Worker) -> None:
        about.ledger.write({"event": "complaint", "text": f"{text}: {about.log}"})

    def _ask_where_it_hangs(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(self.worker.process.pid), *self.worker.children()]:
                process.send_signal(signal.SIGUSR2)

    def close(self) -> None:
        super().close()
        self._end.close()
        for _, end, _ in self._leaving:
            end.close()


class Stage:
    """What the faults strike. From `open_stage`."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self.kind = kind
        self.ledger = Ledger(folder / "ledger")
        self.broker_server = _valkey(folder, "broker", stack)
        self.locks = _valkey(folder, "locks", stack)
        broker = self.broker_server.celery_url(0)
        if kind == "rabbitmq":
            (folder / "rabbitmq").mkdir()
            broker = stack.enter_context(rabbitmq(folder / "rabbitmq"))
        self.broker_proxy = stack.enter_context(Proxy(broker).serve())
        self.lock_proxy = stack.enter_context(Proxy(self.locks.url()).serve())
        settings = {
            "broker_transport_options": TRANSPORT[kind],
            "redislock_retry_max_delay": 0.6,
            "task_publish_retry": True,
        }
        backend = self.broker_server.celery_url(1)
        self.config = Config(
            self.broker_proxy.url, backend, self.lock_proxy.url, str(self.ledger.path), "chaos", settings
        )
        #: What no fault strikes: for the load and the checks.
        self.direct = replace(self.config, broker=broker, locks=self.locks.url())
        self.servers = {"locks": Place(), "broker": Place()}
        self.slots = [Slot(self.config, folder / f"slot{number}") for number in range(SLOTS)]
        for place in [*self.servers.values(), *self.slots]:
            stack.callback(place.close)
        for slot in self.slots:
            slot.do(slot.start)
        for slot in self.slots:
            slot.wait()

    def mend(self) -> None:
        """Let the last faults end; then everything is well, and every slot has its worker."""
        for place in [*self.servers.values(), *self.slots]:
            place.wait()
        self.lock_proxy.mend()
        self.broker_proxy.mend()
        for slot in self.slots:
            slot.see_off()
            slot.replace_dead()


@contextmanager
def open_stage(kind: str, folder: Path) -> Iterator[Stage]:
    """Servers, proxies and workers that run until the end of the block."""
    with ExitStack() as stack:
        # While the places are closed, which takes seconds, a second Ctrl+C must not leave processes behind.
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        opened = Stage(kind, folder, stack)
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        yield opened


def _valkey(folder: Path, name: str, stack: ExitStack) -> Valkey:
    (folder / name).mkdir()
    return stack.enter_context(Valkey(folder / name).serve())
