"""LockedRequest: the worker main process's side."""

from __future__ import annotations

import functools
import os
import threading
import time
import types
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.worker.request import Request
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_redislock.app import server_of
from celery_redislock.errors import LockConfigError
from celery_redislock.message.comeback import custom_headers
from celery_redislock.message.delivery import DELIVERY, Delivery, hide_headers, is_given_back
from celery_redislock.message.header import HEADER, Header
from celery_redislock.server.tokens import mint_nonce
from celery_redislock.task.endings import CameBack, CameBackInOutage, SentBack, Skipped

from .children import Children, Run
from .reminder import Reminder

_children = Children()
_reminder = Reminder()


class LockedRequest(Request):
    """A request whose token begins with a nonce that the main process knows too.

    So it can release the lock of a child that has died. The nonce is minted for every delivery: a message cannot
    bring one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serializer = registry.type_to_name.get(self.content_type)
        sent = self.message.headers or {}
        hidden = custom_headers(sent) if "headers" in sent else None
        self.request_dict[DELIVERY] = Delivery(mint_nonce(), time.monotonic(), serializer, hidden)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        """Remember what the child `pid` runs now; pools without children run it in this process.

        Those of greenlets give the greenlet's id for `pid`, which is a thread's here.
        """
        run = self.run
        if run is not None and pid not in {os.getpid(), threading.get_ident()}:
            _children.accepted(pid, run)
        super().on_accepted(pid, time_accepted)

    @property
    def run(self) -> Run | None:
        """What runs for this request; None where locks are switched off."""
        task: Any = self.task
        plan = task.lock_plan
        if plan is None or not plan.enabled:
            return None
        left = Header.read(self.request_dict.get(HEADER)).left
        retries = self.request_dict.get("retries") or 0
        return Run(str(self.id), plan, self.args, self.kwargs, self.request_dict[DELIVERY].nonce, left, retries)

    def revoked(self) -> bool:
        """Whether it was revoked, or has expired; what was left to it is free then."""
        if self._already_revoked:  # type: ignore[attr-defined]
            return True
        if not super().revoked():
            return False
        run = self.run
        if run is not None and run.left is not None:
            server_of(run.plan.app).give_up(*run.left, is_to_come=run.is_to_come)
        return True

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Send the event of a run that a policy has ended, which Celery ends without one."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if not return_ok:  # retry_on_worker_lost sends a new attempt, with the headers of this one
            hide_headers(self._context)  # type: ignore[attr-defined]
        if isinstance(error, CameBack) or is_given_back(self.task, error):
            _children.goes_on(self.worker_pid, self.request_dict[DELIVERY].nonce)
        if isinstance(error, CameBackInOutage):
            _reminder.count()
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, Skipped):
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        elif isinstance(error, SentBack):
            self.send_event("task-retried", exception=str(error), traceback="")
        return result


def locked_request(task: str, request: Any) -> type[LockedRequest]:
    """The class of a task's requests: `LockedRequest`, in front of the user's own class where there is one.

    Args:
        task: The task's name, for the message.
        request: Its attribute ``Request``, resolved.

    Raises:
        LockConfigError: That is no subclass of Celery's.
    """
    if not (isinstance(request, type) and issubclass(request, Request)):
        raise LockConfigError(f"{task}: Request = {request!r} is not allowed; allowed: a subclass of {Request!r}")
    return _in_front_of(request)  # type: ignore[arg-type] # mypy takes its instances' __hash__ for its own


@functools.cache
def _in_front_of(request: type[Request]) -> type[LockedRequest]:
    if issubclass(request, LockedRequest):
        return request
    both = types.new_class(request.__name__, (LockedRequest, request))
    both.__module__ = request.__module__
    return both
