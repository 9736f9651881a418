"""Arrivals: what a worker's main process tells of a message that reaches it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from celery_redislock import LockedTask
from celery_redislock.message.delivery import Delivery, was_delivered_before
from celery_redislock.message.header import HEADER, Header
from celery_redislock.protocol.tokens import mint_nonce


def arrived(task: LockedTask, request: Mapping[str, Any], held_for: float = 0.0) -> Delivery:
    """The delivery of a message that its worker has had for `held_for` seconds."""
    assert task.lock_plan is not None
    overdue_at = time.monotonic() - held_for + task.lock_plan.broker.overdue_after
    is_redelivered = was_delivered_before(request)
    delivery = Delivery("", overdue_at, acks_late=bool(task.acks_late), is_redelivered=is_redelivered)
    return delivery.for_run(mint_nonce(), Header.read(request.get(HEADER)))
