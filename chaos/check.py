"""The check: what a ledger must hold, and what it must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_redislock.protocol.tokens import Token
from chaos import excuses, missing
from chaos.calls import check_calls
from chaos.jobs import Job, jobs, of_pair, pairs
from chaos.load import LATE, MERGING
from chaos.rates import check_rates
from chaos.story import RATED, Line, Story
from chaos.tasks import LIMIT
from chaos.turns import check_turns
from promises import Excuse, Promise
from tests.lab.ledger import Ledger, Run

FINISHED, SKIPPED, LIMITED = "finished", "skipped as duplicates", "ended by their hard time limit"
ANSWERED = "publishes answered with an existing job"
CONTENDED = "jobs of contending callers"
HUNG = "workers that hung in Celery's own code, killed"
CRASHED = "workers that ended by an error in Kombu's own code"
#: For how many seconds before and after an overlap the report shows the faults. This excuses nothing.
SHOWN = 4.0
#: What a message may end as, by its kind (empty for any) and its state.
OUTCOMES = {("", "SUCCESS"): FINISHED, ("once", "REVOKED"): SKIPPED, ("limited", "FAILURE"): LIMITED}


@dataclass
class Offence:
    """A promise that was broken, and the lines of the ledger that show it."""

    promise: Promise
    what: str
    lines: list[Line]


@dataclass
class Verdict:
    """What came of a chaos run: counts by name, and what no excuse covers."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    lost_calls: Counter[str] = field(default_factory=Counter)
    rates: Counter[str] = field(default_factory=Counter)
    offences: list[Offence] = field(default_factory=list)


def check(ledger: Ledger) -> Verdict:
    """Hold a ledger of a chaos run against the promise."""
    story, verdict = Story(ledger), Verdict()
    verdict.faults.update(line["name"] for line in story.events("fault") if line["struck"])
    for examine in (_messages, _runs, _overlaps, _crowds, _jobs, _losses, _turns, _calls, _rates, _leftovers):
        verdict.offences += examine(story, verdict)
    return verdict


def _messages(story: Story, verdict: Verdict) -> Iterable[Offence]:
    verdict.outcomes["messages sent"] = len(story.sent)
    for task_id, sent in story.sent.items():
        state = story.final.get(task_id, "unknown")
        late = sent["kind"] in LATE
        if sent["kind"] in MERGING and state == "REVOKED":
            continue  # a newer call has replaced it, which `_calls` looks at
        outcome = OUTCOMES.get((sent["kind"], state)) or OUTCOMES.get(("", state))
        if outcome:
            verdict.outcomes[outcome] += 1
            if state == "SUCCESS" and not any(story.is_done(run) for run in story.runs_of(task_id)):
                yield Offence(Promise.NOT_DROPPED, "a message succeeded without a run", story.about(task_id))
            continue
        excuse = missing.of_missing(story, task_id) if late else missing.of_lost_early(story, task_id)
        if state == "RETRY" and missing.is_finished(story, task_id):
            verdict.outcomes[FINISHED] += 1
        elif excuse:
            verdict.missing[excuse] += 1
        else:
            what = f"a message that is acked {'late' if late else 'early'} was lost: {sent['kind']}, {state}"
            yield Offence(Promise.NOT_DROPPED, what, story.about(task_id))


def _runs(story: Story, verdict: Verdict) -> Iterable[Offence]:
    verdict.outcomes["runs"] = len(story.runs)
    for runs in story.attempts.values():
        if runs[0].key.startswith(RATED):
            continue  # nothing is held, so two deliveries of a message may run
        for number, run in enumerate(runs[1:], start=1):
            excuse = excuses.of_another_run(story, runs[:number], run)
            if excuse:
                verdict.again[excuse] += 1
            else:
                yield Offence(Promise.NOT_AGAIN, "an attempt ran again after it had finished", story.about(run.task_id))


def _overlaps(story: Story, verdict: Verdict) -> Iterable[Offence]:
    verdict.overlaps[Excuse.KNEW_OF_THE_LOSS] = len(story.told_overlaps)
    for first, second in story.overlaps:
        excuse = excuses.of_overlap(story, first, second)
        if excuse:
            verdict.overlaps[excuse] += 1
        else:
            yield Offence(
                Promise.AT_MOST_N, f"two runs of {first.key} at the same time", _lines_of(story, first, second)
            )


