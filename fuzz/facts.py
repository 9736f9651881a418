"""The facts: what callers and bodies have written down in a life, beside its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chaos.story import Line, Story
from fuzz.canvas import before, headers, left_open
from fuzz.options import KEYS, Locks, Spec, locks_of
from fuzz.plan import PLAIN, Life, Part
from tests.lab.ledger import Ledger, Run


@dataclass(frozen=True, eq=False)
class Body:
    """One run of a body, and what it was given."""

    run: Run
    task: str
    limits: dict[str, int]
    rates: dict[str, tuple[int, float]]
    items: tuple[str, ...]
    """The names of the calls that it runs for; the last one has its arguments."""
    fence: int | None
    is_unlocked: bool
    """Whether it runs without its locks."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """A call that was not refused: its part of the plan, and what its caller noted."""

    part: Part
    task_id: str
    deploy: int
    is_alone: bool
    """Whether it is no part of a canvas."""
    asked_at: float
    returned_at: float
    is_duplicate: bool
    before: tuple[str, ...]
    """The ids of the parts of the canvas that come before it."""
    is_left_open: bool = False
    """Whether Celery leaves it open where one of those fails."""
    header: tuple[str, ...] = ()
    """If it is the body of a chord: the ids of the parts of which one sends it."""

    @property
    def is_plain(self) -> bool:
        """Whether it may be merged, or answered with another job: nothing depends on its own id."""
        return self.is_alone and "task_id" not in self.part.options

    @property
    def is_merged(self) -> bool:
        """Whether it is merged into a message that waits, or is that message, if its task merges calls."""
        return self.is_plain and "lock_scope" not in self.part.options

    def is_surely_before(self, other: Accepted) -> bool:
        """Whether this caller had its answer before the other one called."""
        return self.returned_at <= other.asked_at


def _all_locks(spec: Spec) -> set[str]:
    """All locks that runs of a task may have."""
    return {name for key in KEYS for other in KEYS for name in locks_of(spec, key, other).limits}


class Facts:
    """Read once; all that the oracle may ask."""

    def __init__(self, life: Life, ledger: Ledger) -> None:
        self.life = life
        self.story = Story(ledger)
        self.parts = {part.name: part for calls in life.callers for call in calls for part in call.parts}
        self._planned = {call.parts[0].name: call for calls in life.callers for call in calls}
        self.bodies = sorted(self._bodies(), key=lambda body: body.run.start)
        self.calls = [one for line in self.story.events("call") if "error" not in line for one in self._accepted(line)]
        self.jobs = {call.task_id: call for call in self.calls if not call.is_duplicate}
        self.final = {line["task_id"]: line for line in self.story.events("final")}

    def _bodies(self) -> list[Body]:
        bodies = []
        for line in self.story.events("body"):
            runs = [run for run in self.story.runs_of(line["task_id"]) if run.pid == line["pid"]]
            run = max((run for run in runs if run.start <= line["at"]), key=lambda run: run.start)
            rates = {name: (number, seconds) for name, (number, seconds) in line["rates"].items()}
            given = (tuple(line["items"]), line["fence"], line.get("unlocked", False))
            bodies.append(Body(run, line["task"], line["limits"], rates, *given))
        return bodies

    def _accepted(self, line: Line) -> list[Accepted]:
        times, ids = (line["asked_at"], line["returned_at"]), line["ids"]
        deploy, is_duplicate, call = line["deploy"], bool(line.get("duplicate")), self._planned[line["names"][0]]
        accepted = []
        for number, parts in sorted(before(call.shape).items()):
            above = tuple(ids[part] for part in parts)
            header = tuple(ids[part] for part in headers(call.shape).get(number, ()))
            told = (call.parts[number], ids[number], deploy, call.is_alone, *times, is_duplicate, above)
            accepted.append(Accepted(*told, is_left_open=number in left_open(call.shape), header=header))
        return accepted

    def specs(self, task: str) -> list[Spec]:
        """A task as each version of the app has it."""
        return [spec for deploy in self.life.deploys for spec in deploy if spec.name == task]

    def options(self, call: Accepted, name: str) -> set[Any]:
        """The values of an option that may be in force for a call: its own, or those of each version."""
        if name in call.part.options:
            return {call.part.options[name]}
        return {spec.option(name) for spec in self.specs(call.part.task)}

    def policies(self, call: Accepted) -> set[str]:
        """The policies that may be in force for a call."""
        given = call.part.options.get("lock_on_conflict")
        return {given} if given else {spec.policy for spec in self.specs(call.part.task)}

    def locks(self, call: Accepted) -> list[Locks]:
        """What the run of a call locks, in each version."""
        return [locks_of(spec, call.part.key, call.part.other) for spec in self.specs(call.part.task)]

    def lock_names(self, call: Accepted) -> set[str]:
        """The names of those locks."""
        return {name for locks in self.locks(call) for name in (*locks.limits, *locks.rates)}

    def has_its_own_slot(self, call: Accepted) -> bool:
        """Whether no other task may take the place in the queue of its locks."""
        for spec in (spec for deploy in self.life.deploys for spec in deploy if spec.name != call.part.task):
            own = {part.options.get("lock_scope") for part in self.parts.values() if part.task == spec.name}
            if {spec.option("lock_scope"), *own} & {"job", "queue"} and self.lock_names(call) & _all_locks(spec):
                return False
        return True

    def bodies_of(self, task_id: str) -> list[Body]:
        """The runs of one job."""
        return [body for body in self.bodies if body.run.task_id == task_id]

    def is_whole(self, body: Body) -> bool:
        """Whether the body came to an end by itself: it was not killed."""
        return (body.run.pid, body.run.start) in self._ended

    @cached_property
    def _ended(self) -> set[tuple[int, float]]:
        return {(line["pid"], line["start"]) for line in self.story.events("end")}

    @cached_property
    def revoked(self) -> set[str]:
        """The jobs that were revoked."""
        return {line["task_id"] for line in self.story.events("revoked")}

    def around(self, task_ids: tuple[str, ...]) -> list[Line]:
        """Every line that names one of these jobs, and the operations of the life."""
        operations = {"fault", "deploy", "purged", "scaled", "visit"}
        lines = [line for line in self.story.lines if line["event"] in operations or self._names(line) & {*task_ids}]
        return lines if task_ids else []

    def _names(self, line: Line) -> set[str]:
        return {line.get("task_id", ""), *line.get("ids", [])}

    def is_plain_task(self, task: str) -> bool:
        """Whether the task has no lock."""
        return task == PLAIN
