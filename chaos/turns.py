"""Order and starvation: what the checker says of those who wait in line.

All of this holds where no fault has struck lately; a fault may cost a wake-up, a room its rank, or a key its line.

- Who waits is not passed by one who was published later. The one excuse: the worker of the first had no free slot, for
  then the room of another worker goes first. In one worker nothing excuses it.
- Nobody is passed by more than `MOST_PASSES`, whatever the excuse.
- What `chaos.stalls` lists.
- Where groups take turns, none has more than `MOST_AHEAD` turns more than one of which a message waits.
- No key idles for longer than `IDLE` while somebody waits for it whose worker has a free slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.hall import DRILL
from chaos.stalls import Broken, Stalls, check_crowds, check_drains
from chaos.story import LIMITED, RATED, SEVERAL, Story
from chaos.waits import Turn, Wait, busy, gaps, is_later, turns, waits, was_full
from chaos.windows import AT_ONCE, IDLE, MOST_AHEAD, MOST_PASSES, NEVER, RECOVERED, REPLACED
from promises import Excuse, Promise

WAITED, CHECKED = "messages that waited in line", "of them, undisturbed by a fault"
PASSES = f"passed by a later one, excused: {Excuse.NO_FREE_SLOT}"
#: Keys of these begin so: such a key may be reserved for a message that lies in the broker's queue.
RESERVED = "job"
#: A message that needs two keys may be overtaken while it waits for the other one. The keys of merged calls are
#: reserved, as those of jobs. A rate keeps a key that no run uses.
MERGED = ("latest", "all", "newest")
#: What begins at the same moment in several slots may do so in any order.
NOT_IN_ORDER = (RESERVED, LIMITED, RATED, SEVERAL, *MERGED)
#: Here groups take turns.
FAIR = "fair"


@dataclass
class Turns:
    """What came of those who waited: counts by name, and each broken promise with the lines that show it."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)


def check_turns(story: Story) -> Turns:
    """Hold a story against what is promised to those who wait."""
    waited, found = waits(story), Turns()
    had_turns, in_use = turns(story, waited), busy(story)
    found.counts[WAITED] = len(waited)
    found.broken += [*check_drains(story, waited), *check_crowds(story)]
    stalls = Stalls(story, waited, in_use, found.counts)
    for wait in waited:
        start = calm_from(story, wait)
        if start is None:
            continue
        found.counts[CHECKED] += 1
        if wait.key.startswith(NOT_IN_ORDER):
            continue
        stalls.look_at(wait, start)
        look_at_order = _outrun if wait.key == FAIR else _passed
        look_at_order(story, found, wait, start, had_turns.get(wait.key, []))
        for seconds in _idle(story, wait, start, in_use.get(wait.key, [])):
            what = f"{wait.key} idled for {seconds:.1f} s while a message waited for it"
            found.broken.append((Promise.NOT_IDLE, what, story.about(wait.task_id)))
    found.broken += stalls.broken
    return found


def calm_from(story: Story, wait: Wait) -> float | None:
    """From when on no fault has disturbed one who waits; None where one has, to the end. No fault reaches a drill."""
    if wait.key.startswith(DRILL):
        return wait.start
    end = min(wait.end, story.end)
    faults = [fault["until"] + RECOVERED for fault in story.events("fault") if fault["from"] <= end]
    start = max([wait.start, *faults])
    return start if start < end else None


def _passed(story: Story, found: Turns, wait: Wait, start: float, had_turns: list[Turn]) -> None:
    passes = 0
    for turn in had_turns:
        is_meanwhile = max(start, wait.start + AT_ONCE) <= turn.earliest and turn.latest < wait.end
        if not is_meanwhile or turn.task_id == wait.task_id or not is_later(story, turn, wait):
            continue
        passes += 1
        if not _is_excused(story, wait, turn):
            lines = [*story.about(wait.task_id), *story.about(turn.task_id)]
            found.broken.append(
                (Promise.ORDER, f"one who waited for {wait.key} was passed by one published later", lines)
            )
        else:
            found.counts[PASSES] += 1
    if passes > MOST_PASSES:
        found.broken.append(
            (Promise.ORDER, f"one who waited for {wait.key} was passed by {passes}", story.about(wait.task_id))
        )


def _outrun(story: Story, found: Turns, wait: Wait, start: float, had_turns: list[Turn]) -> None:
    """A group that had more turns than that of one who waited meanwhile, but for those when its worker had no slot."""
    own, end = _group(story, wait.task_id), min(wait.end, story.end)
    turns: Counter[str] = Counter()
    for turn in had_turns:
        if start <= turn.earliest and turn.latest < end:
            group = _group(story, turn.task_id)
            turns[group] += group == own or not _is_excused(story, wait, turn)
    group, most = max(turns.items(), key=lambda one: one[1], default=("", 0))
    if most > turns[own] + MOST_AHEAD:
        what = f"group {group} had {most} turns while a message of group {own} waited, which had {turns[own]}"
        found.broken.append((Promise.FAIR, what, story.about(wait.task_id)))


def _is_excused(story: Story, wait: Wait, turn: Turn) -> bool:
    """Whether a turn went to another worker because that of the one who waits had no free slot."""
    full = was_full(story, wait, turn.earliest - AT_ONCE, turn.latest + AT_ONCE)
    return turn.worker != wait.worker and full is not None


def _group(story: Story, task_id: str) -> str:
    return str(story.sent.get(task_id, {}).get("group", ""))


def _idle(story: Story, wait: Wait, start: float, spans: list[tuple[float, float]]) -> Iterator[float]:
    """For how long the key was in nobody's use, each time that it was so for too long."""
    end = min(wait.end, story.end)
    for begin, stop in gaps(spans, start, end):
        if stop - begin <= IDLE:
            continue
        full = was_full(story, wait, begin, stop)
        seconds = stop - max(begin, full or -NEVER)
        # The message was in the pipe of a child that then ended, and another one had to begin first.
        is_replaced = any(begin - AT_ONCE <= died <= stop for died in story.deaths.values())
        if seconds > IDLE + is_replaced * REPLACED:
            yield seconds
