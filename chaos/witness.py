"""The witness: what a worker's main process writes down of those who wait in it. No signal tells this, so it looks on.

``waits``: a message waits in line. ``begins``: it waits no longer; ``called`` says whether it is its turn.
``full``: it is the turn of a message, and its worker has no free slot.
``leaves``: nobody waits in this process any longer.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery_redislock.line.room import Room
from celery_redislock.line.waiters import Waiter
from celery_redislock.worker.waiting_message import WaitingMessage
from chaos.windows import TOLD_AGAIN
from tests.lab.ledger import Ledger


def write_down_waiting(ledger: Ledger) -> None:
    """Write down, from now on, who waits in this process and who is called."""
    enter, leave_all, begin, can_begin = Room.enter, Room.leave_all, WaitingMessage.begin, WaitingMessage.can_begin
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
        begin(waiting, called=called)

    def may_begin(waiting: WaitingMessage) -> bool:
        has_slot = can_begin(waiting)
        if not has_slot and time.monotonic() > told.get(waiting.key, 0.0) + TOLD_AGAIN:
            told[waiting.key] = time.monotonic()
            write("full", key=waiting.key)
        return has_slot

    def all_leave(room: Room) -> list[Waiter]:
        write("leaves")
        return leave_all(room)

    for owner, name, witness in (
        (Room, "enter", enters),
        (Room, "leave_all", all_leave),
        (WaitingMessage, "begin", begins),
        (WaitingMessage, "can_begin", may_begin),
    ):
        setattr(owner, name, witness)
