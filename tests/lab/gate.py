"""A gate: what holds bodies up until the test opens it, instead of a number of seconds that might be too few."""

from __future__ import annotations

import time
from pathlib import Path


class Gate(str):
    """The name of a file; a task takes it instead of its `seconds`, and runs until the file is there."""

    __slots__ = ()

    def open(self) -> None:
        """Let go whoever waits, and all who come."""
        Path(self).touch()


def spend(seconds: float | str, file: str = "") -> None:
    """Take so many seconds, and on until `file` is there. `seconds` may name a file as well, such as a `Gate`."""
    for time_or_file in (seconds, file):
        if isinstance(time_or_file, str):
            if time_or_file:
                wait_for_file(time_or_file)
        else:
            time.sleep(time_or_file)


def wait_for_file(file: str) -> None:
    """Wait until `file` is there; a minute at most."""
    end = time.monotonic() + 60
    while not Path(file).exists() and time.monotonic() < end:
        time.sleep(0.005)
