"""What a Cluster of three nodes costs next to one server, and how it spreads ever more locks."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import redis
from redis.crc import key_slot
from rich.table import Table

from celery_redislock.connection.cluster import ClusterStore
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.hold import Owner
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Command
from tests.lab.nodes import three_nodes, url_of

from .cycle import Caller
from .findings import Findings
from .server import valkey

#: What one of three nodes may get of all commands, at least and at most.
SHARE = 0.30, 0.37
#: How many locks are held while others are acquired; and how many of the others.
HELD, ACQUIRES = (1_000, 10_000, 100_000), 5_000
#: The 99th percentile of an acquire may grow by so much from the fewest held locks to the most.
FLAT = 1.5
#: In how many turns the cycles of each case are done.
TURNS = 5
LEASE = 600.0


class Cost(NamedTuple):
    """Of cycles of acquire and release, while so many locks are held."""

    held: int
    shares: list[float]
    """Of each node in all commands."""
    cpu: float
    """Microseconds of CPU time that all nodes together took for one cycle: the median of the turns."""
    median: float
    highest: float
    """The median and the 99th percentile of an acquire, in microseconds."""


class _Apart:
    """Servers that share the keys without being a Cluster: what they cost is not the price of a Cluster."""

    def __init__(self, stores: Sequence[LockStore]) -> None:
        self._stores = stores

    def acquire(self, owner: Owner, lease: float) -> object:
        return self._stores[_third(owner.hold.demand.key)].acquire(owner, lease)

    def send(self, command: Command) -> object:
        return self._stores[_third(command.keys[0])].send(command)


class _Case(NamedTuple):
    """Where locks are, and by what they are asked for there."""

    nodes: list[redis.Redis]
    store: LockStore | _Apart
    node_of: Callable[[str], redis.Redis]


def main(findings: Findings) -> None:
    findings.chapter("A Cluster")
    table = Table(
        title=f"cluster: {ACQUIRES:,} cycles of acquire + release while others are held, one after the other",
        title_justify="left",
        caption="CPU: of all nodes together, including what they take when idle. All share the machine.",
        caption_justify="left",
    )
    for column in ("locks on", "held", "share of the nodes", "servers' µs a cycle", "acquire, median µs", "p99 µs"):
        table.add_column(column, justify="right")
    with ExitStack() as stack:
        costs = _measure(_cases(stack))
    for name, of_name in costs.items():
        for cost in of_name:
            shares = ", ".join(f"{share:.1%}" for share in cost.shares)
            figures = (f"{cost.cpu:.1f}", f"{cost.median:.0f}", f"{cost.highest:.0f}")
            table.add_row(name, f"{cost.held:,}", shares, *figures)
    findings.show(table)
    _judge(findings, *costs.values())


def _cases(stack: ExitStack) -> dict[str, _Case]:
    urls = [stack.enter_context(valkey()) for _ in range(3)]
    apart = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
    stores = [LockStore.of(connect(url, {})) for url in urls]
    alone_url = stack.enter_context(valkey())
    alone = stack.enter_context(redis.Redis.from_url(alone_url))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    nodes = stack.enter_context(three_nodes(Path(folder, "nodes")))
    client = connect(url_of(nodes), {})
    at = {node.port: node.client for node in nodes.primaries}
    return {
        "one server": _Case([alone], LockStore.of(connect(alone_url, {})), lambda key: alone),
        "three servers": _Case(apart, _Apart(stores), lambda key: apart[_third(key)]),
        "three nodes": _Case(
            [*at.values()], ClusterStore(client), lambda key: at[client.owner(key_slot(key.encode()))[1]]
        ),
    }


def _judge(findings: Findings, alone: Sequence[Cost], apart: Sequence[Cost], spread: Sequence[Cost]) -> None:
    most = max(share for cost in spread for share in cost.shares)
    least = min(share for cost in spread for share in cost.shares)
    findings.judge("cluster: the largest share of one of three nodes", most, SHARE[1])
    findings.judge("cluster: what the smallest share lacks of a third", 1 / 3 - least, 1 / 3 - SHARE[0])
    growth = spread[-1].highest / spread[0].highest
    findings.judge(f"cluster: p99 of an acquire with {HELD[-1]:,} held, relative to {HELD[0]:,}", growth, FLAT)
    findings.say(
        f"**How it spreads.** A cycle takes {spread[0].cpu:.1f} µs of CPU time of the three nodes together, and "
        f"{alone[0].cpu:.1f} µs of one server. Three servers that are not a Cluster take {apart[0].cpu:.1f} µs: "
        "sharing the work among three processes, which one caller never keeps busy, accounts for the difference from "
        f"one server, and the Cluster for the rest. A node had {least:.1%} to {most:.1%} of the commands: hash slots "
        "spread the keys as evenly as chance would, and only the Cluster itself knows its nodes. Neither the time of "
        "an acquire nor the nodes' CPU time grows with the number of held locks."
    )


def _measure(cases: Mapping[str, _Case]) -> dict[str, list[Cost]]:
    """The cases take turns, so that everything else on the machine affects all of them."""
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    for already, held in itertools.pairwise((0, *HELD)):
        for case in cases.values():
            _hold(range(already, held), case.node_of)
        turns: dict[str, list[_Turn]] = {name: [] for name in cases}
        for number in range(TURNS):
            for name, case in cases.items():
                turns[name].append(_turn(case, f"free {held} {number}"))
        for name in cases:
            costs[name].append(_cost(held, turns[name]))
    return costs


def _hold(numbers: Iterable[int], node_of: Callable[[str], redis.Redis]) -> None:
    """Take so many locks, without waiting for each answer."""
    token = tokens.mint(tokens.mint_nonce(), tokens.Attempt("held", 0, 0), tokens.origin("worker@host", "shop.export"))
    pipelines: dict[redis.Redis, Any] = {}
    for number in numbers:
        command = commands.acquire(_demand("held", number), token, LEASE)
        node = node_of(command.keys[0])
        if node not in pipelines:
            node.script_load(command.script.text)
            pipelines[node] = node.pipeline(transaction=False)
        pipelines[node].evalsha(command.script.sha, len(command.keys), *command.keys, *command.values)
    for pipeline in pipelines.values():
        pipeline.execute()


class _Turn(NamedTuple):
    calls: list[int]
    """The scripts that each node has run."""
    cpu: float
    """Microseconds of CPU time of all nodes together for one cycle."""
    seconds: list[float]
    """That each acquire took."""


def _turn(case: _Case, stem: str) -> _Turn:
    token = tokens.mint(tokens.mint_nonce(), tokens.Attempt("mine", 0, 0), tokens.origin("worker@host", "shop.export"))
    before = [_spent(node) for node in case.nodes]
    seconds = []
    for one in range(ACQUIRES // TURNS):
        demand = _demand(stem, one)
        began = time.perf_counter()
        case.store.acquire(Caller(demand, token), LEASE)
        seconds.append(time.perf_counter() - began)
        case.store.send(commands.release(demand, token.owner))
    after = [_spent(node) for node in case.nodes]
    calls = [last - first for (last, _), (first, _) in zip(after, before, strict=True)]
    cpu = sum(last - first for (_, last), (_, first) in zip(after, before, strict=True))
    return _Turn(calls, 1e6 * cpu / len(seconds), seconds)


def _cost(held: int, turns: Sequence[_Turn]) -> Cost:
    calls = [sum(of_node) for of_node in zip(*(turn.calls for turn in turns), strict=True)]
    of_hundred = [1e6 * each for each in quantiles((one for turn in turns for one in turn.seconds), n=100)]
    shares = [each / sum(calls) for each in calls]
    return Cost(held, shares, median(turn.cpu for turn in turns), of_hundred[49], of_hundred[98])


def _third(key: str) -> int:
    return key_slot(key.encode()) % 3


def _spent(node: redis.Redis) -> tuple[int, float]:
    """The scripts that a node has run, and its CPU seconds."""
    cpu = node.info("cpu")
    calls = node.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    return calls, cpu["used_cpu_user"] + cpu["used_cpu_sys"]


def _demand(stem: str, number: int) -> Demand:
    return Demand(f"redislock:{{shop.export:{stem}:{number}}}")
