"""Holders: processes that take a lock and write, some of them too late; and the table that they write to."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import redis

from celery_redislock import Lock, LockLost, LockUnavailable
from tests.lab.servers import wait_until_stopped

#: The name of the lock that all holders take.
NAME = "stock"


class Table:
    """A table of one row, which takes no value of a holder whose fence is older than that of its present value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._connection() as connection:
            connection.execute("CREATE TABLE stock (value TEXT, fence INTEGER)")
            connection.execute("INSERT INTO stock VALUES ('empty', 0)")

    def write(self, value: str, fence: int) -> bool:
        """Write `value`, unless somebody with a greater fence has written before; return whether it was written."""
        with self._connection() as connection:
            update = "UPDATE stock SET value = ?, fence = ? WHERE fence <= ?"
            return connection.execute(update, (value, fence, fence)).rowcount == 1

    def row(self) -> list[Any]:
        with self._connection() as connection:
            return list(connection.execute("SELECT value, fence FROM stock").fetchone())

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            yield connection


class Grant(NamedTuple):
    """A lock was taken. All times are `time.monotonic()`, which processes of one host share."""

    at: float
    fence: int


class Loss(NamedTuple):
    """A holder has learned that its lock is lost."""

    at: float
    deadline: float
    """The holder's own deadline, as it was when the holder last looked before."""
    reason: str


class Holder:
    """A process with one lock, renewed and fenced. It does what it is asked to, one thing after the other.

    Args:
        connect: Makes the client of the process.
        lease: The lease of the lock, in seconds.
    """

    def __init__(self, connect: Callable[[], redis.Redis], lease: float) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _begin, (connect, lease))
        self.pid: int = self._process.submit(os.getpid).result(60)

    @contextmanager
    def living(self) -> Iterator[Holder]:
        """Kill the process at the end of the block, whatever it does then."""
        try:
            yield self
        finally:
            os.kill(self.pid, signal.SIGKILL)
            self._process.shutdown()

    def connect(self) -> None:
        """Take the lock, have it renewed and give it back: its connections and its keeper's are kept."""
        self._process.submit(_connect).result(30)

    def take(self) -> Future[Grant]:
        """Take the lock, however long that takes."""
        return self._process.submit(_take)

    def write(self, table: Table, value: str) -> Future[bool]:
        """Write without a look at the lock."""
        return self._process.submit(_write, table, value)

    def loss(self) -> Loss:
        """Wait until the holder has learned that its lock is lost. It looks all the time."""
        return self._process.submit(_wait_for_loss).result(30)

    def state(self) -> str | None:
        return self._process.submit(_state).result(30)

    def give_back(self) -> str:
        """Release; returns the name of the error, if any."""
        return self._process.submit(_give_back).result(30)

    def stand_still(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_until_stopped(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class _Holding:
    """What the holder's process keeps between two requests."""

    lock: Lock
    loss: Future[Loss]


def _begin(connect: Callable[[], redis.Redis], lease: float) -> None:
    _Holding.lock = Lock(connect(), NAME, timeout=lease, thread_local=False, renew=True, fence=True)


def _connect() -> None:
    with _Holding.lock as lock:
        left = lock.remaining
        while lock.remaining <= left:
            left = lock.remaining
            time.sleep(0.005)


def _take() -> Grant:
    while True:
        try:
            _Holding.lock.acquire()
        except LockUnavailable:  # one primary is gone, and the next is not known yet
            continue
        fence = _Holding.lock.fence
        assert fence
        grant = Grant(time.monotonic(), fence)
        _Holding.loss = Future()
        threading.Thread(target=_watch, args=(_Holding.lock, _Holding.loss), daemon=True).start()
        return grant


def _watch(lock: Lock, loss: Future[Loss]) -> None:
    deadline = 0.0
    while lock.state in {"held", "at_risk"}:
        deadline = time.monotonic() + lock.remaining
        time.sleep(0.005)
    at = time.monotonic()
    try:
        lock.check()
    except LockLost as error:
        loss.set_result(Loss(at, deadline, str(error)))


def _wait_for_loss() -> Loss:
    return _Holding.loss.result(30)


def _state() -> str | None:
    return _Holding.lock.state


def _write(table: Table, value: str) -> bool:
    fence = _Holding.lock.fence
    assert fence
    return table.write(value, fence)


def _give_back() -> str:
    try:
        _Holding.lock.release()
    except LockLost as error:
        return type(error).__name__
    return ""
