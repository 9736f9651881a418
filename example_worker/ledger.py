"""The ledger: task bodies record when they run, and the demo reads it."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import redis
from celery import current_task

from celery_redislock.signals import lock_conflict

from .private import LEDGER


@dataclass(frozen=True, order=True)
class Child:
    """A process of a worker's pool."""

    host: str
    pid: int


@dataclass(frozen=True)
class Run:
    """One run of a body, from its first to its last line. Times are seconds since the epoch."""

    task_id: str
    what: str
    child: Child
    start: float
    end: float | None = None
    """None if the body did not finish."""


@dataclass(frozen=True)
class Refusal:
    """A message that found its key held."""

    task_id: str
    child: Child
    at: float
    policy: str
    """What happened to it: skip, retry, or always waits."""


@dataclass(frozen=True)
class Ledger:
    """Everything that was recorded, in order of time."""

    runs: list[Run]
    refusals: list[Refusal]


def work(what: str, seconds: float) -> None:
    """The work of a task's body: sleep, in steps, and record when the work on `what` starts and ends."""
    _write("start", current_task, what=what)
    until = time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))  # a body that is replaced is told between two steps
    finally:
        _write("end", current_task)


@lock_conflict.connect
def _write_refusal(sender: Any = None, policy: str = "", **_: Any) -> None:
    _write("refusal", sender, policy=policy)


def _write(event: str, task: Any, **more: str) -> None:
    line = {"event": event, "id": task.request.id, "host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
    task.app.backend.client.rpush(LEDGER, json.dumps({**line, **more}))


def read(client: redis.Redis) -> Ledger:
    """Read the ledger of this run."""
    lines: list[Any] = client.lrange(LEDGER, 0, -1)
    return parse([json.loads(line) for line in lines])


def parse(lines: list[dict[str, Any]]) -> Ledger:
    """Combine the lines of starts and ends into runs."""
    runs: list[Run] = []
    refusals: list[Refusal] = []
    open_runs: dict[tuple[str, Child], int] = {}
    for line in lines:
        task_id, child, at = line["id"], Child(line["host"], line["pid"]), line["at"]
        if line["event"] == "start":
            open_runs[task_id, child] = len(runs)
            runs.append(Run(task_id, line["what"], child, at))
        elif line["event"] == "end":
            number = open_runs.pop((task_id, child), None)
            if number is not None:  # None if an interrupted earlier demo recorded the start
                runs[number] = replace(runs[number], end=at)
        else:
            refusals.append(Refusal(task_id, child, at, line["policy"]))
    return Ledger(runs, refusals)
