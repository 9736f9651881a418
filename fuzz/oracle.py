"""The oracle: a rule for each promise. It knows the docs' tables, the plan, and what callers and bodies wrote down."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from celery import states

from chaos import excuses
from chaos.excuses import STOPS
from chaos.faults import FAULTS, RESTART
from chaos.story import Line
from chaos.windows import AT_ONCE, NEVER
from fuzz import endings
from fuzz.endings import AWAY
from fuzz.facts import Accepted, Body, Facts
from fuzz.options import WINDOW
from promises import Excuse, Promise
from tests.lab.ledger import Run

#: A process may go on to take the lock server for down for so many seconds: until its next check.
STILL_DOWN = 5.0 + AT_ONCE
#: Why a lock is lost, as the log says it, when its `lock_max_hold` is over.
GIVEN_UP = "held for longer than lock_max_hold"
#: Between the grant of a rate's permit and the first line of its body, on a busy machine.
LATE = 0.5


@dataclass(frozen=True)
class Violation:
    """A sentence of the docs that a life has broken."""

    promise: Promise
    what: str
    task_ids: tuple[str, ...] = ()


@dataclass
class Verdict:
    """What came of a life."""

    violations: list[Violation] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)


def judge(facts: Facts) -> Verdict:
    """Hold a life against each rule."""
    verdict = Verdict()
    for rule in RULES:
        verdict.violations += rule(facts, verdict.excused)
    return verdict


Excused = Counter[str]


def at_most_n(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """Runs with a limit of N take one of the permits 1 to N: of those with a limit up to N, at most N go on at once."""
    for lock in sorted({lock for body in facts.bodies for lock in body.limits}):
        going_on: list[Body] = []
        for body in (body for body in facts.bodies if lock in body.limits):
            going_on = [other for other in going_on if other.run.end > body.run.start]
            beside = [other for other in going_on if _is_beside(facts, other, body, excused)]
            limits = sorted(one.limits[lock] for one in (*beside, body))
            if any(limit < place for place, limit in enumerate(limits, start=1)):
                ids = tuple(one.run.task_id for one in (*beside, body))
                yield Violation(Promise.AT_MOST_N, f"{len(ids)} runs hold {lock}, with limits of {limits}", ids)
            going_on.append(body)


def _is_beside(facts: Facts, first: Body, second: Body, excused: Excused) -> bool:
    if first.run.noticed <= second.run.start:
        excused[Excuse.KNEW_OF_THE_LOSS] += 1
        return False
    excuse = excuses.of_overlap(facts.story, first.run, second.run)
    # A run past its lock_max_hold is no longer renewed, so it learns of a loss only at its deadline.
    if GIVEN_UP in _reasons(facts, first) and facts.story.strikes((RESTART,), first.run.start, second.run.start):
        excuse = excuse or Excuse.DATA_LOST
    if excuse:
        excused[excuse] += 1
    return excuse is None


def unlocked(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """A run has no lock only if its task asks for that, and only while the lock server is away."""
    for body in (body for body in facts.bodies if body.is_unlocked):
        if not _may_be_unlocked(facts, body):
            ids = (body.run.task_id,)
            yield Violation(Promise.AT_MOST_N, f"{body.run.task_id} of {body.task} runs without its lock", ids)


def _may_be_unlocked(facts: Facts, body: Body) -> bool:
    asks = "run" in {spec.option("lock_on_outage") for spec in facts.specs(body.task)}
    return asks and bool(facts.story.strikes(AWAY, body.run.start - STILL_DOWN, body.run.start))


def _reasons(facts: Facts, body: Body) -> set[str]:
    """Why a run was told that it has lost a lock, when it was first told."""
    return {line["reason"] for line in facts.story.events("lost") if line["at"] == body.run.noticed}


def given_up(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """A run gives its lock up and goes on only if its task has a `lock_max_hold`, and not before that is over."""
    for body in facts.bodies:
        allowed = {spec.option("lock_max_hold") for spec in facts.specs(body.task)} - {None}
        if GIVEN_UP in _reasons(facts, body) and body.run.noticed < body.run.start + min(allowed, default=NEVER):
            ids = (body.run.task_id,)
            yield Violation(Promise.AT_MOST_N, f"{body.run.task_id} of {body.task} gives its lock up too early", ids)


def rates(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """In any period of a rate, no more runs begin than it allows."""
    for lock in sorted({lock for body in facts.bodies for lock in body.rates}):
        begun = [body for body in facts.bodies if lock in body.rates]
        rate = {body.rates[lock] for body in begun}
        allowed, seconds = sum(number for number, _ in rate), min(seconds for _, seconds in rate)
        for place, (first, last) in enumerate(zip(begun, begun[allowed:], strict=False)):
            took = last.run.start - first.run.start
            if took >= seconds - LATE:
                continue
            if facts.story.strikes((RESTART,), first.run.start - AT_ONCE, last.run.start):
                excused[Excuse.DATA_LOST] += 1
            elif facts.story.strikes(STOPS, first.run.start - seconds, last.run.start):
                excused[Excuse.STOOD_STILL_BEFORE_ITS_BODY] += 1
            elif any(_may_be_unlocked(facts, body) for body in begun[place : place + allowed + 1]):
                excused[Excuse.UNREACHABLE] += 1
            else:
                what = f"{allowed + 1} runs of {lock} began in {took:.2f} s: {allowed} may in {seconds:g} s"
                yield Violation(Promise.RATE, what, (first.run.task_id, last.run.task_id))


def no_twins(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """No message runs while a copy of it runs, if it holds a lock meanwhile."""
    excused[Excuse.KNEW_OF_THE_LOSS] += len(facts.story.told_overlaps)
    for first, second in facts.story.overlaps:
        if not all(body.limits for body in facts.bodies_of(first.task_id)):
            continue
        excuse = excuses.of_overlap(facts.story, first, second)
        if excuse:
            excused[excuse] += 1
        elif _is_retry_of_one_that_went_on(facts, first, second):
            excused[Excuse.WENT_ON] += 1
        else:
            yield Violation(Promise.NO_TWINS, f"{first.task_id} runs twice at once", (first.task_id,))


def _is_retry_of_one_that_went_on(facts: Facts, first: Run, second: Run) -> bool:
    """Whether another run of the first one's attempt went on without its lock, and may have sent the second one."""
    others = [run for run in facts.story.runs if (run.task_id, run.item) == (first.task_id, first.item)]
    return first.item != second.item and any(run.noticed <= run.end <= second.start for run in others)


