"""Plans: the lives of random apps, as values that can be shown and played again."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from chaos.faults import (
    BLACKHOLE,
    COLD,
    CUT_BROKER,
    CUT_LOCKS,
    DROP,
    KILL_CHILD,
    KILL_WORKER,
    REFUSE,
    RESTART,
    SHRINK,
    STOP_CHILD,
    STOP_WORKER,
    WARM,
    Strike,
)
from fuzz.canvas import ALONE, SHAPES, Shape, before
from fuzz.options import KEYS, Spec, random_spec, refusal

DEPLOY, REVOKE, TERMINATE, PURGE = "deploy", "revoke", "revoke, terminating", "purge"
GROW, VISIT = "pool grown", "a further worker joins the queue and leaves it"
#: How often each operation is drawn. What loses data, or messages, is rare: it excuses much.
OPERATIONS = {
    KILL_CHILD: 4,
    KILL_WORKER: 3,
    STOP_WORKER: 1,
    STOP_CHILD: 1,
    COLD: 3,
    WARM: 4,
    RESTART: 1,
    CUT_LOCKS: 2,
    DROP: 2,
    REFUSE: 1,
    BLACKHOLE: 1,
    CUT_BROKER: 2,
    DEPLOY: 4,
    GROW: 1.5,
    SHRINK: 1.5,
    VISIT: 2,
    REVOKE: 2,
    TERMINATE: 2,
    PURGE: 0.5,
}
#: What may strike a further worker while it is there.
TO_VISITORS = (KILL_CHILD, KILL_WORKER, STOP_WORKER, STOP_CHILD, COLD, WARM)
#: Seconds in which the calls are made and the operations begin.
SECONDS = 12.0
CALLERS, POSTS = 4, 2
PLAIN = "plain"
#: What a body may take, in seconds. A task without a lock, or with a `lock_max_hold`, may take longer: shutdowns wait
#: for it, and its lock ends before it.
TAKES, LONG = (0.0, 0.05, 0.3, 1.0), 4.0


@dataclass(frozen=True)
class Part:
    """One call of a task, alone or as a part of a canvas."""

    name: str
    task: str
    key: str
    other: str
    does: str = "returns"
    """What the body does: or ``fails``, or first ``retries``."""
    seconds: float = 0.0
    times: int = 0
    """How often it retries."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `apply_async`; empty for `delay`."""


@dataclass(frozen=True)
class Call:
    """What a caller sends after a pause."""

    pause: float
    shape: Shape
    """A canvas of the parts, or ``ALONE``."""
    parts: tuple[Part, ...]
    waits: bool = False
    """Whether the caller waits for the end of a call alone before its next one."""

    @property
    def is_alone(self) -> bool:
        """Whether it is no canvas."""
        return bool(self.shape == ALONE)


@dataclass(frozen=True)
class Operation:
    """What is done to the app: an operation of this module, or a fault of the chaos run, after a pause."""

    name: str
    strike: Strike


@dataclass(frozen=True)
class Life:
    """The life of one app."""

    seed: str
    deploys: tuple[tuple[Spec, ...], ...]
    """The tasks of each version of the app."""
    callers: tuple[tuple[Call, ...], ...]
    operations: tuple[Operation, ...]
    settings: dict[str, Any]
    """Of the workers."""

    def shown(self) -> str:
        """The plan as JSON, a line for each part of it."""
        told = asdict(self)
        lines = [f"seed {self.seed}, settings {json.dumps(self.settings)}"]
        for number, deploy in enumerate(told["deploys"]):
            lines += [f"deploy {number}: {json.dumps(spec)}" for spec in deploy]
        for number, caller in enumerate(told["callers"]):
            lines += [f"caller {number}: {json.dumps(call)}" for call in caller]
        lines += [f"operation: {json.dumps(one)}" for one in told["operations"]]
        return "\n".join(lines)


