"""Cut short: a run that SystemExit has ended, and that Celery takes for running for ever in a pool without children."""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import task_postrun
from celery.worker import state


def connect() -> None:
    """Have Celery call `forget` whenever a task has run in this process, which is a worker's."""
    task_postrun.connect(forget, weak=False)


def forget(task_id: str = "", **_: Any) -> None:
    """Have Celery forget the request of a run that has ended by SystemExit, or by another error that is no Exception.

    In the pools `threads`, `gevent` and `eventlet` Celery 5.7 fails amid its own handling of such a run: the request
    counts as running as long as the worker lives. Those who wait in line in this worker wait for a free slot, and that
    run would keep its slot for ever. In a child of `prefork` there is nothing to forget.
    """
    error = sys.exception()
    if error is None or isinstance(error, Exception):
        return
    request = state.requests.get(task_id)
    if request is not None:
        state.task_ready(request)