def not_again(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """No attempt that has finished runs again."""
    holding = {body.run.task_id for body in facts.bodies if body.limits}
    holding -= {body.run.task_id for body in facts.bodies if body.is_unlocked}  # nothing tells of such a run
    for (task_id, _), runs in facts.story.attempts.items():
        for number, run in enumerate(runs[1:] if task_id in holding else [], start=1):
            excuse = excuses.of_another_run(facts.story, runs[:number], run)
            if excuse:
                excused[excuse] += 1
            else:
                yield Violation(Promise.NOT_AGAIN, f"an attempt of {task_id} ran again", (task_id,))


def fences(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """Each holder of a lock has a greater fencing number than all before it."""
    last: dict[str, Body] = {}
    for body in facts.bodies:
        if body.fence is None:
            continue
        lock = next(iter(body.limits))
        before = last.get(lock)
        if before and before.fence is not None and before.fence >= body.fence:
            if facts.story.strikes((RESTART,), before.run.start - AT_ONCE, body.run.start):
                excused[Excuse.DATA_LOST] += 1
            elif not any(facts.story.strikes(STOPS, 0, body.run.start, one.run.pid) for one in (before, body)):
                ids = (before.run.task_id, body.run.task_id)
                yield Violation(Promise.FENCE, f"{lock}: {before.fence}, then {body.fence}", ids)
        last[lock] = body


def calls_answered(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """A call is sent, or answered with a job of its task that was sent; only options of its own may refuse it."""
    for line in facts.story.events("call"):
        error = line.get("error", "")
        own = [name for name in facts.parts[line["names"][0]].options if name.startswith("lock_")]
        if error and not (error.startswith("LockConfigError") and own) and not _is_away(facts, line):
            yield Violation(Promise.NO_ERRORS, f"a call raised {error}: {line['names']}")
    for call in facts.calls:
        if not call.is_duplicate:
            continue
        job = facts.jobs.get(call.task_id)
        scopes = facts.options(call, "lock_scope")
        if job is None or job.part.task != call.part.task or not facts.lock_names(job) & facts.lock_names(call):
            yield Violation(Promise.ANSWERED, f"{call.part.name} was answered with {call.task_id}", (call.task_id,))
        elif not call.is_plain or not scopes & {"job", "queue"}:
            yield Violation(Promise.POLICY, f"{call.part.name} was not sent, in scope {scopes}", (call.task_id,))


def _is_away(facts: Facts, line: Line) -> bool:
    """Whether the lock server was away, and the call fails because of it."""
    struck = facts.story.strikes((RESTART,), line["asked_at"] - AT_ONCE, line["returned_at"])
    return line["error"].startswith("LockUnavailable") and bool(struck)


def ends(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """Every job ends as its body or the table of its policy says."""
    for job in facts.jobs.values():
        final = facts.final.get(job.task_id)
        if final is None:
            continue
        if final["state"] in states.READY_STATES:
            wrong = endings.wrong(facts, job, final)
            if wrong:
                how = f"{job.part.name} of {job.part.task} is {final['state']}, {final['result']}: {wrong}"
                yield Violation(Promise.POLICY, how, (job.task_id,))
            continue
        excuse = endings.of_open(facts, job)
        if excuse:
            excused[excuse] += 1
        else:
            how = f"{job.part.name} of {job.part.task} never ends: it is {final['state']}"
            yield Violation(Promise.ENDS, how, (job.task_id,))


def latest(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """An accepted call is followed by a run with its arguments or later ones; with ``"all"``, by one that has it."""
    by_name = {call.part.name: call for call in facts.calls}
    for call in facts.calls:
        arguments = facts.options(call, "lock_arguments") - {None}
        if not arguments or not call.is_merged:
            continue
        after = [body for body in facts.bodies if body.run.start >= call.asked_at and body.task == call.part.task]
        whole = [body for body in after if facts.is_whole(body)]
        if any(call.part.name in body.items for body in whole):
            continue
        names = [body.items[-1] for body in whole if facts.lock_names(call) & body.limits.keys()]
        later = [by_name[name] for name in names if name in by_name]
        if arguments == {"latest"} and any(not one.is_surely_before(call) for one in later):
            continue
        excuse = endings.of_unserved(facts, call)
        if excuse:
            excused[excuse] += 1
        else:
            what = f"{call.part.name} of {call.part.task} was accepted, and no run has its arguments or later ones"
            yield Violation(Promise.LATEST, what, (call.task_id,))


def not_stale(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """No run begins with older arguments than one before it, if both are of merged calls of a task with ``latest``.

    A call is sent alone, and may be overtaken, while another task has the place in the queue.
    """
    by_name = {call.part.name: call for call in facts.calls}
    begun: dict[tuple[str, str], list[tuple[Accepted, Body]]] = {}
    for body in facts.bodies:
        call = by_name.get(body.items[-1])
        if call is None or not call.is_merged or facts.options(call, "lock_arguments") != {"latest"}:
            continue
        if not facts.has_its_own_slot(call):
            continue
        for lock in body.limits:
            before = begun.setdefault((body.task, lock), [])
            newer = [other for other, _ in before if call.is_surely_before(other)]
            if newer and facts.story.strikes((RESTART,), 0, body.run.start):
                excused[Excuse.DATA_LOST] += 1
            elif newer:
                ids = (body.run.task_id, newer[0].task_id)
                what = f"{call.part.name} begins after {newer[0].part.name}, which was called later"
                yield Violation(Promise.NOT_STALE, what, ids)
            before.append((call, body))


def one_job(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """While a job is queued, waits or runs, no second one is sent; and none within the window of its call.

    Only what nothing has disturbed is looked at: no fault has struck from the first call to the second.
    """
    for first, second in _pairs_of_jobs(facts):
        struck = facts.story.strikes(tuple(FAULTS), first.asked_at - AT_ONCE, second.returned_at)
        is_over = "expires" in first.part.options or first.task_id in facts.revoked
        if is_over or struck or not facts.has_its_own_slot(first):
            continue
        ids = (first.task_id, second.task_id)
        held_until = [min(body.run.end, body.run.noticed) for body in facts.bodies_of(first.task_id)]
        if any(until > second.returned_at for until in held_until):
            yield Violation(Promise.ONE_JOB, f"{second.part.name} was sent while {first.part.name} had not ended", ids)
        if None not in facts.options(first, "lock_window") and second.returned_at < first.asked_at + WINDOW:
            what = f"{second.part.name} was sent in the window of {first.part.name}"
            yield Violation(Promise.ONE_IN_WINDOW, what, ids)


def _pairs_of_jobs(facts: Facts) -> Iterator[tuple[Accepted, Accepted]]:
    """Jobs in scope ``job`` with one key, each with those that were surely called after it."""
    jobs = [job for job in facts.jobs.values() if job.is_merged and facts.options(job, "lock_scope") == {"job"}]
    for first, second in itertools.permutations(jobs, 2):
        is_same = first.part.task == second.part.task and facts.locks(first) == facts.locks(second)
        if is_same and first.is_surely_before(second):
            yield first, second


def served_anew(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """A caller that has seen a run end is not answered with that run, and not skipped because of it."""
    known: dict[str, float] = {}
    for line in facts.story.events("known"):
        known[line["task_id"]] = min(line["at"], known.get(line["task_id"], line["at"]))
    for call in facts.calls:
        text = str(facts.final.get(call.task_id, {}).get("result"))
        holder = call.task_id if call.is_duplicate else text.partition(": duplicate of ")[2]
        if known.get(holder, call.asked_at) >= call.asked_at or holder not in facts.jobs:
            continue
        kept = [option for one in (call, facts.jobs[holder]) for option in facts.options(one, "lock_cooldown") - {None}]
        kept += facts.options(call, "lock_window") - {None}
        if not any(kept) and len(facts.bodies_of(holder)) == 1:
            what = f"{call.part.name} was answered with {holder}, or skipped for it, which was known to have ended"
            yield Violation(Promise.SERVED_ANEW, what, (call.task_id, holder))


def replaced(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """A job that was stopped for a newer call does not run again."""
    for task_id, final in facts.final.items():
        _, is_replaced, newer = str(final["result"]).partition(": replaced by ")
        begun = [body.run.start for body in facts.bodies_of(newer)] if is_replaced else []
        if begun and any(body.run.start > max(begun) for body in facts.bodies_of(task_id)):
            yield Violation(Promise.REPLACED, f"{task_id} ran again after {newer} had replaced it", (task_id, newer))


def freed(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """No key stays locked when leases, cooldowns and windows have passed."""
    for line in facts.story.events("key"):
        excuse = endings.of_key(facts, line)
        if excuse:
            excused[excuse] += 1
        else:
            yield Violation(Promise.FREED, f"{line['key']} is left: {line['holder']}")


def no_errors(facts: Facts, excused: Excused) -> Iterator[Violation]:
    """No worker logs a traceback out of the package."""
    for line in facts.story.events("complaint"):
        yield Violation(Promise.NO_ERRORS, line["text"])


RULES: tuple[Callable[[Facts, Excused], Iterator[Violation]], ...] = (
    at_most_n,
    unlocked,
    given_up,
    rates,
    no_twins,
    not_again,
    fences,
    calls_answered,
    ends,
    latest,
    not_stale,
    one_job,
    served_anew,
    replaced,
    freed,
    no_errors,
)
