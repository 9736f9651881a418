"""Lost: the next attempt of a run whose process has died, which the worker's main process publishes.

Celery publishes it from 5.7 on, if `retry_on_worker_lost` is set. In scope ``job``, or with `lock_hold_on_retry`, it
inherits the key, as after `self.retry()`. Two threads of the main process take part: one hands over the keys of the
dead process, the other runs Celery's publish. The first thread may be seconds ahead of the second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery_redislock.app import server_of
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.message.header import Header, Reservation
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt, Token, known_by

from .plan import LockPlan

#: How long a key is kept for a retry that Celery has not published yet, in seconds: Celery may notice a death only
#: after ten seconds.
NOTICED_WITHIN = 15.0

_hook = threading.local()


class NextAttempt:
    """The attempt that follows a run if the run's process dies. The key is handed over to it at most once.

    Args:
        plan: The plan of the task.
        request: The dict of Celery's request for the run.
        nonce: The nonce of the run's token.
        reservation: The reservation of the run's message, if any. It matters if the process dies before taking the key.
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
        #: The lock that was handed over, if any.
        self._demand: Demand | None = None
        self.is_sent = self._is_off = False
        self._deciding = threading.Lock()

    def takes(self, demand: Demand) -> tuple[Token, float] | None:
        """Inherit the key. Return the token to store in it and the token's lifetime in seconds; None if called off."""
        with self._deciding:
            if self._is_off:
                return None
            self._demand = demand
            return self._token, self._ttl

    def header(self, header: Header) -> Header:
        """The header for this attempt's message: `header`, with the claim to the run's key if the run has one."""
        key = (self._demand and self._demand.key) or next(iter(ASKED_KEYS.of(self._nonce)), None) or self._reserved
        claim = self._token.nonce
        return header if key is None else header._replace(publish=self.attempt.publish, claim=claim, key=key)

    def was_sent(self, ttl: float) -> None:
        """Note that the message was sent, and keep the key reserved for it for `ttl` seconds."""
        with self._deciding:
            self.is_sent, self._ttl, demand = True, ttl, self._demand
        if demand is not None:
            # Send both commands: the first hands over the key if that has not happened yet; the second sets the key's
            # lifetime if it has. Both look for the permit by its owner.
            hold = Hold(demand, known_by(self._nonce), heir=(self._token, ttl))
            keeper, extend = server_of(self._plan.app).keeper, commands.hand_over(demand, self._token, self._token, ttl)
            ends = time.monotonic() + max(self._plan.options.lease, NOTICED_WITHIN)
            keeper.send(hold.release(), ends)
            keeper.send(extend, ends)

    def call_off(self) -> None:
        """Free the key, because this attempt will not be published. Do nothing if its message was sent."""
        with self._deciding:
            if self.is_sent or self._is_off:
                return
            self._is_off, demand = True, self._demand
        if demand is not None:  # a later hand-over finds the claim marked as void
            server_of(self._plan.app).give_up(demand, self._token.nonce, self._ttl, is_to_come=True)


def attempts_before(request: Mapping[str, Any]) -> int:
    """How often a request's task has called `self.retry()`; 0 if the message gives no valid number."""
    retries = request.get("retries")
    return retries if type(retries) is int and retries > 0 else 0


def is_retried_if_lost(task: Any, request: Mapping[str, Any]) -> bool:
    """Whether Celery publishes another attempt if the process that runs `request` dies; not after the last retry."""
    is_on = bool(getattr(task, "retry_on_worker_lost", False))  # from Celery 5.7 on
    return is_on and (task.max_retries is None or attempts_before(request) < task.max_retries)


@contextmanager
def in_hook(attempt: NextAttempt | None = None) -> Iterator[None]:
    """Mark this thread as inside a hook of the main process: a publish there neither asks Redis nor computes a key.

    `attempt` is the attempt that Celery may publish for a lost run.
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
    """The attempt that a publish with these `options` sends, if it follows a run that was just lost."""
    attempt: NextAttempt | None = getattr(_hook, "attempt", None) or None
    is_sent = attempt is not None and (options.get("task_id"), options.get("retries")) == attempt.attempt[:2]
    return attempt if is_sent else None
