"""Interleaved timing: all cases take turns in short rounds, so that noise of the machine slows all of them alike."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple, Self

#: There are many short rounds, of some 15 ms for all cases, so that a disturbance spoils only a few of them.
ROUNDS = 400
CALLS = 20
WARM_UP = 200

Case = Callable[[], object]


class Summary(NamedTuple):
    """The median and the quartiles of many rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Make one from the values of all rounds."""
        lower, _, upper = quantiles(values, n=4)
        return cls(median(values), lower, upper)


class Rounds:
    """Seconds per call of one case, round by round.

    Two cases are compared round by round, so that what slows both of them cancels out. Medians are taken last.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds([mine + theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)])

    def __sub__(self, other: Rounds) -> Rounds:
        return Rounds([mine - theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)])

    def microseconds(self) -> Summary:
        """Microseconds per call."""
        return Summary.of([second * 1e6 for second in self.seconds])

    def ratio(self, baseline: Rounds) -> Summary:
        """The ratio of this case to `baseline` in the same round."""
        return Summary.of([mine / theirs for mine, theirs in zip(self.seconds, baseline.seconds, strict=True)])


def interleave(cases: Mapping[str, Case], rounds: int = ROUNDS, calls: int = CALLS) -> dict[str, Rounds]:
    """Time `cases` side by side.

    Args:
        cases: What to call, by name.
        rounds: How often each case has its turn.
        calls: Calls in one turn.
    """
    for case in cases.values():
        deque((case() for _ in repeat(None, WARM_UP)), maxlen=0)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    turns = deque(cases.items())
    with _garbage_kept():
        for _ in range(rounds):
            for name, case in turns:
                seconds[name].append(_time(case, calls))
            turns.rotate()  # so that no case always follows the same one
            gc.collect()
    return {name: Rounds(values) for name, values in seconds.items()}


def _time(case: Case, calls: int) -> float:
    start = perf_counter()
    for _ in repeat(None, calls):
        case()
    return (perf_counter() - start) / calls


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage collection in the block but the explicit one between rounds, which skips what was there before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
