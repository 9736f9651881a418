"""Celery finds a request by its task id: one that ends must not hide another request of the same id, such as a run."""

from __future__ import annotations

from typing import Any

from celery.worker import state
from celery.worker.request import Request


def task_ready(request: Request) -> None:
    """As Celery's own, but another request of the same id can still be found, and terminated."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    find_again(request, other)


def find_again(ended: Request, other: Request | None) -> None:
    """Have Celery find another request of the id of `ended`, for which it knows none any more.

    Args:
        ended: It waits, or has ended.
        other: The request that Celery found before; `ended` may have replaced a run when it was delivered.
    """
    if other is None or other is ended:
        active: Any = state.active_requests
        # Not the WeakSet itself, which threads of the pool may change while it is read, but its set of references.
        requests = [ref() for ref in tuple(active.data)]
        other = next((one for one in requests if one is not None and one is not ended and one.id == ended.id), None)
    if other is not None:
        state.requests.setdefault(ended.id, other)
