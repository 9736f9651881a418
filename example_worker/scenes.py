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
    """What the body works on, as recorded in the ledger. No two runs on the same thing may overlap."""
    mark: str
    """The character that draws the call's run."""
    at: float = 0.0
    """Seconds after the scene's start."""


@dataclass(frozen=True)
class Scene:
    """Calls that are played together, and how to show them."""

    title: str
    legend: str
    style: str
    calls: tuple[Call, ...]
    runs_each: int
    """How many calls for the same thing must run. The others must be skipped."""
    is_serial: bool = False
    """All calls share one key and run one right after the other."""

    @property
    def marks(self) -> str:
        """The marks of the scene's runs, from first to last."""
        marks = sorted({call.mark for call in self.calls})
        return marks[0] if len(marks) == 1 else f"{marks[0]}-{marks[-1]}"


def contenders() -> Scene:
    """Nine calls of two tasks for one key. All wait for their turn."""
    tasks = [reserve, restock] * 5
    calls = tuple(Call(tasks[n - 1].s("lamp", n), "stock lamp", str(n)) for n in range(1, 10))
    return Scene(
        "nine calls, one key",
        "nine calls for one key run in turn",
        "cyan",
        calls,
        runs_each=9,
        is_serial=True,
    )


def burst() -> Scene:
    """Eight equal calls for each of three accounts. Three processes run one each, and the fourth meets duplicates."""
    accounts = {1: "A", 2: "B", 3: "C"}
    calls = tuple(
        Call(sync_account.s(account), f"account {account}", mark)
        for _ in range(8)
        for account, mark in accounts.items()
    )
    title, legend = "24 calls, three accounts", "eight equal calls for each account: one runs, seven are skipped"
    return Scene(title, legend, "green", calls, runs_each=1)


def long_task() -> Scene:
    """One run that takes longer than three leases, and a duplicate every 0.8 s."""
    times = [0.0] + [0.4 + 0.8 * n for n in range(8)]
    calls = tuple(Call(build_report.s("monday"), "report monday", "R", at) for at in times)
    title, legend = "one run, three leases long", "a run of 6.5 s with a lease of 2 s: its lock is renewed"
    return Scene(title, legend, "magenta", calls, runs_each=1)


def all_scenes() -> list[Scene]:
    """All scenes, in the order of playing."""
    return [contenders(), burst(), long_task()]
