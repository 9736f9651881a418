"""Execution: one run of one delivered message, from asking for the key to releasing it.

Code inside the run finds the run's lock through Celery's request.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

from celery import Task, states
from celery.app.task import Context

from celery_redislock import signals
from celery_redislock.app import server_of
from celery_redislock.celery_port import tasks_of_this_thread
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockConfigError, LockLost, LockReplaced, LockUnavailable, shown
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.hold.keeper import LastWord
from celery_redislock.message.calls import Arguments, read_call, write_call
from celery_redislock.message.header import HEADER
from celery_redislock.message.message import Message
from celery_redislock.policy import leaves_note
from celery_redislock.policy.join import Outcome
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import ENDING, HELD, IN_DOUBT, OVER, Hold
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Answer, Granted
from celery_redislock.protocol.scripts import Claim, Note, Numbered
from celery_redislock.protocol.several import in_order
from celery_redislock.protocol.tokens import Token, call_at

from .abort import Abort
from .plan import LockPlan, give_up_reservation, reservation_ttl

logger = logging.getLogger(__name__)

#: The request attribute that holds the `Execution`.
EXECUTION = "redislock_execution"

#: Whether any request of this process has had an execution. Most processes that use a `Lock` run no locked task, and
#: searching Celery's stack takes a tenth as long as a Redis command.
_any_run = False


class Execution:
    """Takes, holds and releases the key of one request. A subclass says what happens if another owner has the key.

    The class is not an ABC: every run makes three `isinstance` checks, which take eight times as long with an ABC.

    Attributes:
        task: The task object. Many threads share it, so it keeps nothing about a run.
        plan: The plan of the task's class.
        request: Celery's request.
        message: The request's message, from `delivered`.
        held: The lock that the run asks for, with its hold; None until `demands`. If it asks for several, the first of
            `lock_key`.
        parts: The locks that the run asks for, in the order in which it does.
        abort: Ends the body when the lock is lost, if `lock_on_lost` is ``abort``, or when a newer call replaces the
            run; None if neither can happen.
        joined: The outcome of the joined task: the run ends with it and does not run its body. None if it joined none.
        refusal: The error by which the lock ends the run; None if its body may begin.
        number: The number of the call that the run is for; 0 if it has none.
    """

    held: HeldLock | None = None
    parts: tuple[HeldLock, ...] = ()
    joined: Outcome | None = None
    refusal: BaseException | None = None
    #: The keys of `lock_also` among `parts`.
    _also: Set[str] = frozenset()

    def __init__(self, plan: LockPlan, message: Message) -> None:
        self.task = message.task
        self.plan = plan
        self.request = message.request
        self.message = message
        #: The message's attempt as text, for the token and the note.
        self._attempt = str(self.message.attempt)
        #: Whether a newer call may ask the run to stop: in a worker, whatever its own call says about conflicts.
        self._is_replaceable = plan.options.on_conflict == "replace" and not message.request.is_eager
        self.abort = Abort() if plan.options.on_lost == "abort" or self._is_replaceable else None
        self.number = message.header.number
        self._server = server_of(plan.app)

    @property
    def lock(self) -> HeldLock | None:
        """The lock while it is held; None before and after that."""
        return self.held if self.held is not None and self.held.hold.phase is HELD else None

    @property
    def key(self) -> str:
        """The key in Redis; empty until `demands`."""
        return self.message.demand.key

    def take_several(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Work out which keys this call needs, and take them all, or end the run as its options say.

        Raises:
            TypeError, LockKeyError: As in `demands`.
            Exception: As in `acquire`.
        """
        self._demand_several(args, kwargs)
        options = self.message.options
        try:
            answers = self._asked_at_once()
            for part in self.parts:
                self.message.demand = part.demand
                is_also = part.key in self._also and options.on_conflict != "wait"
                self.message.options = options._replace(on_conflict="wait") if is_also else options
                self.acquire(part, answers.get(part))
                # If it had to ask again, it has waited: nothing renews what the other answers grant.
                answers = answers if part.hold.asks < 2 else {}
                if part.hold.phase is IN_DOUBT:  # with lock_on_outage="run", the body runs without a lock
                    self._give_back()
                    return
            self.message.demand = self.parts[0].demand if self.held is None else self.held.demand
        except BaseException:
            self._give_back()
            raise
        finally:
            self.message.options = options

    def _demand_several(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        main, also = self.plan.demands(args, kwargs)
        self.message.wants = in_order((*main, *also))
        call, header, locks = self.message.delivery.call, self.message.header, {}
        # Another version of the task, or another scope, may have reserved one of the keys for the message.
        claimed = next((one for one in self.message.wants if one.key == header.key), main[0])
        for demand in self.message.wants:
            self.message.demand = demand  # for its token
            claim = self._claim(demand, header.claim) if header.claim and demand is claimed else None
            hold = Hold(demand, self._mint(), claim, call and call_at(call, demand.capacity))
            locks[demand.key] = self._held_lock(hold)
        self.parts, self.held = tuple(locks.values()), locks[main[0].key]
        self._also = locks.keys() - {one.key for one in main}
        self.held.stand_for(one for one in self.parts if one is not self.held and not one.demand.spent)

    def _asked_at_once(self) -> Mapping[HeldLock, Answer]:
        """Ask for several of the keys at once. Return the answers; the other keys are asked for one by one."""
        return {}

    def _give_back(self) -> None:
        """Release the keys that the run was granted, because it does not get all of them. No note: it is not over."""
        if not self.message.was_sent_back:
            self._give_up_reservation()
        for part in self.parts:
            if part.hold.call is not None:
                self._server.pass_on(part.demand, part.hold.call)
            if part.demand.spent and part.hold.phase is OVER:
                self._server.keeper.send(part.hold.undo(), time.monotonic() + part.demand.spent)
            elif part.hold.may_be_held:
                self._release(part, None)
            part.hold = part.hold.over()

    def demands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> HeldLock:
        """Work out which lock this call asks for, and return it.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: No key can be made from the arguments.
        """
        demand = self.plan.demand_of_run(args, kwargs, self.message.header.rank)
        self.message.demand = demand
        claim = None if self.message.header.claim is None else self._claim(demand, self.message.header.claim)
        self.held = held = self._held_lock(Hold(demand, self._mint(), claim, self.message.delivery.call))
        self.parts = (held,)
        return held

    def _held_lock(self, hold: Hold) -> HeldLock:
        options, on_asked = self.message.options, self._on_asked if self._is_replaceable else None
        return HeldLock(self._server.store, hold, options.lease, options.max_hold, self._on_lost, on_asked)

    def acquire(self, lock: HeldLock, answer: Answer | None = None) -> None:
        """Take one key, or end the run as its options say.

        If `self.lock` is still None afterwards, the body runs without the lock.

        Args:
            lock: The lock to be granted, one of `parts`.
            answer: The server's answer, if it was asked already.

        Raises:
            LockConflict: The key is held, and the policy makes the run fail.
            LockUnavailable: Redis did not answer, or refused the command, and `lock_on_outage` makes the run fail.
            Ignore, Reject: The run ends without running its body.
        """
        raise NotImplementedError

    def end(self, state: str | None) -> None:
        """Release the key, and give up an unused reservation. An outage does not change the task's own outcome.

        If the task ends without an outcome, first show that to the runs that have joined it.

        Args:
            state: The state that the task ended with; None if it is unknown because the run was cut short.
        """
        held = self.held
        if held is None:  # no key could be made from the arguments
            if not self.message.was_sent_back:
                self._give_up_reservation()
            return
        try:
            # A run with a rate holds nothing, so its hold is over.
            if state == states.IGNORED and held.hold.phase is (OVER if held.demand.spent else HELD):
                self.leave_no_retry()
        finally:  # otherwise a time limit that fires in the backend leaves the keeper renewing the key forever
            for part in self.parts:
                if part.hold.phase is not OVER:
                    self._end(part, state)

    def _end(self, held: HeldLock, state: str | None) -> None:
        """See `end`, which calls this until the hold is over."""
        if self._server.pid != os.getpid():  # the body has forked this process: the lock is its parent's
            held.hold = held.hold.over()
            return
        hold = held.hold
        if hold.call is not None:  # this run was called, but has not used the call
            self._server.pass_on(hold.demand, hold.call)
        if hold.claim is not None and not self.message.was_sent_back:
            self._give_up_reservation(is_over=state is not None)
        if hold.may_be_held:
            self._release(held, state)
        else:
            held.hold = hold.over()

    def leave_no_retry(self) -> None:
        """Stop showing RETRY, because no attempt follows this run. Does nothing here: eager runs never show RETRY."""

    def _taken(self, lock: HeldLock) -> None:
        """Have the keeper renew `lock`, which was granted."""
        if lock.demand.spent:  # the run holds nothing: the permit is free when its time is over
            lock.hold, lock.deadline = lock.hold.over(), -math.inf
        else:
            self._server.keeper.add(lock)
        if not lock.calls and self.message.options.arguments == "all":
            lock.calls = [self._arguments]
        if signals.lock_acquired.receivers:
            self._announce_grant()

    def _announce_grant(self) -> None:
        """Send the signal `lock_acquired` once the run has all of its keys, unless it shares the first one."""
        if self.held in self.parts and self._has_all:
            signals.lock_acquired.send(sender=self.task, lock=self.held, waited=self.message.waited)

    @property
    def _arguments(self) -> Arguments:
        """The run's arguments: the very objects that Celery passes to the body and to the hooks."""
        return cast("Arguments", (self.request.args, self.request.kwargs))

    def _numbered(self) -> Numbered | None:
        """The message's call, if others can be merged into the message."""
        header, mode = self.message.header, self.message.options.arguments
        if mode == "first" or not (header.number or mode == "all" or self._is_replaceable):
            return None
        body = None
        if header.unmerged and header.number:
            serializer = self.message.delivery.serializer or self.task.serializer
            body = write_call(self.task.name, serializer, *self._arguments)
        stops_but = frozenset[str]() if self._is_replaceable else None
        if header.number and self.message.options.on_conflict == "replace":
            stops_but = self.message.causes
        return Numbered(0 if mode == "all" else header.number, body, stops_but)

    def _use_calls(self, lock: HeldLock, grant: Granted) -> None:
        """Replace the arguments of the run by those of the last call that it was given.

        Warn if this worker makes another key of them than the publishers did.

        Raises:
            LockConfigError: The message's serializer makes a tuple of its positional arguments.
            Exception: As in `read_call`.
        """
        self.number = grant.number
        lock.calls = [read_call(self.plan.app, body) for body in grant.calls]
        args, kwargs = self._arguments
        if not isinstance(args, list):  # a serializer's own
            raise LockConfigError(f"{self.task.name}: lock_arguments needs a serializer that reads lists as lists")
        args[:], newest = lock.calls[-1]
        kwargs.clear()
        kwargs.update(newest)
        key = self.plan.demand(args, kwargs).key
        if key != lock.key:
            text = "%s: this worker computes lock %s, but a merged call keeps its publisher's, %s. Are versions mixed?"
            about = self.message.fields("other_key", key=lock.key)
            logger.warning(text, self.message.name, key, lock.key, extra=about)

    def _release(self, lock: HeldLock, state: str | None) -> None:
        keeper = self._server.keeper
        keeper.remove(lock)
        cools_down = state == states.SUCCESS and lock.key not in self._also
        cooldown = self.message.options.cooldown if cools_down else 0.0
        # If a time limit or a shutdown interrupts this method after the command, `end` is called again, and the same
        # command is sent. By then the key may be free, which does not mean that the lock was lost.
        was_sent_before = lock.hold.phase is ENDING
        if not was_sent_before:
            lock.hold = lock.hold.ended(cooldown, self._note_after(lock, state))
        word = LastWord(lock, lock.hold, was_sent_before, keeper)
        # The body is over: do not keep its arguments in memory.
        lock.on_lost, lock.on_asked = partial(_announce_loss, self.task), None
        try:
            self._server.send_late(lock.hold.release(), word.on_reply, word.send_again)
            is_sent = True
        except LockUnavailable as error:
            word.send_again(error)
            is_sent = False
        # Only now: if a time limit fires before the release was sent, `end` is called again.
        lock.hold = lock.hold.over()
        if is_sent and signals.lock_released.receivers and lock is self.held and self._has_all:
            signals.lock_released.send(sender=self.task, lock=lock)

    @property
    def _has_all(self) -> bool:
        """Whether the run was granted all of its keys."""
        return all(part.was_granted or (part.demand.spent and part.hold.phase is OVER) for part in self.parts)

    def _note_after(self, lock: HeldLock, state: str | None) -> Note | None:
        """The note that the release leaves for copies of the message; None if the attempt is not over.

        Of several keys, the one that is asked for first has it, because a copy may meet no other.
        """
        task, delivery = self.task, self.message.delivery
        if lock is not self.parts[0] or not leaves_note(state):
            return None
        if state == states.FAILURE and task.acks_late and self.plan.broker.is_rabbitmq:
            acks: bool = getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout)  # new in Celery 5.7
            if not acks:  # the message is rejected, so a dead-letter exchange may deliver it again
                return None
        is_again = delivery.is_delivered_again
        ttl = self.plan.broker.note_ttl(is_sent_back_only=delivery.is_republished and not is_again)
        is_kept = (self.number or self._is_replaceable) and state != states.RETRY
        given = keys_of(lock.key).given(self.message.attempt.job) if is_kept else None
        return Note(self._note(lock.key), ttl, is_again or delivery.is_republished, given)

    def _claim(self, demand: Demand, claim: str) -> Claim | None:
        """The message's `claim` to what is reserved for it.

        The publisher may have computed another key from the same arguments, if its code is older or newer than this
        worker's. That key is given up.
        """
        header, plan = self.message.header, self.plan
        if header.key in {demand.key, None}:
            options = {"expires": self.request.expires}
            return Claim(claim, reservation_ttl(plan.app, self.message.options, options, self.task.expires))
        text = "%s: the publisher reserved lock %s but this worker computes lock %s and takes that. Are versions mixed?"
        about = self.message.fields("other_key", key=demand.key)
        logger.warning(text, self.message.name, shown(str(header.key)), demand.key, extra=about)
        self._give_up_reservation()
        self.message.header = header._replace(claim=None, key=None)
        return None

    def _give_up_reservation(self, *, is_over: bool = False) -> None:
        """Give up the message's reservation: the message will not run, or runs without the lock.

        `is_over` says that the run has ended with an outcome, so that nothing that was merged into its message runs.
        """
        message, attempt, reservation = self.message, self.message.attempt, self.message.header.reservation
        if reservation is not None:
            is_over = message.has_expired or (is_over and message.options.arguments != "first")
            never = attempt if is_over and not message.delivery.may_be_a_copy else None
            give_up_reservation(self.plan, message.options, reservation, attempt.retries, never_starts=never)

    def _on_lost(self, lock: HeldLock, reason: str) -> None:
        if self.abort is not None and self.plan.options.on_lost == "abort":
            self.abort.strike(LockLost(lock.key, reason))  # before the signal, whose receivers may be slow
        _announce_loss(self.task, lock, reason)

    def _on_asked(self, lock: HeldLock) -> None:
        newer = str(lock.replaced)
        if self.abort is not None:
            self.abort.strike(LockReplaced(lock.key, newer))
        about = self.message.fields("asked_to_stop", key=lock.key, holder_id=newer)
        logger.info("%s: task %s asks it to stop (replace)", self.message.name, shown(newer), extra=about)

    def _note(self, key: str) -> str:
        return keys_of(key).note(self._attempt)

    def _mint(self, asks: int = 0) -> Token:
        state = tokens.SPENT if self.message.demand.spent else tokens.RUNS
        origin = self.plan.origin(self.request.hostname, is_worker=not self.request.is_eager)
        return tokens.mint(self.message.delivery.nonce, self._attempt, origin, state, asks)


