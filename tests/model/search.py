"""Search: every state of a small model, breadth first: it finds the shortest way to a broken promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from promises import Promise

T = TypeVar("T")


class Exploration(NamedTuple):
    """What was found: every state, and the first broken promise with the way to it."""

    states: Mapping[Any, Any]
    broken: Promise | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([str(self.broken or f"{len(self.states)} states, nothing broken"), *self.trace])


def search(
    start: T,
    steps_of: Callable[[T], Iterable[tuple[str, T, Promise | None]]],
    broken_in: Callable[[T], Promise | None] = lambda _: None,
) -> Exploration:
    """Find all that can happen from `start`, until a promise is broken.

    Args:
        start: The state to begin with. A state has `is_over`.
        steps_of: The steps from a state: a label, the state that it leads to, and the promise that it breaks, if any.
        broken_in: The promise that a state breaks, whatever step led to it; None where it breaks none.
    """
    found: dict[T, tuple[T, str] | None] = {start: None}
    states, before = [start], dict[T, list[T]]()

    def way_to(state: T, *last: str) -> tuple[str, ...]:
        labels, way = [*last], found[state]
        while way is not None:
            labels.append(way[1])
            way = found[way[0]]
        return tuple(labels[::-1])

    for at in states:  # what is found meanwhile is appended
        if broken := broken_in(at):
            return Exploration(found, broken, way_to(at))
        for label, new, broken in steps_of(at):
            if broken:
                return Exploration(found, broken, way_to(at, label))
            if new not in found:
                found[new] = (at, label)
                states.append(new)
            before.setdefault(new, []).append(at)
    stuck = first_that_never_ends(states, {one for one in states if one.is_over}, before)
    return Exploration(found, Promise.ENDS, way_to(stuck)) if stuck else Exploration(found)


def first_that_never_ends(states: Sequence[T], ends: set[T], before: Mapping[T, Sequence[T]]) -> T | None:
    """A state from which none of `ends` can be reached; None where there is none.

    Args:
        states: All states.
        ends: Those that are over. The others that lead to them are added.
        before: For each state, those from which one step leads to it.
    """
    waiting = list(ends)
    while waiting:
        for one in before.get(waiting.pop(), ()):
            if one not in ends:
                ends.add(one)
                waiting.append(one)
    return next((one for one in states if one not in ends), None)
