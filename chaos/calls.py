"""Merged calls: what the checker says of calls that are merged into a message, and of runs that newer calls replace.

- Each call is followed by a run to its end with its arguments or later ones; with ``"all"``, by one that was given it.
- Once a run has begun for a call, none begins for an older one, except with ``"all"``.
- A run is stopped only for a newer call, and then soon, and a message is superseded only by a newer one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos import missing
from chaos.excuses import STOPS
from chaos.faults import COLD, KILL_WORKER, RESTART, WARM
from chaos.load import MERGING
from chaos.story import Line, Story
from chaos.windows import ACK, AT_ONCE, NEVER, RECOVERED, STOPPED
from promises import Excuse, Promise
from tests.lab.ledger import Run

Broken = tuple[Promise, str, list[Line]]
CALLS, MERGED = "calls that may be merged", "of them, merged into a message that waited"
REPLACED, SUPERSEDED = "runs that newer calls replaced", "messages that newer ones superseded"


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was accepted. Calls are made one after the other."""

    kind: str
    key: str
    name: str
    task_id: str
    """That of the message that it was merged into, or of its own."""
    asked_at: float
    returned_at: float
    is_merged: bool
    is_unasked: bool
    """Its publisher could not ask the lock server, and sent it alone."""


@dataclass(frozen=True, eq=False)
class Body:
    """A run, and whose arguments it was given: those of several calls with ``"all"``."""

    run: Run
    kind: str
    calls: tuple[Call, ...]
    is_whole: bool
    """Whether it came to its end by itself."""
    is_replaced: bool

    @property
    def last(self) -> Call:
        """The call whose arguments the body has."""
        return self.calls[-1]


@dataclass
class Calls:
    """What came of the calls: counts by name, and each broken promise with the lines that show it."""

    counts: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)


def check_calls(story: Story) -> Calls:
    """Hold a story against what is promised to calls that may be merged."""
    found, calls, bodies = Calls(), _calls(story), defaultdict[str, list[Body]](list)
    for body in _bodies(story, {call.name: call for call in calls}):
        bodies[body.run.key].append(body)
    found.counts[CALLS], found.counts[MERGED] = len(calls), sum(call.is_merged for call in calls)
    found.counts[REPLACED] = sum(body.is_replaced for of_key in bodies.values() for body in of_key)
    for call in calls:
        _look_for_its_run(story, found, call, bodies[call.key])
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    for key, of_key in bodies.items():
        _look_for_older_ones(story, found, of_key)
        for body in of_key:
            _look_at_its_end(story, found, body, by_key[key])
    _look_at_outcomes(story, found, {call.task_id: call.key for call in calls})
    return found


def _calls(story: Story) -> list[Call]:
    named = ("kind", "key", "name", "task_id", "asked_at", "returned_at")
    facts = [({name: line[name] for name in named}, line) for line in story.events("call")]
    return [Call(**told, is_merged=line["merged"], is_unasked=line["unasked"]) for told, line in facts]


def _bodies(story: Story, calls: dict[str, Call]) -> Iterator[Body]:
    """The bodies, in the order of their start."""
    given = [(_run_of(story, line), line) for line in story.events("given")]
    for run, line in sorted(given, key=lambda one: one[0].start):
        ends = [done for done in story.done_in(run) if done["at"] >= line["at"]]
        replaced = any(done.get("replaced") for done in ends)
        told = tuple(calls[name] for name in line["calls"] if name in calls)
        if told:
            yield Body(run, told[-1].kind, told, bool(ends) and not replaced, replaced)


def _run_of(story: Story, line: Line) -> Run:
    runs = [run for run in story.runs_of(line["task_id"]) if run.pid == line["pid"] and run.start <= line["at"]]
    return max(runs, key=lambda run: run.start)


def _look_for_its_run(story: Story, found: Calls, call: Call, bodies: list[Body]) -> None:
    after = [body for body in bodies if body.run.start >= call.asked_at and body.is_whole]
    if any(call in body.calls for body in after):
        return
    if call.kind != "all" and any(body.last.asked_at > call.asked_at for body in after):
        return
    excuse = _of_lost(story, call)
    if excuse:
        found.excused[excuse] += 1
    else:
        what = f"a call of {call.key} was accepted, and no run to its end has its arguments"
        what += "" if call.kind == "all" else " or later ones"
        lines = [line for line in story.events("call") if line["name"] == call.name]
        found.broken.append((Promise.LATEST, what, [*lines, *story.about(call.task_id)]))


