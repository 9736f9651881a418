"""The tasks of the twins: one body, which does what its message says, under each set of options and under none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore
from celery.signals import task_retry

from celery_redislock import LockedTask, LockInfo
from celery_redislock.signals import lock_conflict
from tests.lab.ledger import Ledger
from tests.twins.options import PLAIN, TASKS, lock_of

#: Seconds before a retry.
PAUSE = 0.05


class Lingering(LockedTask):
    """Keeps its key for a while although its result is stored, where its message says so."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        time.sleep(kwargs["node"]["lingers"])


def define_tasks(app: Celery) -> None:
    """Define ``twins.plain`` and a task for each set of options."""
    common = {
        "bind": True,
        "shared": False,
        "max_retries": 2,
        "default_retry_delay": PAUSE,
        "autoretry_for": (OSError,),
    }
    for name, options in {PLAIN: {"base": Task}, **TASKS}.items():
        app.task(_body, name=f"twins.{name}", **{"base": Lingering, **common, **options})


def _body(self: Any, *got: Any, key: str, node: dict[str, Any]) -> Any:
    """Do what `node` says; the result tells what came from the tasks before."""
    if node["ending"]:
        return _end(*node["ending"])
    ledger, request = ledger_of(self.app, node["side"]), self.request
    with ledger.run(lock_of(self.name.removeprefix("twins."), key), node["name"]):
        seen = {name: getattr(request, name) for name in ("id", "parent_id", "root_id", "retries", "stamps")}
        ledger.write({"event": "node", "name": node["name"], "got": got, **seen})
        if request.retries:
            _wait_for_the_retry(ledger, node["name"], request.retries - 1)
        time.sleep(node["seconds"])
        if not request.retries:
            for call in node["calls"]:
                _call(self.app, ledger, call)
        if request.retries < node["times"]:
            if node["does"] == "retries":
                raise self.retry(countdown=PAUSE)
            raise OSError(node["name"])
        if node["does"] == "fails":
            raise ValueError(node["name"])
        if node["does"] == "ignores":
            raise Ignore(node["name"])
        if node["becomes"]:
            raise self.replace(self.app.signature(node["becomes"]))
    return [node["name"], *got]


def _wait_for_the_retry(ledger: Ledger, name: str, retries: int) -> None:
    """Wait until the state RETRY of an attempt is stored.

    Celery stores it after it has sent the next attempt, and over the end of that one if this is quicker.
    """
    end = time.monotonic() + 10
    while {"event": "retried", "name": name, "retries": retries} not in ledger.lines() and time.monotonic() < end:
        time.sleep(0.005)


def _end(how: str, value: Any) -> Any:
    """In the plain twin: end as the policy has ended the locked one, without a run."""
    if how == "returns":
        return value
    raise ValueError(f"as by the policy: {how}")


def _call(app: Celery, ledger: Ledger, call: dict[str, Any]) -> None:
    sent = app.signature(call).apply_async()
    line = {"name": call["kwargs"]["node"]["name"], "id": sent.id, "duplicate": getattr(sent, "duplicate", False)}
    ledger.write({"event": "called", **line})


def ledger_of(app: Celery, side: str) -> Ledger:
    """The ledger of one side of a pair of twins."""
    return Ledger(Path(app.conf.lab_ledger).parent / side)


def write_down_events() -> None:
    """In a worker: write down who has met whom, and by what policy; and which retries Celery has stored."""
    lock_conflict.connect(_write_down_a_conflict, weak=False)
    task_retry.connect(_write_down_a_retry, weak=False)


def _write_down_a_retry(sender: Any, request: Any, **_: object) -> None:
    node = request.kwargs["node"]
    line = {"event": "retried", "name": node["name"], "retries": request.retries}
    ledger_of(sender.app, node["side"]).write(line)


def _write_down_a_conflict(sender: Any, holder: LockInfo, policy: str, **_: object) -> None:
    if policy == "return existing":  # whoever publishes sees that itself
        return
    request = sender.request
    node = request.kwargs["node"]
    line = {
        "name": node["name"],
        "id": request.id,
        "policy": policy,
        "at": time.monotonic(),
        "retries": request.retries,
    }
    causes = [request.id, request.parent_id, request.root_id]
    holders = [[one.task_id, one.state] for one in holder.holders]
    ledger_of(sender.app, node["side"]).write({"event": "met", **line, "causes": causes, "holders": holders})
