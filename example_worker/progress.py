"""Progress: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from celery import states
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from .scenes import Scene
from .verdict import RAN, SKIPPED


class Progress:
    """A bar for each scene; if the output is not a terminal, a line for each change."""

    def __init__(self, console: Console, scenes: Sequence[Scene]) -> None:
        name, tally = TextColumn("{task.description}"), TextColumn("{task.fields[tally]}")
        self._console = console
        self._bars = Bars(
            name, BarColumn(20), MofNCompleteColumn(), tally, console=console, disable=not console.is_interactive
        )
        self._rows: dict[str, TaskID] = {
            scene.title: self._bars.add_task(f"[{scene.style}]{scene.title}", total=len(scene.calls), tally="")
            for scene in scenes
        }
        self._start = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def show(self, scene: Scene, counts: Counter[str], unpublished: int) -> None:
        """Show how many messages of `scene` are in each state."""
        ran, skipped = counts[RAN], counts[SKIPPED]
        done = sum(counts[state] for state in states.READY_STATES)
        waiting = counts.total() - done + unpublished
        tally = f"{ran} ran, {skipped} skipped, {waiting} to go"
        self._bars.update(self._rows[scene.title], completed=done, tally=tally)
        line = f"{scene.title}: {tally}"
        if not self._console.is_interactive and line != self._last:
            self._console.print(f"{time.monotonic() - self._start:5.1f} s  {line}", markup=False)
            self._last = line
