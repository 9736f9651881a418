"""The crowd: thousands of messages wait for one key, and what that costs the lock server and the worker."""

from __future__ import annotations

import time
from typing import Any

import psutil

from chaos.hall import Hall
from chaos.stage import Stage

#: Seconds until all messages have been delivered once, for each thousand of them.
DELIVERED = 40.0
#: Nothing is counted for so many seconds after that, and then for so many.
SETTLED, COUNTED = 5.0, 10.0


def gather(stage: Stage, size: int) -> None:
    """Have `size` messages wait for one key, and write down what that costs."""
    with Hall(stage, "crowd") as hall, hall.holding_the_key():
        worker = hall.start_worker()
        main = psutil.Process(worker.process.pid)
        before, began = main.memory_info().rss, time.monotonic()
        for _ in range(size):
            hall.app.tasks["chaos.late"].apply_async((hall.key, "", 0.0))
        hall.wait_until(
            lambda: worker.output().count("] received") >= size,
            f"{size} messages are delivered",
            DELIVERED * size / 1000,
        )
        delivered = time.monotonic() - began
        time.sleep(SETTLED)
        commands = _commands_run(stage)
        time.sleep(COUNTED)
        hall.write(
            "crowd",
            size=size,
            delivered_in=delivered,
            seconds=COUNTED,
            commands=_commands_run(stage) - commands,
            bytes=main.memory_info().rss - before,
        )


def _commands_run(stage: Stage) -> int:
    """How many commands the lock server of the drills has run, also in scripts."""
    stats: dict[str, Any] = stage.drill_locks.client.info("commandstats")
    return sum(int(command["calls"]) for command in stats.values())
