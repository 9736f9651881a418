"""The verdict: each leaf of the locked side ended as a policy says, with evidence, or as its plain twin."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from celery import states

from tests.twins.options import LIMIT, lock_of
from tests.twins.plan import SOON, Leaf, Plan, kinds_of, leaves, leaves_of, random_plan, shown
from tests.twins.play import Ending, Record, Side
from tests.twins.shrink import shrunk
from tests.twins.stage import Stage

#: Seconds after which no key may be left.
FREE = 3.0
#: Seconds in which a smaller plan is looked for.
SHRINKING = 60.0


def failure(stage: Stage, seed: int) -> str | None:
    """Play the plan of a seed; where something is wrong, tell what, with the smallest plan that fails as well."""
    plan, numbers = random_plan(seed), itertools.count()
    problems = differences(stage, plan, f"{seed}-{next(numbers)}")
    if not problems:
        return None
    last = {plan: problems}

    def fails(candidate: Plan) -> bool:
        found = differences(stage, candidate, f"{seed}-{next(numbers)}")
        if found:
            last[candidate] = found
        return bool(found)

    smallest = shrunk(plan, fails, SHRINKING)
    told = [f"seed {seed}: {'; '.join(problems)}", f"the smallest that fails: {shown(smallest)}", *last[smallest]]
    return "\n".join(told)


def differences(stage: Stage, plan: Plan, name: str) -> list[str]:
    """Play the plan with locks, then with the endings of its policies as a plain twin, and tell what is wrong."""
    locked = Side(stage, plan, f"{name}.locked").play()
    kept = stage.kept(FREE)
    evidence = Evidence(plan, locked)
    twin = Side(stage, plan, f"{name}.plain", evidence.endings).play()
    problems = [*locked.problems, *evidence.problems, *overlaps(locked), *(f"left: {key}" for key in kept)]
    return problems + [f"the plain twin: {problem}" for problem in twin.problems] + list(compare(plan, evidence, twin))


class Evidence:
    """Which leaves have been ended by a policy, and whether it was right to do so.

    Args:
        plan: What was played.
        record: What became of it, with locks.
    """

    def __init__(self, plan: Plan, record: Record) -> None:
        self.endings: dict[str, Ending] = {}
        self.problems: list[str] = []
        self.record = record
        self._leaves = {leaf.name: leaf for leaf in leaves(plan)}
        for leaf in self._leaves.values():
            if leaf.name not in record.runs or leaf.name in record.duplicates:
                self._look_at(leaf)

    def _look_at(self, leaf: Leaf) -> None:
        met, name = self.record.met.get(leaf.name, []), leaf.name
        if name in self.record.duplicates:
            self.endings[name] = Ending("not sent")
            self._answered(leaf, self.record.duplicates[name])
            return
        state, value = self.record.outcomes.get(self.record.ids.get(name, ""), ("", None))
        if state == states.REVOKED and leaf.expires == SOON and "duplicate of" not in str(value):
            self.endings[name] = Ending("expired")
        elif met:
            self._dropped(leaf, met, state, value)

    def _answered(self, leaf: Leaf, other: str) -> None:
        """A publish that was answered with another task's id."""
        if leaf.links or leaf.errbacks:
            self.problems.append(f"{leaf.name} was answered with {other}, though others are to follow it")
        if not any(one.task == leaf.task for one in self._holders(leaf, other)):
            self.problems.append(f"{leaf.name} was answered with {other}, which is no equal job")
        if other in self.record.known.get(leaf.name, ()) and "cooldown" not in leaf.task:
            self.problems.append(f"{leaf.name} was answered with {other}, which its caller knew to have ended")

    def _dropped(self, leaf: Leaf, met: list[dict[str, Any]], state: str, value: Any) -> None:
        """A leaf that met a held key and never ran."""
        first, policy = met[0], met[-1]["policy"]
        joins = [line for line in met if line["policy"] == "join"]
        is_refusal = state == states.FAILURE and type(value).__name__ == "LockConflict"
        if policy == "skip" and state == states.REVOKED:
            self.endings[leaf.name] = Ending("skipped")
            if not any(str(holder) in str(value) for holder, _ in met[-1]["holders"]):
                self.problems.append(f"{leaf.name} was skipped: {value}, not one of {met[-1]['holders']}")
        elif is_refusal and (policy == "raise" or "patience" in leaf.task):
            self.endings[leaf.name] = Ending("raises")
        elif joins:
            self._joined(leaf, joins[0], state, value)
        else:
            self.problems.append(f"{leaf.name} never ran: it is {state}: {value!r}; it met {met}")
            return
        if policy in {"skip", "raise", "join"}:
            self._is_right(leaf, joins[0] if joins else met[-1] if policy != "join" else first)

    def _joined(self, leaf: Leaf, line: dict[str, Any], state: str, value: Any) -> None:
        other = next((holder for holder, _ in line["holders"] if holder), None)
        outcome = self.record.outcomes.get(str(other), ("unknown", None))
        how = {states.SUCCESS: "returns", states.FAILURE: "raises", states.REVOKED: "skipped"}.get(state)
        if how is None or outcome[0] != state or (how != "skipped" and repr(outcome[1]) != repr(value)):
            self.problems.append(f"{leaf.name} joined {other}, {outcome}, and is {state}: {value!r}")
        self.endings[leaf.name] = Ending(how or "raises", value if how == "returns" else None)

    def _is_right(self, leaf: Leaf, line: dict[str, Any]) -> None:
        """Whether a policy may drop this message because of those who held its key."""
        where = f"{leaf.name} met its policy {line['policy']}"
        if line["retries"]:
            self.problems.append(f"{where} as a retry")
        if len(line["holders"]) != (LIMIT if "two" in leaf.task else 1):
            self.problems.append(f"{where} where {len(line['holders'])} held its key")
        for holder, state in line["holders"]:
            if holder in line["causes"]:
                self.problems.append(f"{where} because of {holder}, which caused it")
            if holder in self.record.known.get(leaf.name, ()) and state != "cooling":
                self.problems.append(f"{where} because of {holder}, which its caller knew to have ended")
            if not self._holders(leaf, holder):
                self.problems.append(f"{where} because of {holder}, which has another key")

    def _holders(self, leaf: Leaf, task_id: str) -> list[Leaf]:
        """The leaves that have this id and the same key."""
        names = [name for name, known in self.record.ids.items() if known == task_id]
        ours = lock_of(leaf.task, leaf.key)
        return [one for name in names if lock_of((one := self._leaves[name]).task, one.key) == ours is not None]


