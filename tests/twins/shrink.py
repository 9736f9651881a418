"""Shrinking: the smallest plan that is found to fail as well, so that a person can read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.twins.plan import Call, Leaf, Many, Plan, Tree


def shrunk(plan: Plan, fails: Callable[[Plan], bool], seconds: float) -> Plan:
    """A plan that fails and of which no smaller one does, or the smallest that was found in so many seconds.

    Args:
        plan: A plan that has failed.
        fails: Plays a plan, and tells whether it fails. What depends on the time may fail only now and then.
        seconds: For how long smaller plans are tried.
    """
    end = time.monotonic() + seconds
    candidates = smaller(plan)
    while time.monotonic() < end:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            plan, candidates = candidate, smaller(candidate)
    return plan


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less: the largest things first."""
    for callers in _without_one(plan.callers):
        yield Plan(callers)
    for number, caller in enumerate(plan.callers):
        for calls in (*_without_one(caller), *_with_one_smaller(caller, _smaller_calls)):
            yield Plan((*plan.callers[:number], calls, *plan.callers[number + 1 :]))


def _smaller_calls(call: Call) -> Iterator[Call]:
    if call.is_stamped:
        yield replace(call, is_stamped=False)
    for tree in _smaller_trees(call.tree):
        yield replace(call, tree=tree)


def _smaller_trees(tree: Tree) -> Iterator[Tree]:
    if isinstance(tree, Leaf):
        yield from _smaller_leaves(tree)
        return
    yield from tree.parts
    for parts in (*_without_one(tree.parts), *_with_one_smaller(tree.parts, _smaller_trees)):
        if len(parts) > 1:
            yield Many(tree.kind, parts)


def _smaller_leaves(leaf: Leaf) -> Iterator[Leaf]:
    default = Leaf(leaf.name, leaf.task, leaf.key)
    for option in ("links", "errbacks", "calls"):
        for fewer in (*_without_one(getattr(leaf, option)), *_with_one_smaller(getattr(leaf, option), _smaller_trees)):
            yield replace(leaf, **{option: fewer})
    for option in ("becomes", "does", "times", "countdown", "expires", "lingers", "seconds"):
        if getattr(leaf, option) != getattr(default, option):
            yield replace(leaf, **{option: getattr(default, option)})


def _without_one(many: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [many[:number] + many[number + 1 :] for number in range(len(many))]


def _with_one_smaller(many: tuple[Any, ...], smaller_ones: Callable[[Any], Iterator[Any]]) -> Iterator[tuple[Any, ...]]:
    for number, one in enumerate(many):
        for less in smaller_ones(one):
            yield (*many[:number], less, *many[number + 1 :])
