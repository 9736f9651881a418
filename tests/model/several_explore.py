"""Several locks for one run, on paper: finds every state, and the promise that does not hold in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from promises import Promise

from .search import Exploration
from .several import IN_SLOT, Steps
from .several_world import Message, Mistake, Place, Scenario, State, World, wanted


def broken_in(world: World, scenario: Scenario) -> Promise | None:
    """The promise that does not hold in a state.

    What is held belongs to a run. What is kept is for a message that was called, or that its room is asking for now; or
    for the one message of a room for which it keeps keys. No message has two permits of one key, though one of its runs
    may have left one to its undo.
    """
    used = Counter("".join(scenario.used(number, one) for number, one in enumerate(world.messages)))
    if any(count > 1 + (key in scenario.twice) for key, count in used.items()):
        return Promise.AT_MOST_N
    for key, permits in enumerate(world.keys):
        owners = list[int]()
        for found in filter(None, permits):
            one = world.messages[found.who]
            is_of_run = one.place in IN_SLOT and one.run == found.run
            if found.state is State.HELD and not is_of_run and (key, found) not in world.undos:
                return Promise.FREED
            gathers = any(at and at.message == found.who for at in world.rooms)
            if found.state is State.KEPT and not (one.is_called or one.keeps or gathers):
                return Promise.RESERVED
            if found.state is State.KEPT or (found.state is State.HELD and is_of_run):
                owners.append(found.who)
        if len(owners) > len({*owners}):
            return Promise.RESERVED
    keepers = [one.room for one in world.messages if one.keeps]
    return Promise.RESERVED if len(keepers) > len(set(keepers)) else None


#: The steps from each state: whose step it is, and the state that it leads to.
Graph = dict[int, list[tuple[str, int]]]


def explore(scenario: Scenario, mistakes: Set[Mistake] = frozenset()) -> Exploration:
    """Find all that can happen in `scenario`, breadth first, until a promise is broken."""
    steps, names = Steps(scenario, mistakes), sorted({*"".join((*scenario.wants, *scenario.inside))})
    waiting = tuple(
        Message(Place.WAITS, room, wanted(scenario.wants[number])[number % 2], 1)
        for number, room in enumerate(scenario.waiting)
    )
    messages = (*waiting, *(Message(),) * (len(scenario.wants) - len(waiting)))
    free = tuple((None,) * (1 + (name in scenario.twice)) for name in names)
    start = World(free, ((),) * len(names), messages, (None,) * len(scenario.slots), scenario.faults)
    found, states, ways, graph = {start: 0}, [start], [(0, "")], Graph()

    def way_to(number: int) -> tuple[str, ...]:
        labels = list[str]()
        while number:
            number, label = ways[number]
            labels.append(label)
        return tuple(labels[::-1])

    for at, world in enumerate(states):  # what is found meanwhile is appended
        if broken := broken_in(world, scenario):
            return Exploration(found, broken, way_to(at))
        graph[at] = []
        for label, new, actor in steps.of(world):
            if new == world:
                continue
            if new not in found:
                found[new] = len(states)
                states.append(new)
                ways.append((at, label))
            graph[at].append((actor, found[new]))
        if not graph[at] and any(one.place is not Place.DONE for one in world.messages):
            return Exploration(found, Promise.ENDS, (*way_to(at), "nothing moves"))
        if not graph[at] and (any(map(any, world.keys)) or any(world.lines)):
            return Exploration(found, Promise.FREED, way_to(at))
    for circle in fair(graph):
        worlds = [states[at] for at in circle]
        for number in {*range(len(messages))} - scenario.endless:
            waits = all(world.messages[number].place not in {Place.QUEUE, Place.DONE} for world in worlds)
            # While others come without end, there may be no free slot; but once keys are kept for it, it has one.
            if waits and (not scenario.endless or any(world.messages[number].keeps for world in worlds)):
                trace = (*way_to(min(circle)), f"{number} waits for ever, in {len(circle)} states")
                return Exploration(found, Promise.ENDS, trace)
    return Exploration(found)


def fair(graph: Graph) -> Iterator[list[int]]:
    """The circles that may go on for ever although each step that is possible again and again is taken at times."""
    for circle in circles(graph):
        inside = set(circle)
        able = {actor for at in circle for actor, _ in graph[at] if actor}
        left = able - {actor for at in circle for actor, to in graph[at] if to in inside}
        if left:
            yield from fair({at: graph[at] for at in circle if not any(actor in left for actor, _ in graph[at])})
        else:
            yield circle


def circles(graph: Graph) -> Iterator[list[int]]:
    """The largest sets of states in which each leads to each: Tarjan's algorithm."""
    low, stack, done = dict[int, int](), list[int](), set[int]()
    for root in graph:
        work = [] if root in low else [(root, len(low), iter(graph[root]))]
        while work:
            at, number, steps = work[-1]
            if at not in low:
                low[at] = number
                stack.append(at)
            for _, to in steps:
                if to in graph and to not in low:
                    work.append((to, len(low), iter(graph[to])))
                    break
                if to in graph and to not in done:
                    low[at] = min(low[at], low[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == number:
                    circle = stack[stack.index(at) :] if stack[-1] != at else [at]
                    del stack[-len(circle) :]
                    done.update(circle)
                    if len(circle) > 1:
                        yield circle
