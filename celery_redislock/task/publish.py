"""Publication: one call of `apply_async`.

In the scopes ``job`` and ``queue`` it reserves the key or the place in the queue first, so that no duplicate is sent.
The lock options of the call travel in the message's header.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

from celery import Task, uuid
from celery.result import AsyncResult

from celery_redislock import signals
from celery_redislock.app import server_of
from celery_redislock.errors import LockConfigError, LockUnavailable, fields, run_named, shown
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.message.calls import LONGEST_BODY, write_call
from celery_redislock.message.delivery import publish_time
from celery_redislock.message.header import HEADER, Header
from celery_redislock.options import check_of_call
from celery_redislock.policy import hands_over
from celery_redislock.policy.conflict import Answer, NotSent, on_outstanding
from celery_redislock.policy.join import has_ended
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import ALL_ROOMS, Demand, channel_of, keys_of
from celery_redislock.protocol.replies import Granted, Merged, Outstanding, Reserved
from celery_redislock.protocol.scripts import Call, Passed
from celery_redislock.protocol.tokens import Attempt, Token

from .execution import Execution, execution_of
from .lost import is_in_hook, lost_before
from .plan import LockPlan, reservation_ttl, seconds_until

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)

logger = logging.getLogger(__name__)

_NOT_SENT = {
    "outstanding": "task %s: lock %s is held by %s; not sent: the caller gets that task's result",
    "window": "task %s: the window of lock %s was opened by %s; not sent: the caller gets that task's result",
    "merged": "task %s: its call for lock %s was merged into %s; not sent: the caller gets that task's result",
}
Options = Mapping[str, Any]
Send = Callable[[Options], "LockedResult"]

#: A publish with one of these options never gets another job's result: a caller waits for this very id, or other tasks
#: follow it. A link that the worker sends has `parent_id` and `root_id`; a body's own `delay()` has neither.
CONTINUATIONS = ("task_id", "group_id", "chord", "chain", "link", "link_error", "parent_id", "root_id")


#: How long a job that another publisher is sending is waited for before it is taken over, in seconds. A publish that
#: succeeds is faster, even if it has to connect to a distant broker first. An event loop is blocked as by the publish.
PATIENCE = 1.0
#: How long a publish waits for one such job after the other, in seconds.
LONGEST_WAIT = 3.0
#: The shortest and the longest pause between two questions about such a job, in seconds.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.064


def is_bare(options: Options) -> bool:
    """Whether only the caller knows about a message that is published with these options.

    Celery itself may publish any other message at the end of another task. A failed publish must not make that task
    fail.
    """
    return not any(map(options.get, CONTINUATIONS))


def take_lock_options(task: Task[..., Any], plan: LockPlan | None, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the lock options of a call from all of its `options`. Check and return them, without the prefix.

    When Celery itself publishes in a worker (a retry, or the next step of a chain), the previous run has ended, and an
    error would lose its work. A wrong option is then logged and left out.

    Raises:
        LockConfigError: An option is unknown, a call cannot set it, its value is not allowed, or it cannot be combined
            with the others.
    """
    given: dict[str, Any] = {}
    for option in [option for option in options if option.startswith("lock_")]:
        name, value = option.removeprefix("lock_"), options.pop(option)
        try:
            check_of_call(str(task.name), name, value)
            given[name] = value
        except LockConfigError as refusal:
            _refuse(task, options, shown(option), refusal)
    if not given or plan is None or not plan.enabled:
        return given
    try:
        plan.options_of(given)
    except LockConfigError as refusal:
        _refuse(task, options, " and ".join(f"lock_{name}" for name in given), refusal)
        given = {}
    return given


def _refuse(task: Task[..., Any], options: Options, what: str, refusal: LockConfigError) -> None:
    """Raise `refusal`, or log it if Celery publishes. `options` are the other options of the call."""
    # Celery publishes an errback in the main process, with the failed task's id as `parent_id`.
    is_by_celery = task.app.current_worker_task or is_in_hook() or options.get("parent_id")
    if is_bare(options) or not is_by_celery:
        raise refusal
    task_id = options.get("task_id")
    about = fields("call_option", task=task.name, task_id=task_id, reason=refusal)
    logger.error("%s is sent without %s: %s", run_named(str(task.name), task_id), what, refusal, extra=about)