def overlaps(record: Record) -> Iterator[str]:
    """Keys that more held at once than may."""
    for key in {run.key for run in record.bodies} - {"None"}:
        runs = [run for run in record.bodies if run.key == key]
        steps = sorted([(run.start, 1) for run in runs] + [(run.end, -1) for run in runs])
        most = max(accumulate(step for _, step in steps))
        if most > (LIMIT if key.startswith("two:") else 1):
            yield f"{most} held {key} at once"


def compare(plan: Plan, evidence: Evidence, twin: Record) -> Iterator[str]:
    """What is different in the twin, though no policy says so."""
    locked, endings = evidence.record, evidence.endings
    is_revoked = any(ending.how in {"skipped", "expired"} for ending in endings.values())
    tangled, doubled = set(_tangled(plan)), set(_doubled(plan, twin))
    for name in (leaf.name for leaf in leaves(plan) if leaf.name not in doubled):
        ours, theirs = (_runs(record, name, of_whom=name not in tangled) for record in (locked, twin))
        if ours != theirs:
            yield f"{name} ran {ours}, its twin {theirs}"
        if name in locked.ids and name in twin.ids and name not in locked.duplicates:
            ours, theirs = (_end(record, name, merges=is_revoked) for record in (locked, twin))
            if ours != theirs:
                yield f"{name} is {ours}, its twin {theirs}"


def _tangled(plan: Plan) -> Iterator[str]:
    """Leaves of canvases that have a chord: the parent of its body is the part that ends last, whichever that is."""
    for call in (call for caller in plan.callers for call in caller):
        if any(kind != "chain" for kind in kinds_of(call.tree)):
            yield from (leaf.name for leaf in leaves_of(call.tree))


def _doubled(plan: Plan, twin: Record) -> Iterator[str]:
    """Leaves of calls of which Celery itself sends parts twice, as what follows a chord whose body is a group."""
    for call in (call for caller in plan.callers for call in caller):
        names = [leaf.name for leaf in leaves_of(call.tree)]
        attempts = [[line["retries"] for line in twin.runs.get(name, [])] for name in names]
        if any(len(set(one)) < len(one) for one in attempts):
            yield from names


def _runs(record: Record, name: str, *, of_whom: bool) -> list[Any]:
    """What the bodies of a leaf saw, in the order of its attempts."""
    ids = ("parent_id", "root_id") if of_whom else ()
    seen = [
        (line["retries"], line["got"], line["stamps"], *(record.name_of(line[of]) for of in ids))
        for line in record.runs.get(name, [])
    ]
    return sorted(seen, key=lambda one: one[0])


def _end(record: Record, name: str, *, merges: bool) -> Any:
    """The end of a leaf: its state, and its result where it has one. What follows a skipped leaf is REVOKED as that."""
    state, value = record.outcomes[record.ids[name]]
    if state not in states.READY_STATES:
        return "open"
    if merges and state == states.REVOKED:
        state = states.FAILURE
    return (state, value) if state == states.SUCCESS else state
