"""LockedRequest: what the worker's main process does for the lock of a message: before, during and after its run."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import types
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import WorkerLostError
from celery.worker.request import Request
from celery.worker.state import task_ready
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_redislock.app import server_of
from celery_redislock.errors import LockConfigError
from celery_redislock.message.comeback import custom_headers
from celery_redislock.message.delivery import DELIVERY, Delivery, hide_headers, is_requeued
from celery_redislock.message.early_acks import EARLY_ACKS
from celery_redislock.message.header import HEADER, Header
from celery_redislock.server.tokens import Token, mint_nonce
from celery_redislock.shown import fields, shown
from celery_redislock.task.endings import CameBack, CameBackAsRetry, CameBackInOutage, Queued, Skipped

from .children import Children, Run
from .conflicts import CONFLICTS
from .reminder import Reminder
from .waiting import waiting_room_of

logger = logging.getLogger(__name__)

_children = Children()
_reminder = Reminder()


class LockedRequest(Request):
    """The main process's request for a message of a `LockedTask`.

    It mints the nonce of the execution's token and gives it to the child. So the main process, which knows the nonce
    too, can release the lock of a child that has died. No message can bring a nonce of its own.
    """

    #: Whether Celery acks the message in `on_accepted`, which is too early for a message that may have to wait.
    _is_held_back = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serializer = registry.type_to_name.get(self.content_type)
        sent = self.message.headers or {}
        hidden = custom_headers(sent) if "headers" in sent else None
        self.request_dict[DELIVERY] = Delivery("", time.monotonic(), serializer, hidden)
        self.delivered_anew(None)

    @property
    def delivery(self) -> Delivery:
        """What the child is told about this delivery of the message."""
        delivery: Delivery = self.request_dict[DELIVERY]
        return delivery

    def delivered_anew(self, offer: bytes | None) -> None:
        """Prepare an execution of the message, with a nonce of its own: its first, or one at the message's turn.

        Args:
            offer: What the key holds until the child acquires it, where the message has its turn.
        """
        task: Any = self.task
        plan = task.lock_plan
        is_locked = plan is not None and plan.enabled
        waiting_room = waiting_room_of(plan.app) if is_locked else None
        delivery = self.delivery._replace(
            nonce=mint_nonce(),
            may_wait=waiting_room is not None and waiting_room.may_keep(self, plan),
            offer=offer,
            acks_at_begin=is_locked and not task.acks_late and EARLY_ACKS.reader is not None,
        )
        self.request_dict[DELIVERY] = delivery
        if delivery.acks_at_begin:
            EARLY_ACKS.expect(delivery.nonce, self)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        """Remember what the child `pid` runs now.

        A pool of threads runs the message in this very process, and a pool of greenlets gives the id of the current
        thread or greenlet for `pid`: neither has a child that could die.
        """
        run = self.run
        if run is not None and pid not in {os.getpid(), threading.get_ident()}:
            _children.accepted(pid, run)
        self._is_held_back = self.delivery.acks_at_begin
        EARLY_ACKS.accepted(self.delivery.nonce)
        try:
            super().on_accepted(pid, time_accepted)
        finally:
            self._is_held_back = False

    def acknowledge(self) -> None:
        """Acknowledge the message; but where it is acked early, and is accepted, that is done when its run begins."""
        if self._is_held_back:
            return
        try:
            super().acknowledge()
        except AttributeError:
            # Kombu 5.7 raises it where the message came over a connection to Redis that is lost and that it could not
            # close. The worker would end.
            name = self.task.name
            logger.warning(
                "task %s[%s]: its connection is lost: its message cannot be acked",
                *(name, shown(str(self.id))),
                extra=fields("not_acked", task=name, task_id=self.id),
            )

    @property
    def run(self) -> Run | None:
        """What a child is given to run for this request; None where locks are switched off."""
        task: Any = self.task
        plan = task.lock_plan
        if plan is None or not plan.enabled:
            return None
        reservation = Header.read(self.request_dict.get(HEADER)).reservation
        if reservation is not None:
            reservation = reservation._replace(key=plan.for_any(reservation.key))
        retries = self.request_dict.get("retries") or 0
        delivery = self.delivery
        return Run(str(self.id), plan, self.args, self.kwargs, delivery.nonce, reservation, retries, delivery.offer)

    def revoked(self) -> bool:
        """Whether the message was revoked or has expired. Then the key that was reserved for it is given up."""
        if self._already_revoked:  # type: ignore[attr-defined]
            return True
        if not super().revoked():
            return False
        run = self.run
        if run is not None and self.delivery.offer is not None and run.key is not None:
            key, offer = run.key, Token.of(self.delivery.offer)
            server_of(run.plan.app).keeper.later(lambda store: store.release(key, offer, exactly=True))
        if run is not None and run.reservation is not None:
            server_of(run.plan.app).give_up(*run.reservation, is_to_come=run.is_to_come)
        return True

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Send the event of a run that a policy has ended with `Ignore`, for which Celery sends none.

        Args:
            exc_info: What the child reports: the exception that ended the run, `Ignore` and `Reject` included.
            send_failed_event: As in Celery.
            return_ok: As in Celery.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        EARLY_ACKS.read()  # the run may have begun and ended meanwhile
        EARLY_ACKS.forget(self.delivery.nonce)
        CONFLICTS.ended_by(error)
        if isinstance(error, CameBack | Skipped):
            self._give_token_back()
        if isinstance(error, Queued) and self._wait(error):
            return None
        if isinstance(error, WorkerLostError) and self.delivery.acks_at_begin and not self.acknowledged:
            return self._give_back()
        if not return_ok:  # on a lost worker Celery may publish a new attempt, with the headers of this one
            hide_headers(self._context)  # type: ignore[attr-defined]
        if isinstance(error, CameBack) or is_requeued(self.task, error):
            _children.keep_reservation(self.worker_pid, self.delivery.nonce)
        if isinstance(error, CameBackInOutage):
            _reminder.count()
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, Skipped):
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        elif isinstance(error, CameBackAsRetry):
            self.send_event("task-retried", exception=str(error), traceback="")
        # Its run has ended and may not have begun. In a cold shutdown the broker delivers the message again.
        if not self.task.acks_late and not self._already_cancelled:  # type: ignore[attr-defined]
            self.acknowledge()
        return result

    def _give_back(self) -> None:
        """Have the broker deliver the message again: its child has died before the run began."""
        task_ready(self)
        name = self.task.name
        logger.warning(
            "task %s[%s]: its process died before it began: its message is delivered again",
            *(name, shown(str(self.id))),
            extra=fields("died", task=name, task_id=self.id),
        )
        self.reject(requeue=True)

    def _give_token_back(self) -> None:
        task: Any = self.task
        room = waiting_room_of(task.lock_plan.app)
        if room is not None:
            room.give_token_back(self)

    def _wait(self, queued: Queued) -> bool:
        """Have the message wait in line; False where this worker keeps none."""
        task: Any = self.task
        room = waiting_room_of(task.lock_plan.app)
        if room is None:
            return False
        _children.keep_reservation(self.worker_pid, self.delivery.nonce)
        self._apply_result = None  # nothing of its last run: thousands of messages may wait for long
        self.request_dict[HEADER] = queued.header.wire
        if queued.is_shown:
            self.send_event("task-retried", exception=str(queued.args[0]), traceback="")
        room.keep(self, queued, task.lock_plan, self.delivered_anew)
        return True


def locked_request(task: str, request: Any) -> type[LockedRequest]:
    """The class of a task's requests: `LockedRequest`, in front of the user's own class where there is one.

    Args:
        task: The task's name, for the error's message.
        request: The class that the task's attribute ``Request`` names.

    Raises:
        LockConfigError: `request` is no subclass of Celery's `Request`.
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
