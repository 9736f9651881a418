"""The locked tasks of the twins: one for each set of options. Its name tells them, as in ``run.skip.cooldown``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from celery_redislock.options import CONFLICT_POLICIES

#: The task without a lock.
PLAIN = "plain"
COOLDOWN, PATIENCE = 0.2, 0.15
LIMIT = 2
EXTRAS: dict[str, dict[str, Any]] = {
    "cooldown": {"lock_cooldown": COOLDOWN},
    "hold": {"lock_hold_on_retry": True},
    "late": {"acks_late": True},
    "patience": {"lock_wait_for": PATIENCE},
    "own": {"lock_key": None, "lock_args": ["key"]},
    "two": {"lock_limit": LIMIT, "lock_key": "two:{key}"},
}
#: Extras that do not go with a limit, as no scope but ``run`` does.
_NOT_WITH_TWO = {"cooldown", "own"}


def _sets() -> Iterator[tuple[str, dict[str, Any]]]:
    policies = [policy for policy in CONFLICT_POLICIES if policy != "replace"]  # a run that is stopped has no twin
    for scope, policy, number in product(("run", "job", "queue"), policies, range(3)):
        for extras in combinations(EXTRAS, number):
            if "two" in extras and (scope != "run" or _NOT_WITH_TWO & set(extras)):
                continue
            if scope == "queue" and policy != "wait":
                continue
            options = {"lock_key": "{key}", "lock_scope": scope, "lock_on_conflict": policy}
            for extra in extras:
                options |= EXTRAS[extra]
            yield ".".join((scope, policy, *extras)), options


#: The options of each task, by its name. All with one limit share their keys, but for those with a key of their own.
TASKS = dict(_sets())


def lock_of(task: str, key: str) -> str | None:
    """What tells the lock of a task from all others; None for the task without one."""
    if task == PLAIN:
        return None
    template = TASKS[task]["lock_key"]
    return str(template.format(key=key)) if template else f"{task}:{key}"
