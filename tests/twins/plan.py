"""Plans: random workflows, as values that can be shown, played and made smaller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

from tests.twins.options import PLAIN, TASKS

#: A plan has at most about so many leaves.
LEAVES = 10
#: Seconds that a body takes.
SECONDS = (0.0, 0.03, 0.12)
#: An expiry that is over when the message is sent, one that is over soon, and one that is not reached.
OVER, SOON, FAR = -1.0, 0.3, 60.0


@dataclass(frozen=True)
class Leaf:
    """One call of a task."""

    name: str
    task: str
    key: str
    does: str = "returns"
    """What the body does; or ``fails``, ``ignores``, and before it returns ``retries`` and ``autoretries``."""
    times: int = 0
    """How often it does the latter two."""
    seconds: float = 0.0
    lingers: float = 0.0
    """Seconds for which a locked one keeps its key after its result is stored."""
    is_immutable: bool = False
    countdown: float | None = None
    expires: float | None = None
    links: tuple[Tree, ...] = ()
    errbacks: tuple[Leaf, ...] = ()
    calls: tuple[Leaf, ...] = ()
    """What its body sends with `delay`."""
    becomes: Tree | None = None
    """What its body replaces itself with."""


@dataclass(frozen=True)
class Many:
    """A canvas of several parts."""

    kind: str
    """``chain``, ``group``, or ``chord``, whose last part is the body."""
    parts: tuple[Tree, ...]


Tree = Leaf | Many


@dataclass(frozen=True)
class Call:
    """What a caller sends, and waits for."""

    tree: Tree
    is_stamped: bool = False


@dataclass(frozen=True)
class Plan:
    """What each caller sends, one call after the result of the other. Each caller is a thread."""

    callers: tuple[tuple[Call, ...], ...]


def random_plan(seed: object) -> Plan:
    """The plan of this seed: always the same one."""
    return _Maker(random.Random(f"twins {seed}")).plan()


def leaves(plan: Plan) -> Iterator[Leaf]:
    """All leaves of a plan, also what its leaves cause."""
    for caller in plan.callers:
        for call in caller:
            yield from leaves_of(call.tree)


def leaves_of(tree: Tree) -> Iterator[Leaf]:
    """The leaves of a tree, also what its leaves cause."""
    if isinstance(tree, Many):
        children = tree.parts
    else:
        yield tree
        becomes = () if tree.becomes is None else (tree.becomes,)
        children = (*tree.links, *tree.errbacks, *tree.calls, *becomes)
    for child in children:
        yield from leaves_of(child)


def kinds_of(tree: Tree) -> Iterator[str]:
    """The kinds of a canvas and of those in it."""
    if isinstance(tree, Many):
        yield tree.kind
        for part in tree.parts:
            yield from kinds_of(part)


def shown(value: object, indent: str = "") -> str:
    """A plan as it would be written, without what is as by default."""
    inner = indent + "  "
    if isinstance(value, tuple) and value:
        return "(\n" + "".join(f"{inner}{shown(one, inner)},\n" for one in value) + f"{indent})"
    if not is_dataclass(value):
        return repr(value)
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    own = [name for name, field in value.__dataclass_fields__.items() if given[name] != field.default]
    return f"{type(value).__name__}({', '.join(f'{name}={shown(given[name], indent)}' for name in own)})"


class _Maker:
    """Makes one plan. Its few tasks and keys make sure that its messages meet each other."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._tasks = chance.sample(sorted(TASKS), chance.choice([1, 1, 2]))
        self._keys = ["a", "b"][: chance.choice([1, 1, 2])]
        self._count = 0

    def plan(self) -> Plan:
        callers = [self._caller() for _ in range(self._chance.randint(2, 4))]
        return Plan(tuple(callers))

    def _caller(self) -> tuple[Call, ...]:
        calls = [self._call() for _ in range(self._chance.randint(1, 2))]
        if (
            self._chance.random() < 0.3
        ):  # one more for the same lock, as soon as the caller knows of the end of the first
            first = next(leaves_of(calls[0].tree))
            calls.insert(1, Call(replace(self._leaf(0, is_alone=True), task=first.task, key=first.key)))
        return tuple(calls)

    def _call(self) -> Call:
        if self._chance.random() < 0.4:
            leaf = self._leaf(2, is_alone=True)
            return Call(leaf, is_stamped=self._chance.random() < 0.1)
        return Call(self._tree(3), is_stamped=self._chance.random() < 0.2)

    def _tree(self, depth: int) -> Tree:
        kind = self._chance.choice(["leaf", "chain", "group", "chord"])
        if depth == 0 or kind == "leaf" or self._count >= LEAVES:
            return self._leaf(depth)
        return Many(kind, tuple(self._tree(depth - 1) for _ in range(self._chance.randint(2, 3))))

    def _leaf(self, depth: int, *, is_alone: bool = False) -> Leaf:
        self._count += 1
        name, chance = f"n{self._count}", self._chance
        does = chance.choices(
            ["returns", "fails", "ignores", "retries", "autoretries"], [30, 2, 1 if is_alone else 0, 3, 2]
        )[0]
        task = chance.choice(self._tasks) if chance.random() < 0.9 else PLAIN
        more = depth > 0 and self._count < LEAVES
        becomes = self._becomes() if more and does == "returns" and chance.random() < 0.1 else None
        return Leaf(
            name=name,
            task=task,
            key=chance.choice(self._keys),
            does=does,
            times=chance.choice([1, 1, 2, 3]) if does in {"retries", "autoretries"} else 0,
            seconds=chance.choice(SECONDS),
            lingers=0.1 if chance.random() < 0.15 else 0.0,
            is_immutable=chance.random() < 0.5,
            countdown=0.15 if chance.random() < 0.1 else None,
            expires=self._expires(is_alone=is_alone, may_be_soon=does == "returns"),
            links=self._links(depth) if more and chance.random() < 0.25 else (),
            errbacks=(self._leaf(0),) if more and becomes is None and chance.random() < 0.3 else (),
            calls=(self._leaf(0),) if more and chance.random() < 0.1 else (),
            becomes=becomes,
        )

    def _links(self, depth: int) -> tuple[Tree, ...]:
        return (self._leaf(depth - 1),) if self._chance.random() < 0.7 else (self._leaf(0), self._leaf(0))

    def _becomes(self) -> Tree:
        return self._leaf(0) if self._chance.random() < 0.6 else Many("chain", (self._leaf(0), self._leaf(0)))

    def _expires(self, *, is_alone: bool, may_be_soon: bool) -> float | None:
        if self._chance.random() > (0.2 if is_alone else 0.05):
            return None
        soon = [SOON] if may_be_soon else []
        return self._chance.choice([OVER, FAR, *soon] if is_alone else [FAR])