class Publication:
    """One call of `Task.apply_async`, carried out as its scope says.

    Args:
        task: The task.
        plan: Its plan.
        options: The options of the call, without its lock options.
        given: The lock options of the call, from `take_lock_options`.
        send: Sends the message.

    Attributes:
        hold: What the publish has reserved for its message, in the scopes ``job`` and ``queue``.
        is_unique: Whether the scope is ``job`` or ``queue``, so that the publish reserves the key or the place in the
            queue.
        needs_key: Whether the publish may need the key: if it is unique, or if `lock_hold_on_retry` makes a
            `self.retry()` hand the key over.
    """

    hold: Hold

    def __init__(
        self, task: Task[..., Any], plan: LockPlan, options: Options, given: Mapping[str, Any], send: Send
    ) -> None:
        self._task = task
        self._plan = plan
        self._lock_options = lock_options = plan.options_of(given) if given else plan.options
        self.is_unique = lock_options.scope != "run"
        self.needs_key = self.is_unique or lock_options.hold_on_retry
        self._options = options
        self._is_bare = is_bare(options)
        self._send = send
        #: The call, if it may be merged with others; and the run whose next attempt it is.
        self._call: Call | None = None
        self._attempt_of: Execution | None = None
        self._header = Header(tokens.mint_publish(), published=publish_time(options), options=given or None)
        request = task.request_stack.top if options.get("retries") else None
        if request is not None and execution_of(request) is None and self._is_next_attempt(request):
            # A retry that is sent before its run has asked for the key takes over what the run has not used.
            own = Header.read(getattr(request, HEADER, None))
            self._header = self._header._replace(number=own.number, claim=own.claim, key=own.key, queued=own.queued)

    def send(self) -> LockedResult:
        """Send the message with its own header, which replaces one copied from another message.

        Raises:
            Exception: Any error from the broker.
        """
        headers = {**(self._options.get("headers") or {}), HEADER: self._header.wire}
        return self._send({**self._options, "headers": headers})

    def send_in_hook(self) -> LockedResult:
        """Send the message from a hook of the worker's main process, which must not wait for Redis.

        The next attempt of a lost run inherits the run's key. For any other message, the policy applies at its start.

        Raises:
            Exception: Any error from the broker.
        """
        attempt = lost_before(self._options)
        if attempt is None:
            # The next attempt of a lost run is given what the run was given.
            if self._options.get("retries"):
                lost = Header.read((self._options.get("headers") or {}).get(HEADER))
                self._header = self._header._replace(number=lost.number)
            return self.send()
        self._header = attempt.header(self._header)
        result = self.send()
        if self._header.claim is not None:
            attempt.was_sent(self._reservation_ttl())
        return result

    def publish(
        self, key: str, execution: Execution | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LockedResult:
        """Send the message, unless it would duplicate a job or is merged into a message that waits.

        Args:
            key: The key in Redis for the message's arguments.
            execution: The run that publishes, if it is a run of this task.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            The message's result, or the result of the job that it would duplicate, with ``duplicate`` True.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command; only if `lock_on_outage` is ``raise`` and the
                publish is bare.
            Exception: Any error from the broker. The key has been released.
        """
        is_mergeable = self._lock_options.arguments != "first"
        if execution is not None and self._is_next_attempt(execution.request):
            lock = execution.lock
            if lock is not None and lock.key == key and hands_over(self._lock_options):
                return self._hand_over(lock, execution.request.hostname)
            self._attempt_of = execution
            self._header = self._header._replace(number=execution.number, unmerged=is_mergeable)
        elif self._options.get("retries"):
            return self._send_on()
        if is_mergeable:
            self._call = self._call_of(args, kwargs)
            return self.send() if self._call is None else self._take(key)
        return self._take(key) if self.is_unique else self.send()

    def _call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """The call, if it may be merged with others; None if its message is sent with its own arguments.

        Raises:
            LockConfigError, EncodeError: As in `write_call`.
        """
        app, run, options, lock_options = self._plan.app, self._attempt_of, self._options, self._lock_options
        if not self._is_bare and not (run and run.number):
            return None
        body = write_call(self._task.name, options.get("serializer") or self._task.serializer, args, kwargs)
        if len(body) > LONGEST_BODY:
            return None
        moments = options.get("countdown") or options.get("eta"), options.get("expires", self._task.expires)
        due_in, expires_in = seconds = [seconds_until(app, moment) for moment in moments]
        if [one is None for one in seconds] != [one is None for one in moments] or math.inf in seconds:
            return None  # Celery raises the error
        return Call(
            body=body,
            channel=channel_of(ALL_ROOMS, server_of(app).keyprefix) if lock_options.arguments == "all" else None,
            due_in=max(0.0, due_in or 0.0),
            expires_in=None if expires_in is None else max(0.0, expires_in),
            debounce=None if run else lock_options.debounce,
            debounce_max=lock_options.debounce_max,
            number=run.number if run else 0,
            is_retry=run is not None,
            stops_but=self._causes if lock_options.on_conflict == "replace" and not (run or due_in) else None,
        )

    def _is_next_attempt(self, request: Any) -> bool:
        """Whether this publish is the `self.retry()` of the run with `request`."""
        options = self._options
        return options.get("task_id") == request.id and (options.get("retries") or 0) > (request.retries or 0)

    def _send_on(self) -> LockedResult:
        """Send the message, and keep what it has taken over reserved for it throughout its countdown."""
        result, reservation, ttl = self.send(), self._header.reservation, self._reservation_ttl()
        if reservation is not None:
            key = keys_of(reservation.key).queued if self._header.queued else reservation.key
            command = commands.renew([(key, tokens.known_by(reservation.claim, tokens.RESERVED), ttl)])
            server_of(self._plan.app).keeper.send(command, time.monotonic() + ttl)
        return result

    def _hand_over(self, lock: HeldLock, hostname: str | None) -> LockedResult:
        """Send the next attempt. This run hands its key over when it ends, after its `finally` blocks."""
        claim = tokens.mint_nonce()
        token, ttl = self._token(claim, hostname), self._reservation_ttl()
        self._header = self._header._replace(claim=claim, key=lock.key)
        result = self.send()
        lock.hold = lock.hold.handed_over(token, ttl)
        return result

    def _take(self, key: str) -> LockedResult:
        """Reserve the key or the place in the queue, and send the message, unless a job is outstanding."""
        self._options = {**self._options, "task_id": self._options.get("task_id") or uuid()}
        place = keys_of(key).queued
        token = self._token(tokens.mint_nonce(), socket.gethostname(), tokens.SENDING)
        window = keys_of(key).window(token.task_field)
        self.hold = Hold(Demand(key), token, places=(place,) if self._lock_options.window is None else (place, window))
        try:
            is_asked = self._is_bare or self._call is not None
            answer = self._reserve(key) if is_asked else self._reserve_if_free(key, place)
        except LockUnavailable as error:
            signals.lock_unavailable.send(sender=self._task, key=key, error=error)
            if self._lock_options.on_outage == "raise" and self._is_bare:
                raise
            return self.send()  # the run asks Redis again, and does what the options say
        self._header = self._header._replace(unmerged=False)
        match answer:
            case Reserved():
                return self._send_reserved(key, answer)
            case Answer():
                return self._answer_with(answer)
            case None:
                return self.send()  # the policy applies at the start of the run

    def _reserve_if_free(self, key: str, place: str) -> Reserved | None:
        """Reserve the key or the place if it is free. The message is sent either way: a caller awaits its result."""
        reserved = place if self._lock_options.scope == "queue" else key
        self.hold = Hold(Demand(reserved), self.hold.token)
        answer = server_of(self._plan.app).store.acquire(self, self._plan.options.lease)
        return Reserved(reserved) if isinstance(answer, Granted) else None

    def _reserve(self, key: str) -> Reserved | Answer | None:
        """Reserve the key or the place in the queue, or find the job whose result the caller gets.

        That takes at most two commands, except if another publisher is sending the job at this moment. This one waits
        for that job, and takes its reservation over if it is not sent soon: its publisher may have died.

        None means that the message is sent without a reservation: the job that has the place cannot be the answer.
        """
        task, passed, latest, merged = self._task, Passed(), time.monotonic() + LONGEST_WAIT, None
        waits_for, ends, pause = "", latest, SHORTEST_PAUSE
        ended = partial(has_ended, task, cools_down=self._plan.cools_down(self._lock_options))
        while not isinstance(found := self._ask(passed), Reserved):
            if isinstance(found, Merged):
                merged = Answer(found.info(key), how="merged") if found.ticket else merged
                if merged is None or found.ticket is None or not ended(merged.job):
                    return merged
                # The job may have ended without a run, so that the merged arguments get none.
                passed = passed._replace(ended=passed.ended | {str(merged.job.task_id)})
                self._call = self._call and self._call._replace(number=found.number)
                continue
            if self._call and self._call.is_retry:
                return None
            taken = found.info(key)
            match on_outstanding(task.name, self._causes, taken, passed, ended, in_window=found.in_window):
                case Passed() as again:
                    passed = again
                case NotSent(task_id):
                    now = time.monotonic()
                    if task_id != waits_for:  # each publisher has the same time, however long this one has waited
                        waits_for, pause, ends = task_id, SHORTEST_PAUSE, min(now + PATIENCE, latest)
                    if now >= ends:
                        passed = passed._replace(unsent=passed.unsent | {task_id})
                    else:
                        time.sleep(pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
                case answer:
                    return None if self._call else answer
        return found

    def _ask(self, passed: Passed) -> Reserved | Merged | Outstanding:
        store = server_of(self._plan.app).store
        options = self._lock_options
        if self._call is not None:
            return store.merge(self, options.lease, options.queue_ttl, passed, self._call)
        return store.reserve(self, options.lease, passed, in_queue=options.scope == "queue", window=options.window)

    @property
    def _causes(self) -> frozenset[str]:
        """The ids of the message's parent and root. Celery adds the running task's ids only later."""
        causes = {self._options.get("parent_id"), self._options.get("root_id")}
        if (parent := self._plan.app.current_worker_task) is not None:
            causes |= {parent.request.id, parent.request.root_id}
        return frozenset(tokens.known_as(str(one)) for one in causes if one)

    def _send_reserved(self, key: str, answer: Reserved) -> LockedResult:
        """Send the message for which the key, or the place in the queue, is reserved."""
        server, token, reserved = server_of(self._plan.app), self.hold.token, answer.key
        self._header = self._header._replace(claim=token.nonce, key=key, queued=reserved != key, number=answer.number)
        if self._call is not None:  # the lock server knows when the last call of several expires and is due
            # A message that comes too early sleeps in its worker. There it can wake up when all its calls have come.
            broker, sleeps = self._plan.broker, self._call.channel
            delay = max(self._call.due_in, 0.0 if sleeps else min(answer.due_in, broker.visibility_timeout / 2))
            countdown = delay if delay and delay >= broker.shortest_delay else None
            self._options = {**self._options, "countdown": countdown, "eta": None, "expires": None}
        ttl = self._reservation_ttl()
        try:
            result = self.send()
        except BaseException:
            server.store.take_back(self.hold.undo(), is_lost=True)
            raise
        # So far the reservation lasts for one lease only, and other publishers may take it over, because this one may
        # die before it has sent the message. The renewal ends both. If the message has already started, its run holds
        # the key under its own nonce, and the command does nothing.
        windows = [(window, token, math.inf) for window in self.hold.places[1:]]
        ends, command = time.monotonic() + self._plan.options.lease, commands.renew([(reserved, token, ttl), *windows])
        if self._call is not None and self._call.stops_but is not None:
            command = commands.replace(key, token, ttl, self._call.stops_but)
        try:
            server.send_late(command, lambda _: None, lambda: server.keeper.send(command, ends))
        except LockUnavailable as error:
            task, task_id, lease = self._task.name, self._options["task_id"], self._plan.options.lease
            text = "%s was sent, but lock %s is reserved for it for only %g s: %s"
            about = fields("unavailable", task=task, task_id=task_id, key=key, reason=error.reason)
            logger.warning(text, run_named(task, task_id), key, lease, error.reason, extra=about)
        return result

    def _answer_with(self, answer: Answer) -> LockedResult:
        """Send nothing, and return the result of the job that is the answer."""
        task, holder = self._task, answer.job
        about = fields("not_sent", task=task.name, key=holder.key, holder=holder.who, holder_id=holder.task_id)
        logger.info(_NOT_SENT[answer.how], task.name, holder.key, holder.who, extra=about)
        if answer.how == "merged":
            signals.lock_merged.send(sender=task, key=holder.key, task_id=holder.task_id)
        else:
            signals.lock_conflict.send(sender=task, key=holder.key, holder=holder, policy="return existing")
        result = cast("LockedResult", task.AsyncResult(str(holder.task_id)))
        result.duplicate = True
        # As in Celery, `get()` must not wait for a result that is not stored.
        result.ignored = self._options.get("ignore_result", task.ignore_result)
        return result

    def _token(self, claim: str, hostname: str | None, state: str = tokens.RESERVED) -> Token:
        """The token of the message's reservation. It names the message's attempt as the execution will."""
        options = self._options
        nesting = options.get("replaced_task_nesting") or 0
        attempt = Attempt(str(options["task_id"]), options.get("retries") or 0, nesting, self._header.publish)
        return tokens.mint(claim, attempt, self._plan.origin(hostname), state)

    def _reservation_ttl(self) -> float:
        return reservation_ttl(self._plan.app, self._lock_options, self._options, self._task.expires)


if TYPE_CHECKING:

    class LockedResult(AsyncResult[R_co], Generic[R_co]):
        """The result of `delay` and `apply_async` of a `LockedTask`: Celery's own, with one more attribute."""

        duplicate: bool
        """True if nothing was sent, because an equal job was already queued or running, or because the call was merged
        into a waiting message. This is the result of that job or message."""

else:
    LockedResult = AsyncResult
