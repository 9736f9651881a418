"""Stalls: what must not happen to messages that wait in a worker though nothing is wrong with it.

- A key was free, a message waited in a worker, and nobody ran for `STALLED` seconds while that worker ended runs. The
  one excuse: the slots went to messages that waited there for other keys.
- A worker that is told to end keeps no message that waits in it for longer than `HANDED_ON`.
- While a crowd waits, the lock server runs no more than `MOST_COMMANDS` commands a second, and the worker needs no more
  than `MOST_BYTES` for each message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.story import Line, Story
from chaos.waits import Wait, gaps
from chaos.windows import HANDED_ON, MOST_BYTES, MOST_COMMANDS, STALLED
from promises import Excuse, Promise

Spans = dict[str, list[tuple[float, float]]]
Broken = tuple[Promise, str, list[Line]]
LEFT_FREE = f"keys left free, excused: {Excuse.SERVED_OTHERS}"


class Stalls:
    """Whether keys stay free though a message waits for them in a worker that ends runs."""

    def __init__(self, story: Story, waited: list[Wait], in_use: Spans, counts: Counter[str]) -> None:
        self._story, self._spans, self._counts = story, in_use, counts
        self._called: dict[int, list[Wait]] = defaultdict(list)
        for wait in waited:
            if wait.is_called:
                self._called[wait.worker].append(wait)
        #: For each time that a key was free while messages waited in a worker: for how long, how many runs that worker
        #: ended meanwhile, and the message.
        self._seen: dict[tuple[str, int, int], list[tuple[float, int, str]]] = defaultdict(list)

    def look_at(self, wait: Wait, start: float) -> None:
        """Find the stalls that one message that waits has seen since `start`."""
        for begin, stop in gaps(self._spans.get(wait.key, []), start, min(wait.end, self._story.end)):
            times = [line["at"] for line in self._story.ended[wait.worker]]
            ended = [at for at in times if begin <= at <= stop - STALLED]
            others = [one for one in self._called[wait.worker] if one.key != wait.key and begin <= one.end <= stop]
            if ended and len(ended) <= len(others):
                self._counts[LEFT_FREE] += 1
            elif ended:
                runs_before = sum(run <= begin for run, _ in self._spans.get(wait.key, []))
                seen = self._seen[wait.key, wait.worker, runs_before]
                seen.append((stop - ended[0], len(ended), wait.task_id))

    @property
    def broken(self) -> Iterator[Broken]:
        """Each stall, as the one has seen it that has waited for longest."""
        for (key, _, _), seen in self._seen.items():
            seconds, ended, task_id = max(seen)
            what = f"{key} was free, a message waited in a worker, and nobody ran for {seconds:.1f} s"
            yield Promise.SERVED, f"{what} while that worker ended {ended} runs", self._story.about(task_id)


def check_drains(story: Story, waited: list[Wait]) -> Iterator[Broken]:
    """Workers that kept what waited in them, although they were told to end."""
    for drain in story.events("drain"):
        at, worker = drain["at"], drain["worker"]
        kept = [wait for wait in waited if wait.worker == worker and wait.start <= at < wait.end]
        late = {wait.task_id: _goes_on_at(story, wait, at) - at for wait in kept}
        late = {task_id: seconds for task_id, seconds in late.items() if seconds > HANDED_ON}
        if late:
            what = f"a worker that was told to end kept {len(late)} messages that waited"
            yield (
                Promise.ENDS,
                f"{what}, for {max(late.values()):.1f} s",
                [drain, *(line for task_id in late for line in story.about(task_id))],
            )


def _goes_on_at(story: Story, wait: Wait, at: float) -> float:
    """When a message ran, or came to another worker, after the one in which it waited was told to end."""
    times = [line["at"] for line in story.received[wait.task_id] if line["worker"] != wait.worker]
    times += [run.start for run in story.runs_of(wait.task_id)]
    return min((time for time in times if time >= at), default=story.end)


def check_crowds(story: Story) -> Iterator[Broken]:
    """Crowds that cost more than they may."""
    for crowd in story.events("crowd"):
        rate, each = crowd["commands"] / crowd["seconds"], crowd["bytes"] / crowd["size"]
        if rate > MOST_COMMANDS:
            what = f"{rate:.0f} commands a second while {crowd['size']} messages waited for one key"
            yield Promise.CHEAP, what, [crowd]
        if each > MOST_BYTES:
            yield Promise.CHEAP, f"a worker needed {each / 1000:.0f} kB for each of {crowd['size']} messages", [crowd]
