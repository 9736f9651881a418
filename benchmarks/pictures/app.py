"""The tasks of the pictures. Each body writes down when it runs, and each conflict when it is met."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock import LockedTask, LockReplaced
from celery_redislock.signals import lock_conflict

app = Celery("pictures", broker=os.environ["PICTURES_BROKER"], backend=os.environ["PICTURES_BROKER"])
app.conf.update(
    redislock_url=os.environ["PICTURES_LOCKS"],
    redislock_client_options={"socket_timeout": 0.5, "socket_connect_timeout": 0.5},
    redislock_lease=3,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)

#: How long most bodies take, in seconds.
SECONDS = 1.5


def note(kind: str, task: Any, **more: Any) -> None:
    """Write a line of the record: what happened, to which task, in which process."""
    at = {"kind": kind, "at": time.time(), "id": task.request.id, "worker": task.request.hostname, "pid": os.getpid()}
    with Path(os.environ["PICTURES_RECORD"]).open("a") as record:
        record.write(json.dumps({**at, **more}) + "\n")


@lock_conflict.connect
def _met(sender: Any = None, policy: str = "", **_: Any) -> None:
    if sender.request.id:  # in a worker, and not at a publish
        note("conflict", sender, policy=policy)


def work(task: LockedTask, seconds: float = SECONDS, with_: str = "") -> str:
    """The work of a body, in steps, and half a second of cleaning up if a newer call ends it."""
    note("start", task, with_=with_)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(0.01)
    except LockReplaced:
        note("stop", task)
        time.sleep(0.4)
        raise
    finally:
        note("end", task)
    return with_


@app.task
def occupy() -> None:
    """Keep a process busy for half a second."""
    time.sleep(0.5)


@app.task(base=LockedTask, bind=True)
def report(self: LockedTask, day: str) -> str:
    """Its scope and its policy come with the call."""
    return work(self)


MERGED: dict[str, Any] = {"base": LockedTask, "bind": True, "lock_args": ["shop"], "lock_scope": "queue"}


@app.task(lock_arguments="first", **MERGED)
def first(self: LockedTask, shop: int, settings: str) -> str:
    """The message keeps its own arguments."""
    return work(self, 1.2, settings)


@app.task(lock_arguments="latest", **MERGED)
def latest(self: LockedTask, shop: int, settings: str) -> str:
    """The message runs with the last call's."""
    return work(self, 1.2, settings)


@app.task(lock_arguments="all", **MERGED)
def batch(self: LockedTask, shop: int, settings: str) -> str:
    """The message runs once for all."""
    return work(self, 1.2, ", ".join(str(args[1]) for args, _ in self.lock.calls))


@app.task(lock_arguments="latest", lock_debounce=1, **MERGED)
def debounced(self: LockedTask, shop: int, settings: str) -> str:
    """The message runs a second after the last call."""
    return work(self, 1.2, settings)


@app.task(lock_arguments="latest", lock_on_conflict="replace", **MERGED)
def preview(self: LockedTask, shop: int, settings: str) -> str:
    """A newer call ends it."""
    return work(self, 2, settings)


@app.task(base=LockedTask, bind=True, lock_args=["account"])
def bill(self: LockedTask, account: int, amount: int) -> str:
    """The bills of an account wait for each other."""
    return work(self, 1)


@app.task(base=LockedTask, bind=True, lock_args=["account"])
def long_bill(self: LockedTask, account: int, amount: int) -> str:
    """The same, and slower."""
    return work(self, 4 if amount == 1 else 1)


@app.task(base=LockedTask, bind=True, lock_key=["account:{source}", "account:{target}"])
def transfer(self: LockedTask, source: str, target: str, seconds: float) -> str:
    """It needs both accounts."""
    return work(self, seconds)


@app.task(base=LockedTask, bind=True, lock_args=["customer"], lock_rate=(3, 2))
def push(self: LockedTask, customer: int, number: int) -> str:
    """Three may begin within two seconds."""
    return work(self, 0.3)


FAIR: dict[str, Any] = {"base": LockedTask, "bind": True, "lock_key": "imports", "lock_limit": 2}


@app.task(shared=False, **FAIR)
def by_time(self: LockedTask, customer: str) -> str:
    """The oldest message first."""
    return work(self, 0.05, customer)


@app.task(lock_fair="customer", **FAIR)
def by_turns(self: LockedTask, customer: str) -> str:
    """The customers take turns."""
    return work(self, 0.05, customer)
