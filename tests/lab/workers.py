"""Real prefork workers, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery

from celery_redislock.app import server_of
from celery_redislock.connection.cluster import hash_slot_of
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.protocol.names import keys_of
from tests.lab import nursery
from tests.lab.app import Config
from tests.lab.ledger import Ledger
from tests.lab.measured import kill_group
from tests.lab.nursery import Nursling
from tests.lab.servers import running, wait_until, wait_until_stopped

#: The states of a process that runs nothing.
STILL = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A running worker; its main process and its pool children can be signalled one by one or together.

    Every process that is killed here is noted in the ledger, which then knows when the runs of that process have ended.
    """

    def __init__(self, process: subprocess.Popen[bytes] | Nursling, log: Path, ledger: Ledger) -> None:
        self.process = process
        self.log = log
        self.ledger = ledger

    def children(self) -> list[psutil.Process]:
        """The children that live. A dead child is a zombie until the pool looks, which it does every five seconds."""
        return [child for child in psutil.Process(self.process.pid).children() if not is_dead(child.pid)]

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ask for a shutdown, warm by default, and wait for its end."""
        self.begin_to_stop(sig)
        self.wait()

    def wait(self) -> None:
        """Wait for its end. Celery takes half a minute if it has not read a child's last result.

        If it does not end then, its log ends with what each thread of its processes does.
        """
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *(child.pid for child in self.children())]:
                os.kill(pid, signal.SIGUSR2)
            time.sleep(1)  # nobody tells when the last of it is written
            raise

    def begin_to_stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ask for a shutdown, and wait until the worker says that it has begun.

        Celery's handler of SIGQUIT does all its work amid what it interrupts. Had that been a talk with the broker, the
        worker may hang: so it is sent when nothing is interrupted.
        """
        if sig == signal.SIGQUIT:
            wait_until(lambda: waits_for_events(self.process.pid), "the main process does nothing else")
        self.process.send_signal(sig)
        wait_until(lambda: self.process.poll() is not None or "hutdown" in self.output(), "the shutdown begins")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def busy_child(self) -> int:
        """The pid of the one child that is in a body, as soon as there is one."""
        busy: set[int] = set()

        def found() -> bool:
            busy.update({child.pid for child in self.children()} & {run.pid for run in self.ledger.running()})
            return bool(busy)

        wait_until(found, "a child runs a body")
        (pid,) = busy
        return pid

    def kill(self) -> None:
        """SIGKILL for the whole worker: the main process first, so that it cannot tidy up, then all children."""
        pids = self._stop_main()
        for pid in pids:
            self._kill(pid)
        self.process.wait()

    def kill_child(self, pid: int | None = None) -> int:
        """SIGKILL for one child, the busy one if none is named; return its pid."""
        pid = pid or self.busy_child()
        self._kill(pid)
        return pid

    def pause(self) -> None:
        """Let the whole worker stand still (SIGSTOP), until `resume`."""
        for pid in self._stop_main():
            self.pause_child(pid)

    def resume(self) -> None:
        for pid in [*(child.pid for child in self.children()), self.process.pid]:
            self.resume_child(pid)

    def pause_child(self, pid: int | None = None) -> int:
        """Let one child stand still, the busy one if none is named; return its pid."""
        pid = pid or self.busy_child()
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)
        return pid

    def resume_child(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def _stop_main(self) -> list[int]:
        """Stop the main process, so that it starts no more children; return its pid and theirs."""
        self.pause_child(self.process.pid)
        return [self.process.pid, *(child.pid for child in self.children())]

    def _kill(self, pid: int) -> None:
        """Kill a process, which stands still before that: so the moment is known from which on it runs nothing."""
        at = None
        with suppress(
            ProcessLookupError, psutil.NoSuchProcess
        ):  # a child ends with its main process: Celery asks for that
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: psutil.Process(pid).status() in STILL, f"{pid} stands still", 10)
            at = (
                time.monotonic()
            )  # not after the kill: others may see its end, and take its key, before this process goes on
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_dead(pid), f"{pid} is dead", 10)
        self.ledger.died(pid, at)


def waiting_in(*workers: Worker) -> int:
    """How often a message has begun to wait in line in the workers."""
    return sum(worker.output().count("; waiting in line (") for worker in workers)


def consume_from(app, queue, **options):
    """Have one worker consume from a queue too, and wait until it does: it answers before it has declared the queue."""
    app.control.add_consumer(queue, **options, reply=True, limit=1, timeout=10)
    wait_until(lambda: queue in str(app.control.inspect(limit=1).active_queues()), "the worker has bound the queue")


