"""Summary: how many locks are held and waited for, for each task; for `watch`, and as Prometheus takes it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from celery_redislock.shown import shown

from .scan import Row


class Total(NamedTuple):
    """What is held and waited for, of one task or of all."""

    held: int = 0
    kept: int = 0
    """How many keys are kept without a holder: queued, cooling or offered."""
    waiting: int = 0
    """How many messages wait, as `Row.waiting` counts them."""
    oldest: float = 0.0
    """How long ago the first who waits was published, in seconds; 0 where nobody waits."""

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        oldest = max(self.oldest, other.oldest)
        return Total(self.held + other.held, self.kept + other.kept, self.waiting + other.waiting, oldest)


def totals(rows: Iterable[Row]) -> dict[str, Total]:
    """The totals by the names of the tasks; the name is empty for locks outside tasks."""
    lines: set[str] = set()
    found: defaultdict[str, Total] = defaultdict(Total)
    for row in rows:
        if row.state != "free":
            found[row.token.task or ""] += Total(int(row.state == "held"), int(row.state != "held"))
        if row.waiting and row.place.lock not in lines:  # all slots of a lock have one line
            lines.add(row.place.lock)
            for task, waits in row.waits.items():
                found[task] += Total(waiting=waits.number, oldest=waits.oldest)
    return dict(found)


METRICS = {
    "held": ("celery_redislock_held", "Locks and slots that are held now."),
    "kept": ("celery_redislock_kept", "Keys that are kept and have no holder: queued, cooling or offered."),
    "waiting": (
        "celery_redislock_waiting",
        "Messages that wait for a lock; where none are known, each process in line.",
    ),
    "oldest": ("celery_redislock_oldest_wait_seconds", "How long ago the first message in line was published."),
}


def prometheus(found: dict[str, Total]) -> Iterator[str]:
    """The lines of Prometheus' text format."""
    for field, (name, text) in METRICS.items():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for task, total in sorted(found.items()):
            yield f'{name}{{task="{_escaped(task)}"}} {round(getattr(total, field), 3)}'


def _escaped(label: str) -> str:
    return shown(label).replace("\\", "\\\\").replace('"', '\\"')
