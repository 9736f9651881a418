"""LockedRequest: what the worker's main process does for a message's lock before, during and after its run."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
import types
from contextlib import nullcontext
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import WorkerLostError
from celery.exceptions import Retry
from celery.worker import state
from celery.worker.request import Request
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_redislock.app import server_of
from celery_redislock.errors import LockConfigError, fields, run_named
from celery_redislock.message.delivery import DELIVERY, STOPS, Delivery, hide_headers, is_requeued, was_delivered_before
from celery_redislock.message.header import HEADER, Header
from celery_redislock.message.republish import custom_headers
from celery_redislock.policy import Ended, Place, Verdict, hands_over
from celery_redislock.policy.skip import Skipped, store_revoked
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt, mint_nonce
from celery_redislock.task.lost import NextAttempt, attempts_before, in_hook, is_retried_if_lost
from celery_redislock.task.plan import LockPlan, give_up_reservation

from . import worker_port
from .children import CHILDREN, Run
from .early_acks import EARLY_ACKS
from .lock_events import lock_events_of
from .remote_control import RUN_COUNTS
from .waiting import WaitingRoom, waiting_room_of

logger = logging.getLogger(__name__)

#: A message fails once this many children have died with it before its run began. One death may be bad luck, such as
#: the out-of-memory killer; three mean that the message itself kills them.
MOST_DEATHS = 3


class LockedRequest(Request):
    """The main process's request for a message of a `LockedTask`.

    It mints the nonce of the execution's token and passes it to the child. Because the main process knows the nonce
    too, it can release the lock of a dead child. Any nonce that arrives in the message is overwritten.
    """

    #: Whether to ignore an ack: Celery acks in `on_accepted`, too early for a message that may have to wait.
    _is_held_back = False
    #: Whether the message may still be published again when it can no longer wait in this worker.
    may_leave = True
    #: For how many seconds the message is delayed when it is published again.
    leaves_for = 0.0
    #: What the child needs to know about this delivery of the message.
    delivery: Delivery
    #: What a child is given to run; None if locks are switched off.
    run: Run | None = None
    #: Whether an operator has dropped the message while it waited.
    is_dropped = False
    #: What the message waited for in this worker.
    _waited_for: tuple[Demand, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sent = self.message.headers or {}
        #: When the worker received the message, by `time.monotonic()`.
        self.received_at = time.monotonic()
        task: Any = self.task
        self.delivery = Delivery(
            nonce="",
            overdue_at=self.received_at + task.lock_plan.broker.overdue_after if task.lock_plan else math.inf,
            serializer=registry.type_to_name.get(self.message.content_type),  # in protocol 1, Celery's own is None
            headers=custom_headers(sent) if "headers" in sent else None,
            acks_late=bool(task.acks_late),
            is_redelivered=was_delivered_before(self.request_dict),
            stops=STOPS.count[0] - worker_port.is_closing(self.message.channel),
        )
        self.prepare_run(None)

    def prepare_run(self, call: bytes | None) -> None:
        """Prepare an execution of the message, with a new nonce: at its delivery, and again when its turn comes.

        Args:
            call: What the key holds until the child acquires it; None if the message was not called to its key.
        """
        task: Any = self.task
        plan: LockPlan | None = task.lock_plan
        nonce, request, following = mint_nonce(), self.request_dict, None
        room = waiting_room_of(self.app, self.hostname)
        header, run, may_wait, acks_at_begin = Header.read(request.get(HEADER)), None, False, False
        if plan is not None and plan.enabled:
            may_wait = room is not None and room.may_keep(self)
            if room is not None and plan.broker.reaches_queues and self.delivery.queue is None:
                self.delivery = self.delivery._replace(queue=room.queue_of(self.message))
            acks_at_begin = not task.acks_late and EARLY_ACKS.reader is not None
            if acks_at_begin:
                EARLY_ACKS.expect(nonce, self)
            options, reservation = plan.options_for(header), header.reservation
            if hands_over(options) and is_retried_if_lost(task, request):
                following = NextAttempt(plan, request, nonce, reservation)
            retries = attempts_before(request)
            run = Run(str(self.id), plan, options, nonce, reservation, retries, call, self._waited_for, following)
        self.run = run
        self.delivery = self.delivery.for_run(
            nonce, header, may_wait=may_wait, call=call if run else None, acks_at_begin=acks_at_begin
        )
        request[DELIVERY] = tuple(self.delivery)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        """Record what the child `pid` runs now.

        Pools of threads and greenlets have no children that could die. For `pid` they pass the id of this process, or
        of the current thread or greenlet.
        """
        is_child = pid not in {os.getpid(), threading.get_ident()}
        if is_child and self.run is not None:
            CHILDREN.accepted(pid, self.run)
        if is_child and self.delivery.acks_at_begin:
            EARLY_ACKS.accepted(self.delivery.nonce, self)  # it may ack this very message
        self._is_held_back = self.delivery.acks_at_begin or self.delivery.acks_late
        try:
            super().on_accepted(pid, time_accepted)
        finally:
            self._is_held_back = False

    def acknowledge(self) -> None:
        """Ack the message, except while `on_accepted` runs: an early ack waits until the run begins."""
        if not self._is_held_back and self._is_connected():
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject the message. If its connection is lost, the broker delivers it again."""
        if self._is_connected():
            super().reject(requeue)
        elif room := waiting_room_of(self.app, self.hostname):
            room.restore(self)

    def _is_connected(self) -> bool:
        """Whether the message can be acked or rejected; if not, log it.

        Kombu has closed the connection that the message came over, or has tried to. To ack or reject it on such a
        channel may raise AttributeError in kombu 5.7; in the event loop, that ends the worker.
        """
        channel = self.message.channel
        if getattr(channel, "connection", self) is not None and not getattr(channel, "closed", False):
            return True
        name = self.task.name
        text = "%s: its message cannot be acked and is delivered again: the connection to the broker is lost"
        logger.warning(text, run_named(name, self.id), extra=fields("not_acked", task=name, task_id=self.id))
        return False

    @property
    def comes_again_if_lost(self) -> bool:
        """Whether the message is delivered again, or the next attempt published, if the run's process dies now."""
        header = Header.read(self.request_dict.get(HEADER))
        is_given_back = self.delivery.acks_at_begin and not self.acknowledged and header.died + 1 < MOST_DEATHS
        is_requeued = bool(self.task.acks_late and self.task.reject_on_worker_lost)
        is_retried = is_retried_if_lost(self.task, self.request_dict)
        return not worker_port.was_revoked(self) and (is_given_back or is_requeued or is_retried)

    def revoked(self) -> bool:
        """Whether the message was revoked, was dropped or has expired. If so, its reservation is released."""
        if worker_port.was_revoked(self):
            return True
        other = state.requests.get(self.id)
        with in_hook():
            if self.is_dropped:
                self._drop()
            elif not super().revoked():
                return False
        worker_port.find_again(self, other)
        if (run := self.run) is not None:
            for hold in run.holds:
                if hold.call is not None:
                    server_of(run.plan.app).pass_on(hold.demand, hold.call)
            if run.reservation is not None:
                attempt = None if self.delivery.may_be_a_copy else Attempt(str(self.id), run.retries, 0)
                give_up_reservation(run.plan, run.options, run.reservation, run.retries, self.eta, never_starts=attempt)
        return True

    def _drop(self) -> None:
        """End the message as the policy ``skip`` would. If this process dies before the ack, it is delivered again."""
        verdict = Verdict("drop", Skipped.DROPPED, Skipped.DROPPED.text)
        store_revoked(self.task, worker_port.context_of(self), verdict.text)
        self._announce(verdict)
        self.acknowledge()

    def _announce(self, verdict: Verdict) -> None:
        """Send the events about what has ended the message's run."""
        if (events := lock_events_of(self.app)) is not None:
            events.ended(self, verdict)
        verdict.send_event(self.send_event)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Record at a hard time limit that Celery is about to kill the child, so its slot is not free."""
        if not soft:
            CHILDREN.condemned(self.worker_pid)
        with in_hook():
            super().on_timeout(soft, timeout)
        if not soft and self.delivery.acks_at_begin:  # gevent's pool calls nothing else that would ack it
            self.acknowledge()

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Terminate the run as Celery does. A terminated run has no next attempt."""
        self._call_off()
        is_held_back, self._is_held_back = self._is_held_back, False
        # By `on_accepted`, to which the pool may not return: it kills this greenlet or raises.
        if is_held_back and worker_port.never_runs(self):
            self.acknowledge()
            worker_port.task_ready(self)  # else the run would count as one that goes on, and keep its slot
        super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Cancel the run as Celery does. It has no next attempt; its message is delivered again.

        A cold shutdown cancels runs too, and then closes the connection, which puts their messages back.
        """
        self._call_off()
        try:
            super().cancel(pool, signal, emit_retry)
        finally:  # the result backend may be out of reach too
            # A thread cannot be cancelled, and goes on.
            is_over = self not in state.active_requests and getattr(self.message.channel, "closed", False)
            if is_over and (room := waiting_room_of(self.app, self.hostname)):
                room.restore(self)

    def _call_off(self) -> None:
        if self.run is not None and self.run.next is not None:
            self.run.next.call_off()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle a run that ended with an exception: put its message in line, send it back, or let Celery handle it.

        Celery calls this for any exception, including `Ignore` and `Reject`. It sends no event for `Ignore`, so this
        method sends one if a policy ended the run.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        EARLY_ACKS.failed(self.delivery.nonce)  # the run may have begun since the last read
        RUN_COUNTS.ended_by(error)
        try:
            with nullcontext() if return_ok else in_hook(self.run and self.run.next):
                return self._ends(exc_info, error, send_failed_event, return_ok)
        finally:
            self._call_off()

    def _ends(self, exc_info: Any, error: Any, send_failed_event: bool, return_ok: bool) -> Any:
        room, verdict = waiting_room_of(self.app, self.hostname), error.verdict if isinstance(error, Ended) else None
        if room is not None and verdict is not None:
            if not verdict.reason.has_run:
                room.give_rate_token_back(self)
            if verdict.place is not None:
                return self._wait(room, verdict, verdict.place)
            if verdict.reason.is_conflict and verdict.runs_again:
                room.overflow[self.task.name] += 1
        # With `return_ok`, the run has not lost its process: the error comes from a task that the run has joined.
        is_lost = isinstance(error, WorkerLostError) and not return_ok
        is_given_back = is_lost and self.delivery.acks_at_begin and not self.acknowledged
        if is_given_back and room is not None and self._give_back(room):
            return None
        if not return_ok:  # after a lost worker, Celery may publish a new attempt with the headers of this one
            hide_headers(worker_port.context_of(self))
        # A retry may have taken the reservation over.
        if verdict.runs_again if verdict is not None else is_requeued(self.task, error) or isinstance(error, Retry):
            CHILDREN.keep_reservation(self.worker_pid, self.delivery.nonce)
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        if verdict is not None:
            self._announce(verdict)
        # The run has ended, perhaps before its body began, so ack now. Do not ack if a cold shutdown has cancelled
        # the run: the broker must deliver its message again.
        if not self.task.acks_late and not worker_port.was_cancelled(self):
            self.acknowledge()
        return result

    def _give_back(self, room: WaitingRoom) -> bool:
        """Send the message back after its child died before the run began; return False if too many have died.

        The message is published again, not requeued, because its header counts the children that have died with it,
        up to `MOST_DEATHS`.
        """
        header = Header.read(self.request_dict.get(HEADER))
        header = header._replace(died=header.died + 1, republished=True)
        about = fields("died", task=self.task.name, task_id=self.id)
        which = run_named(self.task.name, self.id)
        if header.died >= MOST_DEATHS:
            text = "%s: its process died before the task began, as did %d before it; it fails with WorkerLostError"
            logger.error(text, which, header.died - 1, extra=about)
            return False
        logger.warning("%s: its process died before the task began; its message is delivered again", which, extra=about)
        worker_port.forget_run(self)
        self.request_dict[HEADER] = header.wire
        room.keep(self, Place(Demand(""), header), leaves=True)
        return True

    def _wait(self, room: WaitingRoom, verdict: Verdict, place: Place) -> None:
        """Put the message in line, unless its run was terminated."""
        if worker_port.was_revoked(self):  # by a terminate, which has acked the message
            worker_port.task_ready(self)
            return
        CHILDREN.keep_reservation(self.worker_pid, self.delivery.nonce)
        worker_port.forget_run(self)  # this also saves memory: thousands of messages may wait
        place = place.shared()
        self._waited_for = place.wants or (place.demand,)
        self.request_dict[HEADER] = place.header.wire
        self._announce(verdict)
        room.keep(self, place)


def locked_request(task: str, request: Any) -> type[LockedRequest]:
    """The class of a task's requests: `LockedRequest`, mixed into the user's own class if the task has one.

    Raises:
        LockConfigError: `request` is not a subclass of Celery's `Request`.
    """
    if not (isinstance(request, type) and issubclass(request, Request)):
        raise LockConfigError(f"{task}: Request = {request!r} is not allowed; allowed: a subclass of {Request!r}")
    return _in_front_of(request)  # type: ignore[arg-type] # mypy mistakes its instances' __hash__ for its own


@functools.cache
def _in_front_of(request: type[Request]) -> type[LockedRequest]:
    if issubclass(LockedRequest, request):
        return LockedRequest
    if issubclass(request, LockedRequest):
        return request
    both = types.new_class(request.__name__, (LockedRequest, request))
    both.__module__ = request.__module__
    return both
