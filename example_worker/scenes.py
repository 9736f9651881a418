"""The three scenes: which tasks are called, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.canvas import Signature

from .app import build_report, reserve, restock, sync_account


@dataclass(frozen=True)
class Call:
    """One message to publish."""

    task: Signature[Any]
    what: str
    """What the task's body works on, as it writes into the ledger. No two runs of the same work may overlap."""
    mark: str
    """How the call's run is drawn in the picture."""
    at: float = 0.0
    """Seconds after the scene's start."""


@dataclass(frozen=True)
class Scene:
    """Calls that are played together, and how they are shown."""

    title: str
    legend: str
    style: str
    calls: tuple[Call, ...]
    runs_each: int
    """How many calls for the same work must run; the others must be skipped."""
    is_serial: bool = False
    """All calls have one key and run, each right after the one before."""

    @property
    def marks(self) -> str:
        """The marks of the scene's runs in the picture, from first to last."""
        marks = sorted({call.mark for call in self.calls})
        return marks[0] if len(marks) == 1 else f"{marks[0]}-{marks[-1]}"


def contenders() -> Scene:
    """Two tasks, nine calls, one key: each takes its turn."""
    tasks = [reserve, restock] * 5
    calls = tuple(Call(tasks[n - 1].s("lamp", n), "stock lamp", str(n)) for n in range(1, 10))
    return Scene(
        "nine contenders for one key",
        "reserve and restock in turns, 1 s each",
        "cyan",
        calls,
        runs_each=9,
        is_serial=True,
    )


def burst() -> Scene:
    """Eight equal calls for each of three accounts: of four children one is free, and meets the duplicates."""
    accounts = {1: "A", 2: "B", 3: "C"}
    calls = tuple(
        Call(sync_account.s(account), f"account {account}", mark)
        for _ in range(8)
        for account, mark in accounts.items()
    )
    return Scene("a burst of eight per account", "one sync per account", "green", calls, runs_each=1)


def long_task() -> Scene:
    """One run that takes three leases, and a duplicate every 0.8 s."""
    times = [0.0] + [0.4 + 0.8 * n for n in range(8)]
    calls = tuple(Call(build_report.s("monday"), "report monday", "R", at) for at in times)
    return Scene("three leases long", "a report of 6.5 s under a lease of 2 s", "magenta", calls, runs_each=1)


def all_scenes() -> list[Scene]:
    """All scenes, in the order in which they are played."""
    return [contenders(), burst(), long_task()]
