"""Lost: a run whose process has died, and whose next attempt the worker's main process publishes.

Celery does so from 5.7 on, where `retry_on_worker_lost` is set. In scope ``job``, or with `lock_hold_on_retry`, the
next attempt is handed the key, as by a `self.retry()`. Two threads of the main process do that: one deals with what the
dead process held, and may be seconds ahead of the other, in which Celery publishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery_redislock.app import server_of
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.message.header import Header, Reservation
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.tokens import Attempt, Token, known_by

from .decisions import hands_over

if TYPE_CHECKING:
    from celery import Task

    from .plan import LockPlan

#: Seconds that a key is kept for a retry that Celery has not published yet: it may notice a death ten seconds later.
NOTICED_WITHIN = 15.0

_hook = threading.local()


class NextAttempt:
    """The attempt after a run, for the case that the run's process dies. Its key is handed over at most once.

    Args:
        plan: The plan of the task.
        request: The dict of Celery's request for the run.
        nonce: The nonce of the run's token.
        reservation: The key that was reserved for the run's message: its process may die before it has taken that.
    """

    def __init__(self, plan: LockPlan, request: Mapping[str, Any], nonce: str, reservation: Reservation | None) -> None:
        self._plan = plan
        self._nonce = nonce
        self._reserved = None if reservation is None else reservation.key
        nesting = request.get("replaced_task_nesting") or 0
        self.attempt = Attempt(str(request["id"]), attempts_before(request) + 1, nesting, tokens.mint_publish())
        origin = plan.origin(request.get("hostname"))
        self._token = tokens.mint(tokens.mint_nonce(), str(self.attempt), origin, tokens.RESERVED)
        self._ttl = NOTICED_WITHIN
        #: The key that was handed over.
        self._key: str | None = None
        self.is_sent = self._is_off = False
        self._deciding = threading.Lock()

    def takes(self, key: str) -> tuple[Token, float] | None:
        """What `key` holds for this attempt from now on, and for how long; None where the attempt does not come."""
        with self._deciding:
            if self._is_off:
                return None
            self._key = self._plan.in_any_permit(key)
            return self._token, self._ttl

    def header(self, header: Header) -> Header:
        """`header` for the message of this attempt: it carries the claim to the key, if the run has one."""
        key = self._key or ASKED_KEYS.key_of(self._nonce) or self._reserved
        if key is None:
            return header
        return header._replace(publish=self.attempt.publish, claim=self._token.nonce, key=str(key))

    def was_sent(self, ttl: float) -> None:
        """The message is out: have the key reserved for it for `ttl` seconds."""
        with self._deciding:
            self.is_sent, self._ttl, key = True, ttl, self._key
        if key is not None:
            # The key may or may not be handed over yet, so send both: at least one does nothing.
            keeper, owner, token = server_of(self._plan.app).keeper, known_by(self._nonce), self._token
            ends = time.monotonic() + max(self._plan.options.lease, NOTICED_WITHIN)
            keeper.later(key, ends, lambda store: store.send(commands.hand_over(key, owner, token, ttl)))
            keeper.later(key, ends, lambda store: store.lengthen(key, token, ttl))

    def call_off(self) -> None:
        """Nobody publishes this attempt: have the key be free, unless the message is out."""
        with self._deciding:
            if self.is_sent or self._is_off:
                return
            self._is_off, key = True, self._key
        if key is not None:  # the hand-over may come after this, and then finds the note that the claim is void
            server_of(self._plan.app).give_up(key, self._token.nonce, self._ttl, is_to_come=True)


def attempts_before(request: Mapping[str, Any]) -> int:
    """How often a request's task had called `self.retry()`. Anybody may write anything into a message."""
    retries = request.get("retries")
    return retries if type(retries) is int and retries > 0 else 0


def next_attempt(
    task: Task[..., Any], plan: LockPlan, request: Mapping[str, Any], nonce: str, reservation: Reservation | None
) -> NextAttempt | None:
    """The attempt that Celery publishes with `retry_on_worker_lost`; None after the last, or where it gets no key."""
    if not hands_over(plan.options):
        return None
    if task.max_retries is not None and attempts_before(request) >= task.max_retries:
        return None
    return NextAttempt(plan, request, nonce, reservation)


@contextmanager
def in_hook(attempt: NextAttempt | None = None) -> Iterator[None]:
    """Mark this thread as running a hook of the main process: what it publishes asks no Redis, and makes no key.

    `attempt` is what Celery may publish for a lost run.
    """
    before, _hook.attempt = getattr(_hook, "attempt", False), attempt
    try:
        yield
    finally:
        _hook.attempt = before


def is_in_hook() -> bool:
    """Whether this thread is in a hook of the worker's main process."""
    return getattr(_hook, "attempt", False) is not False


def lost_before(options: Mapping[str, Any]) -> NextAttempt | None:
    """The attempt that is published with these `options`, if it follows a run that was lost just now."""
    attempt: NextAttempt | None = getattr(_hook, "attempt", None) or None
    if attempt is None or (options.get("task_id"), options.get("retries")) != attempt.attempt[:2]:
        return None
    return attempt