def _of_lost(story: Story, call: Call) -> Excuse | None:
    """Why a call was lost: with the message that it was merged into, or with one that replaced or superseded that."""
    seen, task_id = set[str](), call.task_id
    while task_id and task_id not in seen:
        seen.add(task_id)
        if story.final.get(task_id) not in {"SUCCESS", "REVOKED"} and task_id in story.sent:
            return missing.of_missing(story, task_id)
        task_id = _newer(story, task_id)
    runs = [run for run in story.runs_of(call.task_id) if run.start >= call.asked_at and story.is_done(run)]
    starts = [run.start for run in runs]  # until then, a run whose process dies is followed by one that asks again
    is_lost = call.is_merged and story.strikes((RESTART,), call.asked_at, min(starts, default=NEVER))
    return Excuse.DATA_LOST if is_lost else None


def _newer(story: Story, task_id: str) -> str:
    """The message or run that has replaced or superseded a message; empty where none has."""
    result = story.results.get(task_id, "")
    before, _, newer = result.rpartition(" by ")
    return newer if before.endswith(("replaced", "superseded")) else ""


def _look_for_older_ones(story: Story, found: Calls, bodies: list[Body]) -> None:
    """Runs that began with older arguments than one before them. A call that was sent alone may be overtaken."""
    newest: Body | None = None
    for body in bodies:
        if body.kind == "all" or body.last.is_unasked:
            continue
        if newest is None or newest.last.asked_at <= body.last.asked_at:
            newest = body
        elif story.strikes((RESTART,), body.last.asked_at, body.run.start):
            found.excused[Excuse.DATA_LOST] += 1
        elif _stood_still_before(story, body.run):
            found.excused[Excuse.STOOD_STILL_BEFORE_ITS_BODY] += 1
        else:
            about = [*story.about(newest.run.task_id), *story.about(body.run.task_id)]
            what = f"a run of {body.run.key} began with older arguments than one before it"
            found.broken.append((Promise.NOT_STALE, what, about))


def _stood_still_before(story: Story, run: Run) -> bool:
    stops = story.strikes(STOPS, run.start - AT_ONCE, run.start, run.pid)
    return any(stop["until"] + AT_ONCE >= run.start for stop in stops)


def _look_at_its_end(story: Story, found: Calls, body: Body, calls: list[Call]) -> None:
    """A body of kind `newest` is stopped for a newer call, and for nothing else. No other body is stopped."""
    run = body.run
    own = body.last.asked_at
    newer = (
        [call for call in calls if call.asked_at > own and call.asked_at <= run.end] if body.kind == "newest" else []
    )
    if body.is_replaced and not newer:
        what = f"a run of {run.key} was replaced, and there was no newer call"
        found.broken.append((Promise.REPLACED, what, story.about(run.task_id)))
    elif not body.is_whole and not body.is_replaced and _ended_by_itself(story, run):
        what = f"a run of {run.key} was stopped, and not for a newer call"
        found.broken.append((Promise.REPLACED, what, story.about(run.task_id)))
    # A run of a call that was sent alone may begin after that of a newer call has ended, which asks no other to stop.
    waits = [one for one in newer if not one.is_unasked and not (body.last.is_unasked and _is_over(story, one, run))]
    # Nor does a call that was lost with the server's data before the run began.
    waits = [one for one in waits if not story.strikes((RESTART,), one.asked_at, run.start)]
    asked = [max(call.returned_at, run.start) for call in waits]
    if asked and run.end - min(asked) > STOPPED and _is_calm(story, min(asked), run.end):
        what = f"a run of {run.key} went on for {run.end - min(asked):.1f} s after a newer call"
        found.broken.append((Promise.REPLACED, what, story.about(run.task_id)))


def _is_over(story: Story, call: Call, run: Run) -> bool:
    runs = [one for one in story.runs_of(call.task_id) if one.start >= call.asked_at]
    return any(story.is_done(one) and one.end <= run.start for one in runs)


def _ended_by_itself(story: Story, run: Run) -> bool:
    """Whether a body ended in a process that lives on: the body of one that is shut down may be stopped too."""
    is_dead = story.deaths.get(run.pid, NEVER) <= run.end + ACK
    return (
        run.end < NEVER and not is_dead and not story.strikes((COLD, WARM, KILL_WORKER), run.start, run.end + AT_ONCE)
    )


def _is_calm(story: Story, start: float, end: float) -> bool:
    return not any(fault["from"] <= end and fault["until"] + RECOVERED >= start for fault in story.events("fault"))


def _look_at_outcomes(story: Story, found: Calls, keys: dict[str, str]) -> None:
    for task_id, state in story.final.items():
        kind = story.sent.get(task_id, {}).get("kind")
        if kind not in MERGING or state != "REVOKED":
            continue
        newer = _newer(story, task_id)
        is_own_key = task_id in keys and keys.get(newer) == keys[task_id]
        is_allowed = "superseded" in story.results[task_id] if kind == "latest" else kind == "newest"
        if is_own_key and newer != task_id and is_allowed:
            found.counts[SUPERSEDED] += "superseded" in story.results[task_id]
            continue
        what = f"a message of kind {kind} ended as REVOKED: {story.results[task_id]}"
        found.broken.append((Promise.POLICY, what, story.about(task_id)))
