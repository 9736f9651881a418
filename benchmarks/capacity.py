"""What one primary carries: cycles of acquire and release per second, from more and more client processes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any, NamedTuple

import redis
from rich.table import Table

from celery_redislock.connection.connect import connect
from celery_redislock.protocol import commands, scripts, tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Command, Tag

from .findings import Findings
from .server import valkey

#: Client processes with one connection each, and with many connections that all have a command on its way: these stand
#: for many hosts, for which there are too few CPUs here.
CLIENTS, CROWDS = (1, 2, 4, 8), (1, 2, 4)
AT_ONCE = 50
SECONDS = 5.0


class Load(NamedTuple):
    """What the server has carried in a second."""

    cycles: float
    cpu: float
    """The share of one CPU that the server took."""


def main(findings: Findings) -> None:
    findings.chapter("What one primary carries")
    table = Table(
        title=f"capacity: cycles of acquire + release, each on its own key, for {SECONDS:g} s",
        title_justify="left",
        caption="The server runs scripts in one thread, so one CPU is its limit. All processes share the machine.",
        caption_justify="left",
    )
    table.add_column("clients")
    for column in ("cycles/s", "commands/s", "server's CPU", "server's µs a cycle", "cycles/s at 100 %"):
        table.add_column(column, justify="right")
    waiting = [_measure(table, f"{number}, a connection each", number, 1) for number in CLIENTS]
    crowds = [_measure(table, f"{number}, {AT_ONCE} connections each", number, AT_ONCE) for number in CROWDS]
    findings.show(table)
    at_once = [*CLIENTS, *(number * AT_ONCE for number in CROWDS)]
    loads = {"Lock": [load.cycles for load in (*waiting, *crowds)]}
    labels = {"x": "commands on their way at once", "y": "cycles per second", "logarithmic": "x"}
    most = max(crowds, key=lambda load: load.cycles)
    title = f"One primary serves up to {most.cycles:,.0f} runs per second on this machine"
    findings.lines("capacity", title, at_once, loads, **labels)
    full = most.cycles / most.cpu
    findings.say(
        "**How it grows.** A run takes one acquire and one release, each about "
        f"{1e6 * most.cpu / most.cycles / 2:.0f} µs of the server's single thread. Neither depends on how many locks "
        f"are held. So one primary on this machine carries {most.cycles:,.0f} runs per second as measured, and "
        f"{full:,.0f} if nothing else used its CPU. A run that lasts for minutes adds a renewal every ten seconds, "
        "which [costs less](#renewal-one-process-holds-many-locks).\n\n**Beyond that, by arithmetic.** "
        f"{100 * round(full / 200):,} runs per second fill half a primary. From there on, waiting for the server "
        "becomes noticeable; most brokers deliver fewer messages. For more, use a Cluster: all keys of one lock "
        "share a hash slot, so the locks spread over the primaries, and each primary adds as many runs. One key "
        "cannot be spread, but it is held by one run at a time and needs only two commands for each. Replicas carry "
        "nothing, because every command writes. Apps that share no locks can also have a server each "
        "(`redislock_url`)."
    )


def _measure(table: Table, name: str, number: int, at_once: int) -> Load:
    with valkey() as url, redis.Redis.from_url(url) as client:
        command = [sys.executable, "-m", "benchmarks.capacity", url, str(at_once)]
        processes = [subprocess.Popen([*command, str(one)]) for one in range(number)]
        try:
            load = _watch(client, number)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    each = load.cpu / load.cycles
    cells = (
        f"{load.cycles:,.0f}",
        f"{2 * load.cycles:,.0f}",
        f"{load.cpu:.0%}",
        f"{1e6 * each:.1f}",
        f"{1 / each:,.0f}",
    )
    table.add_row(name, *cells)
    return load


def _watch(client: redis.Redis, number: int) -> Load:
    while client.info("clients")["connected_clients"] <= number:
        time.sleep(0.05)
    time.sleep(1.0)  # until all of them are warm
    began, before = time.monotonic(), _spent(client)
    time.sleep(SECONDS)
    after, seconds = _spent(client), time.monotonic() - began
    return Load((after[0] - before[0]) / 2 / seconds, (after[1] - before[1]) / seconds)


def _spent(client: redis.Redis) -> tuple[int, float]:
    """The scripts that the server has run, and its CPU seconds."""
    cpu = client.info("cpu")
    return client.info("commandstats")["cmdstat_evalsha"]["calls"], cpu["used_cpu_user"] + cpu["used_cpu_sys"]


def _load(url: str, at_once: int, name: str) -> None:
    """Acquire and release on so many connections at once, until this process is killed."""
    client = connect(url, {"max_connections": at_once + 1})
    for script in (scripts.ACQUIRE, scripts.RELEASE):
        client.script_load(script.text)
    connections = [client.connection_pool.get_connection() for _ in range(at_once)]
    token = tokens.mint(tokens.mint_nonce(), tokens.Attempt(name, 0, 0), tokens.origin("worker@host", "shop.export"))
    demands = [Demand(f"redislock:{{shop.export:{name}:{one}}}") for one in range(at_once)]
    while True:
        _send(connections, [commands.acquire(demand, token, 30.0) for demand in demands], Tag.GRANTED)
        _send(connections, [commands.release(demand, token.owner, None) for demand in demands], Tag.RELEASED)


def _send(connections: list[Any], all_of: list[Command], expected: Tag) -> None:
    """Send a command on each connection, and then read all answers."""
    for connection, (script, keys, values) in zip(connections, all_of, strict=True):
        connection.send_command("EVALSHA", script.sha, len(keys), *keys, *values)
    answers = [connection.read_response() for connection in connections]
    if answers != [expected] * len(answers):
        raise RuntimeError(f"not all were {expected.value!r}: {answers}")


if __name__ == "__main__":
    _load(sys.argv[1], int(sys.argv[2]), sys.argv[3])
