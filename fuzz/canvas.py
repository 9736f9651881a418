"""Canvases: how the parts of a call are put together, and what comes before each of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from celery import Celery, chain, chord, group

#: The number of a part, or a canvas: its kind, and what it is made of. The last one of a chord is its body; the second
#: one of a link is linked to the first.
Shape = Any
ALONE: Shape = 0
SHAPES: tuple[Shape, ...] = (
    ("chain", 0, 1),
    ("chain", 0, 1, 2),
    ("group", 0, 1),
    ("group", 0, 1, 2),
    ("chord", 0, 1),
    ("chord", 0, 1, 2),
    ("chain", 0, ("group", 1, 2)),
    ("chain", 0, ("group", 1, 2), 3),  # Celery makes a chord of a group and what follows it
    ("chain", ("group", 0, 1), 2, 3),
    ("group", ("chain", 0, 1), ("chain", 2, 3)),
    ("group", ("chain", 0, 1), 2),
    ("chord", ("chain", 0, 1), 2, 3),
    ("link", 0, 1),
    ("chain", 0, ("link", 1, 2)),
)


def before(shape: Shape, above: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    """For each part those that come before it; the last of them comes right before it."""
    if isinstance(shape, int):
        return {shape: above}
    kind, *shapes = shape
    found: dict[int, tuple[int, ...]] = {}
    for place, one in enumerate(shapes):
        follows = kind in {"chain", "link"} or (kind == "chord" and place == len(shapes) - 1)
        found |= before(one, (*above, *found) if follows else above)
    return found


def headers(shape: Shape) -> dict[int, tuple[int, ...]]:
    """For each body of a chord: the last parts of its header, one of which sends it."""
    if isinstance(shape, int):
        return {}
    kind, *shapes = shape
    found: dict[int, tuple[int, ...]] = {}
    for one in shapes:
        found |= headers(one)
    if kind == "chord":
        found[shapes[-1]] = tuple(last for one in shapes[:-1] for last in _last(one))
    elif kind == "chain":  # Celery makes a chord of a group and what follows it
        found |= {after: _last(one) for one, after in pairwise(shapes) if _is_group(one)}
    return found


def _last(shape: Shape) -> tuple[int, ...]:
    if isinstance(shape, int):
        return (shape,)
    kind, *shapes = shape
    return tuple(last for one in (shapes if kind == "group" else shapes[-1:]) for last in _last(one))


def left_open(shape: Shape) -> set[int]:
    """The parts that Celery leaves open where one before them fails: links, and the parts of a chain's later group."""
    if isinstance(shape, int):
        return set()
    kind, first, *later = shape
    opened = [one for one in later if kind == "link" or (kind == "chain" and _is_group(one))]
    return {part for one in opened for part in before(one)}.union(*(left_open(one) for one in (first, *later)))


def _is_group(shape: Shape) -> bool:
    return not isinstance(shape, int) and shape[0] == "group"


def canvas(shape: Shape, signatures: list[Any], app: Celery) -> Any:
    """The canvas of these signatures."""
    if isinstance(shape, int):
        return signatures[shape]
    kind, *shapes = shape
    parts = [canvas(one, signatures, app) for one in shapes]
    match kind:
        case "chain":
            return chain(*parts, app=app)
        case "group":
            return group(parts, app=app)
        case "link":
            parts[0].link(parts[1])
            return parts[0]
    return chord(parts[:-1], parts[-1], app=app)