def _crowds(story: Story, verdict: Verdict) -> Iterable[Offence]:
    for run, others in story.beside.items():
        found = [excuses.of_overlap(story, other, run) for other in others]
        if found.count(None) >= LIMIT:
            lines = [line for other in others for line in _lines_of(story, other, run)]
            yield Offence(Promise.AT_MOST_N, f"more than {LIMIT} runs of {run.key} at the same time", lines)
        elif len(found) >= LIMIT:
            verdict.overlaps[next(filter(None, found))] += 1


def _jobs(story: Story, verdict: Verdict) -> Iterable[Offence]:
    verdict.outcomes[CONTENDED] = len(jobs(story))
    unexcused: dict[str, list[tuple[Job, Job]]] = {}
    for first, second in pairs(story):
        excuse = of_pair(story, first, second)
        if excuse:
            verdict.pairs[excuse] += 1
        else:
            unexcused.setdefault(first.key, []).append((first, second))
    for key, found in unexcused.items():
        about = [line for job in found[0] for line in story.about(job.task_id) if line["event"] != "answered"]
        times = f" ({len(found)} times for {key})" if len(found) > 1 else ""
        yield Offence(Promise.ONE_JOB, f"a job was sent while an equal one was outstanding{times}", about)


def _lines_of(story: Story, first: Run, second: Run) -> list[Line]:
    """What both runs wrote, and the deaths of their processes and the faults about that time."""
    runs, pids = {(run.pid, run.task_id) for run in (first, second)}, {first.pid, second.pid}
    start, end = first.start - SHOWN, second.start + SHOWN
    own = [line for line in story.lines if (line.get("pid"), line.get("task_id")) in runs]
    deaths = [line for line in story.events("died") if line["pid"] in pids]
    return [*own, *deaths, *story.strikes(tuple({line["name"] for line in story.events("fault")}), start, end)]


def _losses(story: Story, verdict: Verdict) -> Iterable[Offence]:
    for loss in story.events("lost"):
        excuse = excuses.of_loss(story, loss)
        if excuse:
            verdict.losses[f"{loss['reason']}: {excuse}"] += 1
        else:
            yield Offence(Promise.OWNER, "a lock was lost without a cause", [loss, *story.about(loss["task_id"])])


def _turns(story: Story, verdict: Verdict) -> Iterable[Offence]:
    turns = check_turns(story)
    verdict.turns = turns.counts
    for promise, what, lines in turns.broken:
        yield Offence(promise, what, lines)


def _calls(story: Story, verdict: Verdict) -> Iterable[Offence]:
    calls = check_calls(story)
    verdict.calls, verdict.lost_calls = calls.counts, calls.excused
    for promise, what, lines in calls.broken:
        yield Offence(promise, what, lines)


def _rates(story: Story, verdict: Verdict) -> Iterable[Offence]:
    for promise, what, lines in check_rates(story, verdict.rates):
        yield Offence(promise, what, lines)


def _leftovers(story: Story, verdict: Verdict) -> Iterable[Offence]:
    verdict.outcomes[HUNG] = len(story.hung)
    verdict.outcomes[CRASHED] = len(story.events("crash"))
    for key in story.events("key"):
        holder = Token.of(key["holder"])
        task_id = holder.attempt.task_id if holder.attempt else ""
        if holder.state == "queued" and task_id in story.sent and missing.of_missing(story, task_id):
            continue  # kept for a message that has been counted as lost
        verdict.outcomes["keys left"] += 1
        yield Offence(Promise.FREED, "a key was left one lease after the end", [key, *story.about(task_id)])
    verdict.outcomes[ANSWERED] = len(story.events("answered"))
    for answer in story.events("answered"):
        if answer["task_id"] not in story.sent:
            yield Offence(Promise.ANSWERED, "a publish was answered with a job that nobody has sent", [answer])
    for complaint in story.events("complaint"):
        yield Offence(Promise.NO_ERRORS, complaint["text"], [complaint])
