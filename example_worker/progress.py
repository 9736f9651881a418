"""Progress: in a terminal, bars and the picture as it grows; elsewhere, plain lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from .scenes import Scene


class Progress:
    """A bar for each scene and the picture so far; if the output is not a terminal, a line for each change.

    Args:
        console: Where to draw.
        scenes: What is played.
        picture: Draws what has happened so far.
    """

    def __init__(self, console: Console, scenes: Sequence[Scene], picture: Callable[[], RenderableType]) -> None:
        name, tally = TextColumn("{task.description}"), TextColumn("{task.fields[tally]}")
        self._console, self._picture = console, picture
        self._bars = Bars(name, BarColumn(20), MofNCompleteColumn(), tally, console=console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._rows: dict[str, TaskID] = {
            scene.title: self._bars.add_task(f"[{scene.style}]{scene.title}", total=len(scene.calls), tally="")
            for scene in scenes
        }
        self._start = time.monotonic()
        self._lines: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()
        if self._console.is_interactive:
            self._console.print(self._bars)

    def show(self, scene: Scene, kinds: Counter[str], unpublished: int) -> None:
        """Show how many calls of `scene` have ended in each way."""
        done = {kind: count for kind, count in sorted(kinds.items()) if kind}
        waiting = kinds[""] + unpublished
        counted = [f"{count} {kind}" for kind, count in done.items()] + ([f"{waiting} to go"] if waiting else [])
        tally = ", ".join(counted)
        self._bars.update(self._rows[scene.title], completed=sum(done.values()), tally=tally)
        if self._console.is_interactive:
            self._live.update(Group(self._bars, "", self._picture()), refresh=True)
        elif self._lines.get(scene.title) != tally:
            self._console.print(f"{time.monotonic() - self._start:5.1f} s  {scene.title}: {tally}", markup=False)
            self._lines[scene.title] = tally
