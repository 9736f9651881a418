"""Publishers that know nothing of locks: processes that call one task in a loop, and note what they were told.

``python -m tests.lab.publishers PLAN`` ends when they have ended. One that dies is replaced. `tests.lab.window_judge`
and `tests.lab.merge_judge` read their notes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock.message.header import HEADER
from tests.lab import nursery
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger

#: What a publisher may be told to do with its next message, by a file of that name in the folder of the orders: die
#: before it is sent; take a moment before it is sent; send it twice.
ORDERS = ("die", "dawdle", "double")
#: A file of this name in that folder tells all publishers to stop.
DONE = "done"


@dataclass(frozen=True)
class Plan:
    """What the publishers do."""

    task: str
    seconds: float
    orders: str
    """The folder of the orders."""
    keys: int = 6
    publishers: int = 10
    seed: int = 1
    calls: int = 0
    """How many calls each publisher makes, without a pause; 0: with pauses, until the time is over or they are done."""
    moves: float = math.inf
    """After so many seconds all go on to other keys, so that nothing follows the last calls of the earlier ones."""
    deadly: float = 0.0
    """The share of the calls that kill the child that first runs them."""


@contextmanager
def publishing(config: Config, plan: Plan) -> Iterator[nursery.Nursling]:
    """The process whose children publish as planned; they are gone at the end of the block."""
    env = {**os.environ, "LAB_CONFIG": config.dump()}
    with closing(nursery.start("tests.lab.publishers", [json.dumps(asdict(plan))], env=env)) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Publisher:
    """One publisher, with an app of its own."""

    def __init__(self, config: Config, plan: Plan, number: int) -> None:
        self.app: Celery = make_app(config)
        self.task: Any = self.app.tasks[f"lab.{plan.task}"]
        self.ledger, self.plan = Ledger(Path(config.ledger)), plan
        self.rng = random.Random(f"{plan.seed}-{number}")
        self._number, self._count = number, 0
        self.id: str | None = None
        self.named_at: float | None = None
        self.sent_at: float | None = None
        self.is_numbered = True
        self._send_task, self._send_message = self.app.send_task, self.app.amqp.send_task_message
        self.app.send_task = self._on_its_way  # type: ignore[method-assign]
        self.app.amqp.send_task_message = self._sent
        logging.getLogger("celery_redislock").addHandler(_Noting(self.ledger))

    def call_until(self, end: float) -> None:
        """Call again and again."""
        while not is_over(self.plan, end) and (not self.plan.calls or self._count < self.plan.calls):
            past = int(time.monotonic() / self.plan.moves)
            self._call(self.plan.keys * past + self.rng.randrange(self.plan.keys))
            time.sleep(0.0 if self.plan.calls else self.rng.uniform(0.0, 0.03))

    def _call(self, key: int) -> None:
        self.id = self.named_at = self.sent_at = None
        self.is_numbered, self._count = True, self._count + 1
        item = f"{self._number}.{self._count}"
        note: dict[str, Any] = {"key": str(key), "item": item, "pid": os.getpid(), "asked_at": time.monotonic()}
        try:
            result = self.task.delay(key, item, self.rng.uniform(0.0, 0.05), *self._how(item))
        except Exception as error:  # noqa: BLE001 - the broker has many
            note.update(event="error", id=self.id, error=repr(error))
        else:
            note.update(event="call", id=result.id, duplicate=result.duplicate)
        note.update(
            is_numbered=self.is_numbered, named_at=self.named_at, sent_at=self.sent_at, returned_at=time.monotonic()
        )
        self.ledger.write(note)

    def _how(self, item: str) -> tuple[str, ...]:
        is_deadly = self.rng.random() < self.plan.deadly
        return ("dies", str(Path(self.plan.orders, f"died {item}"))) if is_deadly else ()

    def _on_its_way(self, *args: Any, **options: Any) -> Any:
        """The job's id is known, and its message is not sent yet."""
        self.id, self.named_at = options["task_id"], time.monotonic()
        self.is_numbered = "number" in options["headers"][HEADER]
        if self._is_told_to("die"):
            self.ledger.write({"event": "dies", "id": self.id, "pid": os.getpid()})
            time.sleep(self.rng.uniform(0.0, 1.2))
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_told_to("dawdle"):
            self.ledger.write({"event": "dawdles", "id": self.id})
            time.sleep(self.rng.uniform(0.0, 0.3))
        return self._send_task(*args, **options)

    def _sent(self, *args: Any, **options: Any) -> Any:
        self.sent_at = time.monotonic()
        result = self._send_message(*args, **options)
        if self._is_told_to("double"):
            self.ledger.write({"event": "doubles", "id": self.id})
            with suppress(Exception):
                self._send_message(*args, **options)
        return result

    def _is_told_to(self, order: str) -> bool:
        """Whether this publisher is the first one that finds the order."""
        try:
            Path(self.plan.orders, order).unlink()
        except FileNotFoundError:
            return False
        return True


class _Noting(logging.Handler):
    """Notes that Redis could not be reached: then a publish may keep no promise."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.WARNING)
        self.ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.ledger.write({"event": "warned", "pid": os.getpid(), "at": time.monotonic(), "text": text})


def is_over(plan: Plan, end: float) -> bool:
    """Whether the publishers are to stop."""
    return time.monotonic() >= end or Path(plan.orders, DONE).exists()


def _main() -> int:
    plan, config = Plan(**json.loads(sys.argv[1])), Config.from_env()
    end = time.monotonic() + plan.seconds
    started = range(plan.publishers)
    children = {_fork(config, plan, number, end) for number in started}
    number, failed = len(children), False
    while children:
        pid, status = os.wait()
        children.discard(pid)
        failed |= status not in {0, signal.SIGKILL}
        if status == signal.SIGKILL and not is_over(plan, end):
            children.add(_fork(config, plan, number, end))
            number += 1
    return int(failed)


def _fork(config: Config, plan: Plan, number: int, end: float) -> int:
    """A publisher in a process that has imported what it needs already."""
    child = os.fork()
    if child:
        return child
    Publisher(config, plan, number).call_until(end)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_main())