def kept(app: Celery, workers: int = 1) -> int:
    """How many messages the main processes of so many workers keep waiting. The children may have told of more."""
    replies = app.control.broadcast("redislock_waiting", reply=True, limit=workers, timeout=5)
    return sum(len(told) for reply in replies or () for told in reply.values())


def client_for(app: Celery, key: str) -> redis.Redis:
    """A client of the lock server that has `key`: of the only one, or of a node of a Cluster."""
    client = server_of(app).client
    return client.connect(client.owner(hash_slot_of(key)), 1) if isinstance(client, ClusterClient) else client


def stands_in_line(client: Any, task: Any, key: object, workers: int = 1) -> bool:
    """Whether each of so many workers stands in the line for `key` with the rank of the first message that it keeps.

    It does a moment after it keeps that message: who releases the key before may call a later one of another worker.

    Args:
        client: Reaches the lock server that has the key.
        task: The task of the messages.
        key: The task's first argument.
        workers: How many workers answer.
    """
    name = task.lock_for(key).key
    replies = task.app.control.broadcast("redislock_waiting", {"key": name}, reply=True, limit=workers, timeout=5)
    first = [told[0]["rank"] for reply in replies or () for told in reply.values() if told]
    return sorted(first) == [rank for _, rank in client.zrange(keys_of(name).line, 0, -1, withscores=True)]


def first_rank(client: Any, task: Any, key: object) -> int:
    """The rank of the first room in the line for `key`; as for `stands_in_line`."""
    ((_, rank),) = client.zrange(keys_of(task.lock_for(key).key).line, 0, 0, withscores=True)
    return int(rank)


def acked(app: Celery, task: str) -> int:
    """How many runs of the task named so, whose message is acked, go on in the only worker. A child may run before."""
    return sum(run["name"] == task and run["acknowledged"] for run in _active(app))


def known(app: Celery) -> int:
    """How many runs the main process of the only worker knows to have begun. A child may run before.

    Celery cancels only these in a cold shutdown, and waits for the end of the others.
    """
    return len(_active(app))


def _active(app: Celery) -> list[dict[str, Any]]:
    replies = app.control.broadcast("active", reply=True, limit=1, timeout=5)
    return [run for reply in replies or () for told in reply.values() for run in told]


def waits_for_events(pid: int) -> bool:
    """Whether the process `pid` does nothing but wait for its connections and timers. It is for Linux."""
    return "epoll" in Path(f"/proc/{pid}/wchan").read_text()


def is_dead(pid: int) -> bool:
    """Whether the process runs no more. Its parent may not have noticed."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def worker(
    config: Config, folder: Path, concurrency: int = 4, *options: str, app: str = "tests.lab.worker"
) -> Iterator[Worker]:
    """A worker that is ready to work; what still runs at the end of the block is killed."""
    number = len(list(folder.glob("worker*.log")))
    log, ready = folder / f"worker{number}.log", folder / f"ready{number}"
    command = ["-A", app, "worker", "-l", "INFO", "-c", str(concurrency), "-n", f"w{number}@lab", "-Q", config.queue]
    command += ["--without-gossip", "--without-mingle", *options]
    with _celery(command, log, {**_env(config), "LAB_READY": str(ready)}) as process:
        started = Worker(process, log, Ledger(Path(config.ledger)))
        wait_until(lambda: ready.exists() or process.poll() is not None, "the worker is ready", timeout=60)
        assert process.poll() is None, started.output()
        yield started


@contextmanager
def _celery(
    arguments: list[str], log: Path, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes] | nursery.Nursling]:
    """A process of Celery's command line, which ends with the block, whatever is left of it."""
    if {"gevent", "eventlet"} & set(arguments):
        with running([sys.executable, "-m", "celery", *arguments], log, env) as process:
            yield process
        return
    with log.open("ab") as file:
        out = file.fileno()
        nursling = nursery.start("celery", arguments, env={**os.environ, **env}, stdout=out, stderr=out)
    try:
        yield nursling
    finally:
        kill_group(nursling.pid)
        nursling.wait()
        nursling.close()


@contextmanager
def beat(config: Config, folder: Path) -> Iterator[Callable[[], str]]:
    """A running beat; yields what shows its log."""
    log = folder / "beat.log"
    command = ["-A", "tests.lab.worker", "beat", "-l", "INFO", "--max-interval", "1", "-s", str(folder / "schedule")]
    with _celery(command, log, _env(config)):
        yield lambda: log.read_text(errors="replace")


def _env(config: Config) -> dict[str, str]:
    return {"LAB_CONFIG": config.dump(), "PYTHONPATH": str(ROOT)}
