"""Rates: in no time of a rate do more runs of a key begin than it allows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.excuses import STOPS
from chaos.faults import RESTART, STOP_WORKER
from chaos.story import RATED, Line, Story
from chaos.tasks import RATE
from chaos.windows import AT_ONCE, BEGINS
from promises import Excuse, Promise
from tests.lab.ledger import Run

#: When the lock server has lost its data, up to so many times the rate may begin.
AFTER_A_LOSS = 2


def check_rates(story: Story, excused: Counter[str]) -> Iterator[tuple[Promise, str, list[Line]]]:
    """Every time in which too many runs began."""
    begun: dict[str, list[Run]] = defaultdict(list)
    for run in story.runs:
        if run.key.startswith(RATED):
            begun[run.key].append(run)
    number, seconds = RATE
    for key, runs in begun.items():
        for place, first in enumerate(runs[:-number]):
            together = [run for run in runs[place:] if run.start < first.start + seconds - BEGINS]
            if len(together) <= number:
                continue
            excuse = _of_too_many(story, together)
            if excuse:
                excused[excuse] += 1
            else:
                took = together[number].start - first.start
                what = f"{number + 1} runs of {key} began in {took:.2f} s: {number} may in {seconds:g} s"
                yield Promise.RATE, what, [line for run in together for line in story.about(run.task_id)]


def _of_too_many(story: Story, runs: list[Run]) -> Excuse | None:
    """Why so many runs could begin. The lock server counts the grants, and a process may begin its body later."""
    number, _ = RATE
    late = [run for run in runs if _stood_still_before(story, run)]
    losses = story.strikes((RESTART,), runs[0].start - BEGINS, runs[-1].start)
    if len(runs) - len(late) <= number:
        return Excuse.STOOD_STILL_BEFORE_ITS_BODY
    if losses and len(runs) - len(late) <= number * AFTER_A_LOSS ** len(losses):
        return Excuse.DATA_LOST
    return None


def _stood_still_before(story: Story, run: Run) -> bool:
    """Whether the process of a run, or its worker, which had been granted the key for it, stood still until then."""
    workers = {line["worker"] for line in story.received[run.task_id]}
    stops = story.strikes(STOPS, run.start - BEGINS - AT_ONCE, run.start)
    return any(run.pid in stop["pids"] or (stop["name"] == STOP_WORKER and stop["worker"] in workers) for stop in stops)
