"""The waits: from when to when each message has waited in line, and what begins on the key meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chaos.faults import COLD, KILL_WORKER, WARM
from chaos.posts import CHILDREN
from chaos.story import Line, Story
from chaos.windows import AT_ONCE, NEVER, TOLD_AGAIN


@dataclass(frozen=True)
class Wait:
    """One message that waited in line in one worker. All times are `time.monotonic()`."""

    task_id: str
    key: str
    """As the bodies write it into the ledger."""
    rank: int
    worker: int
    start: float
    end: float
    """When it waited no longer; infinite where it waits to the end of the ledger."""
    is_called: bool
    """Whether it has waited until its turn."""


@dataclass(frozen=True)
class Turn:
    """A message that had its turn at a key: it was called, or it found the key free."""

    task_id: str
    worker: int
    """0 where it has not waited, so that nobody has written down in which worker it ran."""
    rank: int
    """Its rank; 0 where it has not waited."""
    earliest: float
    latest: float
    """When it had its turn: where it has not waited, only its first word tells."""


def waits(story: Story) -> list[Wait]:
    """Everybody who waited in line, in order."""
    ends: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in story.events("begins"):
        ends[line["worker"], line["waiter"]].append(line)
    gone: dict[int, list[float]] = defaultdict(list)
    for line in story.events("leaves"):
        gone[line["worker"]].append(line["at"])
    for end in story.faults(KILL_WORKER, COLD, WARM):
        if end["name"] == KILL_WORKER or end["worker"] in story.hung:  # a hung one calls nobody, and has its messages
            gone[end["worker"]].append(end["from"])
    return [_wait(line, ends[line["worker"], line["waiter"]], gone[line["worker"]]) for line in story.events("waits")]


def _wait(line: Line, begins: list[Line], gone: list[float]) -> Wait:
    never = {"at": NEVER, "called": False}
    begin: Line = next((one for one in begins if one["at"] >= line["at"]), never)
    end = min([begin["at"], *(at for at in gone if at >= line["at"])])
    is_called = begin["called"] and end == begin["at"]
    facts: dict[str, Any] = {"task_id": line.get("task_id", ""), "rank": line["rank"], "worker": line["worker"]}
    return Wait(
        **facts,
        key=key_of(line),
        start=line["at"],
        end=end,
        is_called=is_called,
    )


def key_of(line: Line) -> str:
    """The key of a line, as the bodies write it into the ledger."""
    return str(line["key"]).partition("{chaos:")[2].removesuffix("}") or str(line["key"])


def turns(story: Story, waited: list[Wait]) -> dict[str, list[Turn]]:
    """Who had a turn at each key: those who were called, and those who ran without having waited."""
    turns: dict[str, list[Turn]] = defaultdict(list)
    for wait in waited:
        if wait.is_called:
            turns[wait.key].append(Turn(wait.task_id, wait.worker, wait.rank, wait.end, wait.end))
    waiting = {wait.task_id for wait in waited}
    for run in story.runs:
        if run.task_id not in waiting:
            turns[run.key].append(Turn(run.task_id, 0, 0, run.start - AT_ONCE, run.start))
    return turns


def is_later(story: Story, turn: Turn, wait: Wait) -> bool:
    """Whether who had the turn was published after the one who waits."""
    if turn.rank:
        return turn.rank > wait.rank
    published = [line["at"] for line in story.published[turn.task_id]]
    before = [line["at"] for line in story.published[wait.task_id] if line["at"] <= wait.start]
    return bool(published and before) and min(published) > max(before)  # nobody knows the rank of who did not wait


def was_full(story: Story, wait: Wait, start: float, end: float) -> float | None:
    """When the worker of a wait last had no free slot for the key, from `start` to `end`; None where it had one."""
    times = [
        line["at"] + TOLD_AGAIN
        for line in story.events("full")
        if line["worker"] == wait.worker and key_of(line) == wait.key
    ]
    times += _all_slots_taken(story, wait.worker, start, end)
    return max((at for at in times if start <= at and at - TOLD_AGAIN <= end), default=None)


def _all_slots_taken(story: Story, worker: int, start: float, end: float) -> list[float]:
    """Times at which all slots of a worker were taken, among them the last one from `start` to `end`."""
    runs = [(line["since"], line["at"]) for line in story.ended[worker] if line["since"] <= end and line["at"] >= start]
    times = [min(at, end) for _, at in runs]
    return [at for at in times if sum(since <= at <= ended for since, ended in runs) >= CHILDREN]


def busy(story: Story) -> dict[str, list[tuple[float, float]]]:
    """From when to when each key was in use by a run, in order."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in story.runs:
        spans[run.key].append((run.start, run.end))
    return spans


def gaps(spans: list[tuple[float, float]], start: float, end: float) -> Iterator[tuple[float, float]]:
    """The times from `start` to `end` that no span covers."""
    for begin, stop in spans:
        if begin > end:
            break
        if begin > start:
            yield start, begin
        start = max(start, stop)
    if start < end:
        yield start, end
