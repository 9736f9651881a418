"""The tasks of a life: one body, which does what its message says and writes down what it was given."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_redislock import LockedTask
from chaos.tasks import Lingering
from fuzz.options import Locks, Spec, decorated, locks_of
from tests.lab.ledger import Ledger

#: A body works in steps of so many seconds.
STEP = 0.05
#: Seconds for which a task that lingers keeps its key although its result is stored.
LINGERS = 0.1
#: Seconds before a retry.
PAUSE = 0.2
#: The settings that tell an app which version it is.
SPECS, DEPLOY = "fuzz_specs", "fuzz_deploy"


def define_tasks(app: Celery) -> None:
    """Define the tasks of which the app's settings tell."""
    for told in app.conf[SPECS]:
        spec = Spec(**told)
        late = {"acks_late": True, "reject_on_worker_lost": True} if spec.is_late else {}
        locked: dict[str, Any] = {"base": Task}
        if spec.options is not None:
            base = {"base": Lingering, "lingers": LINGERS} if spec.lingers else {"base": LockedTask}
            locked = {**base, **decorated(spec.options)}
        common: dict[str, Any] = {"bind": True, "shared": False, "max_retries": None, "throws": (ValueError,)}
        define: Any = app.task(name=f"fuzz.{spec.name}", **{**common, **late, **locked})
        define(_body_of(spec))


def _body_of(spec: Spec) -> Any:
    def body(
        self: Any, key: str, other: str, item: str = "", does: str = "returns", seconds: float = 0.0, times: int = 0
    ) -> str:
        ledger, request = Ledger(Path(self.app.conf.lab_ledger)), self.request
        who = {"task_id": request.id, "pid": os.getpid()}
        with ledger.run(request.id, f"{request.id}/{request.retries}"):
            ledger.write({"event": "body", **who, "at": time.monotonic(), **_facts(self, spec, key, other, item)})
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(STEP)
            ledger.write({"event": "done", **who, "at": time.monotonic()})
        if request.retries < times:
            raise self.retry(countdown=PAUSE)
        if does == "fails":
            raise ValueError(item)
        return item

    return body


def _facts(task: Any, spec: Spec, key: str, other: str, item: str) -> dict[str, Any]:
    """What a run was given, and what it should hold: nothing if it runs without its locks."""
    locks = locks_of(spec, key, other)
    is_unlocked = bool(locks.limits) and task.lock.state == "none"  # nothing is held of a rate alone
    locks = Locks() if is_unlocked else locks
    calls = task.lock.calls if spec.option("lock_arguments") == "all" else []
    return {
        "task": spec.name,
        "deploy": task.app.conf[DEPLOY],
        "limits": locks.limits,
        "rates": locks.rates,
        "unlocked": is_unlocked,
        "item": item,
        "items": [kwargs["item"] for _, kwargs in calls] or [item],
        "fence": task.lock.fence if spec.option("lock_fence") else None,
    }
