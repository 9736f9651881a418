"""Summary: how many locks are held and waited for, for each task; for `watch`, and as Prometheus takes it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .scan import Row


class Total(NamedTuple):
    """What is held and waited for, of one task or of all."""

    held: int = 0
    kept: int = 0
    """How many keys are kept without a holder: queued, cooling or offered."""
    waiting: int = 0
    """How many rooms stand in line."""
    oldest: float = 0.0
    """How long ago the first who waits was published, in seconds; 0 where nobody waits."""

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        oldest = max(self.oldest, other.oldest)
        return Total(self.held + other.held, self.kept + other.kept, self.waiting + other.waiting, oldest)


def totals(rows: Iterable[Row]) -> dict[str, Total]:
    """The totals by the names of the tasks; the name is empty for locks outside tasks."""
    lines: set[str] = set()
    found: dict[str, Total] = {}
    for row in rows:
        is_held = row.token.state == "held"
        of_row = Total(int(is_held), int(not is_held))
        if row.waiting and row.place.lock not in lines:  # all slots of a lock have one line
            lines.add(row.place.lock)
            of_row = of_row._replace(waiting=row.waiting, oldest=row.oldest or 0.0)
        name = row.token.task or ""
        found[name] = found.get(name, Total()) + of_row
    return found


METRICS = {
    "held": ("celery_redislock_held", "Locks and slots that are held now."),
    "kept": ("celery_redislock_kept", "Keys that are kept and have no holder: queued, cooling or offered."),
    "waiting": ("celery_redislock_waiting", "Workers and processes that stand in line for a lock."),
    "oldest": ("celery_redislock_oldest_wait_seconds", "How long ago the first who waits for a lock was published."),
}


def prometheus(found: dict[str, Total]) -> Iterator[str]:
    """The lines of Prometheus' text format."""
    for field, (name, text) in METRICS.items():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for task, total in sorted(found.items()):
            yield f'{name}{{task="{_escaped(task)}"}} {round(getattr(total, field), 3)}'


def _escaped(label: str) -> str:
    text = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text.encode("utf-8", "backslashreplace").decode()
