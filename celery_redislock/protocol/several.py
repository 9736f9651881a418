"""Several locks for one run: in which order they are asked for. Pure; the model in tests/model uses the same functions.

A run holds all of its keys or none. Where one of them is refused, it gives back the others and waits for that one. So a
message that waits holds nothing, and no two can wait for each other. What a room keeps for a waiter whose turn has
come is asked for in one order that all processes share, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from .names import Demand


def in_order(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """The demands of one run in the order in which all processes ask for them; each key once, as it was first named.

    Rates come last, because a permit that was spent for nothing is missing for a while. The others are in the order of
    their names alone: two tasks may give one key different limits, and must agree on the order all the same.
    """
    first_named: dict[str, Demand] = {}
    for demand in demands:
        first_named.setdefault(demand.key, demand)
    return tuple(sorted(first_named.values(), key=lambda one: (one.spent > 0, one.key)))


def gathered(wants: tuple[Demand, ...], waits_for: Demand, *, is_offered: bool, keeps: bool) -> tuple[Demand, ...]:
    """In which order a room asks for the keys of a waiter that waits for one of them.

    Args:
        wants: The waiter's demands, from `in_order`.
        waits_for: The one that was refused last.
        is_offered: Whether that one is offered to the room. It is then asked for last: while another key is refused,
            the room can still call its next waiter.
        keeps: Whether the room keeps what it gets while another key is refused. That is free of deadlocks only in the
            common order.
    """
    if keeps:
        return wants
    others = tuple(one for one in wants if one.key != waits_for.key)
    return (*others, waits_for) if is_offered else (waits_for, *others)
