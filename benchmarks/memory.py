"""How much of the server's memory a held lock takes."""

from __future__ import annotations

from uuid import UUID

import redis
from rich.table import Table

from celery_redislock.protocol import commands, scripts, tokens
from celery_redislock.protocol.names import Demand

from .findings import Findings
from .server import valkey

#: Bytes of server memory that a held lock may take, where there are so many.
BOUND, BOUND_AT = 320, 100_000
NUMBERS = 1, 10, 100, 1000, 10_000, 100_000
IN_FULL = (*NUMBERS, 1_000_000)
BATCH = 1000


def main(findings: Findings) -> None:
    findings.chapter("Memory of the server")
    table = Table(
        title="memory: of the server, for locks held by tasks",
        title_justify="left",
        caption="The growth of `used_memory`, from an empty server: keys, tokens, and the tables that hold them.",
        caption_justify="left",
    )
    for column in ("locks", "KB", "bytes a lock", "bound", "met"):
        table.add_column(column, justify="right")
    numbers = IN_FULL if findings.full else NUMBERS
    with valkey() as url, redis.Redis.from_url(url, socket_timeout=None) as client:
        _taken(client, 1)  # the first lock ever, for which the server makes much that stays
        taken = [_taken(client, number) for number in numbers]
    for number, much in zip(numbers, taken, strict=True):
        each = much / number
        bound, verdict = "", ""
        if number == BOUND_AT:
            bound, verdict = str(BOUND), findings.judge("memory: bytes of the server per held lock", each, BOUND)
        table.add_row(f"{number:,}", f"{much / 1024:,.1f}", f"{each:.0f}", bound, verdict)
    findings.show(table)
    labels = {"x": "held locks", "y": "KB of server memory", "logarithmic": "xy"}
    grown = {"Locks": [much / 1024 for much in taken]}
    title = f"{numbers[-1]:,} held locks take {taken[-1] / 2**20:,.0f} MB of the server's memory"
    findings.lines("memory", title, numbers, grown, **labels)
    findings.say(
        f"**How it grows.** In proportion to the locks that are held at the same time, {taken[-1] / numbers[-1]:.0f} "
        "bytes each, and not to those that were ever held: a released lock leaves nothing behind. The server doubles "
        "its tables now and then, so the figure for a lock goes up and down a little. A waiting message takes no "
        "memory there: its worker has one entry in the line of each key."
    )


def _taken(client: redis.Redis, number: int) -> int:
    """The bytes by which the memory of an empty server grows by so many locks."""
    client.flushall()
    client.script_load(scripts.ACQUIRE.text)
    origin = tokens.origin("celery@worker-01.example.com", "shop.tasks.export")
    before = client.info("memory")["used_memory"]
    for start in range(0, number, BATCH):
        with client.pipeline(transaction=False) as pipe:
            for one in range(start, min(start + BATCH, number)):
                attempt = tokens.Attempt(str(UUID(int=one << 64 | one)), 0, 0, tokens.mint_publish())
                token = tokens.mint(tokens.mint_nonce(), attempt, origin)
                demand = Demand(f"redislock:{{shop.tasks.export:{one:032x}}}")
                command = commands.acquire(demand, token, 3600.0)
                pipe.evalsha(command.script.sha, len(command.keys), *command.keys, *command.values)
            pipe.execute()
    if client.dbsize() != number:
        raise RuntimeError("not every lock was granted")
    return int(client.info("memory")["used_memory"] - before)
