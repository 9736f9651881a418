"""Arrivals: what a worker's main process tells of a message that reaches it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from celery_redislock import LockedTask
from celery_redislock.message.delivery import Delivery
from celery_redislock.message.header import HEADER, Header
from celery_redislock.protocol.tokens import mint_nonce


def arrived(task: LockedTask, request: Mapping[str, Any], held_for: float = 0.0) -> Delivery:
    """The delivery of a message that its worker has had for `held_for` seconds."""
    assert task.lock_plan is not None
    overdue_at = time.monotonic() - held_for + task.lock_plan.broker.overdue_after
    header = Header.read(request.get(HEADER))
    return Delivery.arrived(mint_nonce(), request, header, overdue_at=overdue_at, acks_late=bool(task.acks_late))