def random_life(seed: object) -> Life:
    """The plan of this seed: always the same one."""
    return _Maker(random.Random(f"fuzz {seed}")).life(str(seed))


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._count = 0
        self._last: Part | None = None

    def life(self, seed: str) -> Life:
        chance = self._chance
        first = tuple(random_spec(f"t{number}", chance) for number in range(chance.randint(4, 6)))
        deploys = [(*first, Spec(PLAIN, None))]
        operations = self._operations()
        for _ in range(sum(one.name == DEPLOY for one in operations)):
            deploys.append(self._next(deploys[-1]))
        callers = tuple(self._caller(deploys[0]) for _ in range(CALLERS))
        settings: dict[str, Any] = {"worker_soft_shutdown_timeout": 2.0} if chance.random() < 0.3 else {}
        if chance.random() < 0.3:
            settings["worker_max_tasks_per_child"] = chance.choice([1, 5])
        return Life(seed, tuple(deploys), callers, operations, settings)

    def _operations(self) -> tuple[Operation, ...]:
        chance, at = self._chance, 0.0
        operations: list[Operation] = []
        while True:
            pause = chance.uniform(0.5, 4.0)
            at += pause
            if at > SECONDS:
                return tuple(operations)
            name = chance.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            strike = Strike(pause, name, chance.randrange(POSTS), chance.randrange(1 << 30))
            operations.append(Operation(name, strike))

    def _next(self, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """The next version: one or two tasks have other options."""
        changed = list(specs)
        for number in self._chance.sample(range(len(specs) - 1), self._chance.randint(1, 2)):
            changed[number] = self._changed(specs[number])
        return tuple(changed)

    def _changed(self, spec: Spec) -> Spec:
        """The task with one option changed, to what the package takes."""
        chance = self._chance
        while True:
            changes = {
                "lock_limit": chance.randint(1, 4),
                "lock_on_conflict": chance.choice(["skip", "wait", "raise", "join"]),
                "lock_cooldown": chance.choice([0.0, 0.5]),
                "lock_wait_for": chance.choice([None, 2.0]),
                "lock_hold_on_retry": chance.random() < 0.5,
            }
            name = chance.choice(list(changes))
            options = {**(spec.options or {}), name: changes[name]}
            if refusal(options) is None:
                return replace(spec, options=options)

    def _caller(self, specs: tuple[Spec, ...]) -> tuple[Call, ...]:
        chance, at = self._chance, 0.0
        calls: list[Call] = []
        while True:
            pause = chance.choice([0.0, 0.05, 0.4, chance.uniform(0.2, 2.0)])
            at += pause
            if at > SECONDS or len(calls) >= 16:
                return tuple(calls)
            calls.append(
                self._call(0.0 if self._last else pause, specs)
            )  # what is known to have ended is called at once

    def _call(self, pause: float, specs: tuple[Spec, ...]) -> Call:
        is_alone = self._chance.random() < 0.8
        shape = ALONE if is_alone else self._chance.choice(SHAPES)
        parts = tuple(self._part(specs, is_alone=is_alone) for _ in before(shape))
        call = Call(pause, shape, parts, waits=is_alone and self._chance.random() < 0.3)
        self._last = parts[0] if call.waits else None
        return call

    def _part(self, specs: tuple[Spec, ...], *, is_alone: bool) -> Part:
        chance = self._chance
        self._count += 1
        spec = chance.choice(specs[:-1]) if chance.random() < 0.92 else specs[-1]
        part = Part(f"n{self._count}", spec.name, chance.choice(KEYS[:2]), chance.choice(KEYS))
        if self._last and chance.random() < 0.7:  # the same key again, as soon as the end of the last call is known
            part = replace(part, task=self._last.task, key=self._last.key, other=self._last.other)
            spec = next(one for one in specs if one.name == part.task)
        if spec.options is None:
            return replace(part, seconds=chance.choice([0.3, 0.3, LONG]))
        part = replace(part, options=self._options(spec) if is_alone and chance.random() < 0.3 else {})
        hangs = spec.option("lock_max_hold") is not None
        if spec.has_all_arguments:  # equal calls
            return replace(part, seconds=LONG if hangs else 0.3)
        does = chance.choices(["returns", "fails", "retries"], [12, 1, 2])[0]
        times = chance.randint(1, 2) if does == "retries" else 0
        return replace(part, does=does, times=times, seconds=chance.choice((*TAKES, LONG) if hangs else TAKES))

    def _options(self, spec: Spec) -> dict[str, Any]:
        chance = self._chance
        name, value = chance.choice(
            [
                ("countdown", 0.5),
                ("countdown", 2.0),
                ("expires", 1.0),
                ("expires", 60.0),
                ("task_id", True),
                ("lock_on_conflict", chance.choice(["skip", "wait", "raise", "join"])),
                ("lock_wait_for", 2.0),
                ("lock_cooldown", 0.5),
                ("lock_scope", chance.choice(["run", "job", "queue"])),
            ]
        )
        return {name: value}
