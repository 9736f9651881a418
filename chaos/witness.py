"""The witness: what a worker's main process writes down of those who wait in it. No signal tells this, so it looks on.

``waits``: a message waits in line. ``begins``: it waits no longer; ``called`` says whether it is its turn.
``full``: it is the turn of a message, and its worker has no free slot.
``leaves``: nobody waits in this process any longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from celery_redislock.line.room import Room
from celery_redislock.line.waiters import Waiter
from celery_redislock.worker.waiting_message import WaitingMessage
from chaos.windows import TOLD_AGAIN
from tests.lab.ledger import Ledger


def write_down_waiting(ledger: Ledger) -> None:
    """Write down, from now on, who waits in this process and who is called."""
    enter, leave_all, take_turn, is_ready = (
        Room.enter,
        Room.leave_all,
        WaitingMessage.take_turn,
        WaitingMessage.is_ready,
    )
    told: dict[str, float] = {}

    def write(event: str, **facts: Any) -> None:
        ledger.write({"event": event, "worker": os.getpid(), "at": time.monotonic(), **facts})

    def who(waiter: Waiter) -> dict[str, Any]:
        facts = {"key": waiter.key, "rank": waiter.rank, "waiter": id(waiter)}
        return {**facts, "task_id": waiter.request.id} if isinstance(waiter, WaitingMessage) else facts

    def enters(room: Room, waiter: Waiter) -> None:
        write("waits", **who(waiter))  # before it waits: its room may call it at once
        enter(room, waiter)

    def begins(waiting: WaitingMessage, *, called: bool) -> None:
        write("begins", **who(waiting), called=called)
        take_turn(waiting, called=called)

    def may_run(waiting: WaitingMessage) -> bool:
        has_slot = is_ready(waiting)
        if not has_slot and time.monotonic() > told.get(waiting.key, 0.0) + TOLD_AGAIN:
            told[waiting.key] = time.monotonic()
            write("full", key=waiting.key)
        return has_slot

    def all_leave(room: Room, waiters: Iterable[Waiter]) -> list[Waiter]:
        write("leaves")
        return leave_all(room, waiters)

    for owner, name, witness in (
        (Room, "enter", enters),
        (Room, "leave_all", all_leave),
        (WaitingMessage, "take_turn", begins),
        (WaitingMessage, "is_ready", may_run),
    ):
        setattr(owner, name, witness)
