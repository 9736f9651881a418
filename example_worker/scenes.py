"""The scenes: which tasks are called, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.canvas import Signature

from .app import build_report, import_file, index_shop, render_preview, reserve, restock, sync_account


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
    runs_each: int | None = None
    """How many messages for the same thing must run. The others must be skipped. None: each that was sent."""
    is_serial: bool = False
    """All calls share one key and run one right after the other."""

    @property
    def marks(self) -> str:
        """The marks of the scene's runs, from first to last."""
        marks = sorted({call.mark for call in self.calls})
        return marks[0] if len(marks) == 1 else f"{marks[0]}-{marks[-1]}"


def contenders() -> Scene:
    """Seven calls of two tasks for one key. All wait for their turn."""
    tasks = [reserve, restock] * 4
    calls = tuple(Call(tasks[n - 1].s("lamp", n), "stock lamp", str(n)) for n in range(1, 8))
    legend = "seven calls for one key run in turn"
    return Scene("seven calls, one key", legend, "cyan", calls, is_serial=True)


def burst() -> Scene:
    """Five equal calls for each of three accounts. Three processes run one each, and the fourth meets duplicates."""
    accounts = {1: "A", 2: "B", 3: "C"}
    calls = tuple(
        Call(sync_account.s(account), f"account {account}", mark)
        for _ in range(5)
        for account, mark in accounts.items()
    )
    title, legend = "15 calls, three accounts", "five equal calls for each account: one runs, four are skipped"
    return Scene(title, legend, "green", calls, runs_each=1)


def long_task() -> Scene:
    """One run that takes longer than two leases, and a duplicate every 0.8 s."""
    times = [0.0] + [0.4 + 0.8 * n for n in range(5)]
    calls = tuple(Call(build_report.s("monday"), "report monday", "L", at) for at in times)
    title, legend = "one run, two leases long", "a run of 4.5 s with a lease of 2 s: its lock is renewed"
    return Scene(title, legend, "red", calls, runs_each=1)


def debounced() -> Scene:
    """Six calls within a second. They are merged into one message."""
    calls = tuple(Call(index_shop.s(7, f"version {n}"), "shop 7", "D", 0.2 * n) for n in range(1, 7))
    title, legend = "six calls, one message", "six calls are merged, and run once when they have stopped"
    return Scene(title, legend, "blue", calls)


def previews() -> Scene:
    """Three calls, each of which comes while the run of the one before goes on."""
    texts = {"P": 0.0, "Q": 1.1, "R": 2.2}
    calls = tuple(Call(render_preview.s(1, f"text {mark}"), "page 1", mark, at) for mark, at in texts.items())
    return Scene("the newest preview", "each newer call ends the run before it", "magenta", calls)


def turns() -> Scene:
    """Nine files of one customer, and then three of another one."""
    customers = ["a"] * 9 + ["b"] * 3
    calls = tuple(Call(import_file.s(customer, n), "imports", customer) for n, customer in enumerate(customers))
    return Scene("two customers, one key", "b comes last and takes turns with the nine of a", "yellow", calls)


def all_scenes() -> list[list[Scene]]:
    """All scenes, in the order of playing; those of one list at the same time."""
    return [[contenders(), long_task()], [burst()], [debounced(), previews(), turns()]]