def delivered(task: Task[..., Any], plan: LockPlan, request: Context) -> Message:
    """The message of `request`, with its options: the task's own, except for those that the message brings.

    If the message comes from another version of the code, this version may not allow its options. It then goes on
    without them, even when it waits or is sent again.
    """
    message = Message(task, plan.broker, request, plan.options)
    if (given := message.header.options) is not None:
        try:
            message.options = plan.options_of(given)
        except LockConfigError as refusal:
            message.header = message.header._replace(options=None)
            setattr(request, HEADER, message.header.wire)
            about = message.fields("call_option", reason=refusal)
            logger.error("%s runs without the lock options of its call: %s", message.name, refusal, extra=about)  # noqa: TRY400 - the error has it all
    return message


def _announce_loss(task: Task[..., Any], lock: HeldLock, reason: str) -> None:
    """Send the signal `lock_lost`."""
    signals.lock_lost.send(sender=task, lock=lock, reason=reason)


def attach(request: Any, execution: Any) -> None:
    """Attach `execution` to `request`. Its lock can then be found while the request is on Celery's stack."""
    global _any_run
    _any_run = True
    setattr(request, EXECUTION, execution)


def execution_of(request: Any) -> Execution | None:
    """The execution of Celery's `request`; None if `request` is None or has not asked for its key."""
    execution = None if request is None else request.__dict__.get(EXECUTION)
    return execution if isinstance(execution, Execution) else None


def held_by_request(store: LockStore, key: str) -> HeldLock | None:
    """The lock on `key` that a request of this thread or greenlet holds and has not lost, if any.

    A thread may have several requests, because a task that is applied eagerly runs inside another.
    """
    if not _any_run:
        return None
    for task in tasks_of_this_thread():
        for request in task.request_stack.stack:
            # If the request has no execution, this may be a message header of the same name.
            lock = getattr(request.__dict__.get(EXECUTION), "lock", None)
            for part in lock.parts if isinstance(lock, HeldLock) else ():
                if part.key == key and part.store is store and part.left > 0:
                    return part
    return None
