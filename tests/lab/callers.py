"""Contending callers: processes that call tasks of one key in a loop, and write down what they asked for and were told.

``python -m tests.lab.callers PLAN`` ends when they have ended. `tests.lab.observer` reads what they wrote.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery import Celery, uuid
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.signals import before_task_publish

from tests.lab import nursery
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger
from tests.lab.results import look_once_more

#: How a call differs from a plain one. A countdown keeps a job outstanding for longer than its body does.
WAYS = ("plain", "retry", "failure", "countdown", "expiry", "revoke")
#: What stands in line or holds the key besides, and is no bare job: a message with an id of its own, and a `Lock`.
OTHERS = ("named", "lock")
COUNTDOWN = 0.05
#: Seconds after which a caller takes a result for lost.
PATIENCE = 15.0


@dataclass(frozen=True)
class Plan:
    """What the callers do."""

    task: str
    seconds: float
    ways: Sequence[str] = ("plain",)
    key: str = "k"
    callers: int = 8
    waiting: float = 0.6
    """How many of the calls wait for their result before the next one."""
    in_a_loop: bool = False
    """They call inside a running event loop."""
    seed: int = 1


def contend(config: Config, plan: Plan) -> None:
    """Have the callers of a plan call, and wait for their end."""
    env = {**os.environ, "LAB_CONFIG": config.dump()}
    done = nursery.run("tests.lab.callers", json.dumps(asdict(plan)), env=env, timeout=plan.seconds + 60)
    assert done.returncode == 0, done.stderr


class Caller:
    """One caller, with an app of its own."""

    def __init__(self, app: Celery, ledger: Ledger, plan: Plan, number: int) -> None:
        self.app = app
        self.task: Any = app.tasks[f"lab.{plan.task}"]
        self.ledger, self.plan, self.number = ledger, plan, number
        self.rng = random.Random(f"{plan.seed}-{number}")
        self.sent_at: float | None = None
        before_task_publish.connect(self._sends)

    def call_until(self, end: float) -> None:
        """Call again and again."""
        while time.monotonic() < end:
            self._call(self.rng.choice(self.plan.ways))

    async def call_in_a_loop_until(self, end: float) -> None:
        """The same inside a running event loop, which each call blocks."""
        self.call_until(end)

    def _sends(self, **_: object) -> None:
        self.sent_at = time.monotonic()

    def _call(self, way: str) -> None:
        if way == "named":
            other = self.task.apply_async((self.plan.key, way), task_id=uuid())
            self.ledger.write({"event": "named", "id": other.id})
            return
        if way == "lock":
            with self.task.lock_for(self.plan.key):
                time.sleep(self.rng.uniform(0.0, 0.01))
            return
        how = way if way in {"retry", "failure"} else ""
        options: dict[str, Any] = {"countdown": COUNTDOWN} if way in {"countdown", "expiry", "revoke"} else {}
        if way == "expiry":
            options["expires"] = COUNTDOWN / 2
        self.sent_at, asked_at = None, time.monotonic()
        result = self.task.apply_async((self.plan.key, way, self.rng.uniform(0.0, 0.03), how), **options)
        returned_at = time.monotonic()
        call = {"event": "call", "caller": self.number, "id": result.id, "way": way, "asked_at": asked_at}
        expires_at = asked_at + options["expires"] if "expires" in options else None
        self.ledger.write({**call, "sent_at": self.sent_at, "returned_at": returned_at, "expires_at": expires_at})
        if way == "revoke" and not result.duplicate:
            self.ledger.write({"event": "revoke", "id": result.id, "at": time.monotonic()})
            self.app.control.revoke(result.id)
        if self.rng.random() < self.plan.waiting:
            self._see_the_end(result)

    def _see_the_end(self, result: Any) -> None:
        try:
            result.get(timeout=PATIENCE, propagate=False)
        except CeleryTimeoutError:
            self.ledger.write({"event": "unseen", "caller": self.number, "id": result.id})
        else:
            self.ledger.write({"event": "seen", "caller": self.number, "id": result.id, "at": time.monotonic()})


def _main() -> None:
    look_once_more()
    plan, config = Plan(**json.loads(sys.argv[1])), Config.from_env()
    children = [_fork(config, plan, number) for number in range(plan.callers)]
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


def _fork(config: Config, plan: Plan, number: int) -> int:
    """A caller in a process that has imported what it needs already."""
    child = os.fork()
    if child:
        return child
    caller = Caller(make_app(config), Ledger(Path(config.ledger)), plan, number)
    end = time.monotonic() + plan.seconds
    if plan.in_a_loop:
        asyncio.run(caller.call_in_a_loop_until(end))
    else:
        caller.call_until(end)
    sys.stdout.flush()
    sys.exit(0)


if __name__ == "__main__":
    _main()
