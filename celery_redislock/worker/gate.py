"""Gate: holds slots in the pools that keep what they are given in a queue of their own, or block until it runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from celery.signals import task_postrun
from celery.worker import state
from celery.worker.request import Request

from .slots import HELD_FOR, Slots
from .windows import slots_of

#: While fetched messages stand at the gate, it looks at least so often, in seconds: a run may end without a signal.
LOOK_EVERY = 0.1


class GatedSlots(Slots):
    """Those of ``threads``, ``gevent`` and ``eventlet``, and of ``prefork`` where the worker has no event loop.

    While messages wait in the worker, what it fetches stands at this gate until a slot is free. Otherwise it passes.

    Args:
        consumer, on_held, look_again: As for `Slots`.
        is_waited: Tells whether a message waits in the worker.
    """

    def __init__(
        self,
        consumer: Any,
        on_held: Callable[[], None],
        look_again: Callable[[float], None],
        is_waited: Callable[[], bool],
    ) -> None:
        super().__init__(consumer, on_held, look_again)
        self._is_waited = is_waited
        self._fetched: deque[Request] = deque()
        #: Those that the pool was given and that have not ended.
        self._running: set[Request] = set()
        task_postrun.connect(self._run_ends)

    def admit(self, request: Request) -> None:
        """Pass `request` on, or have it stand at the gate."""
        if self._fetched or (self._is_waited() and (self._claims or self._idle() <= 0)):
            self._fetched.append(request)
            self._look_again(0)
        else:
            self._pass(request)

    def clear(self) -> None:
        """What stands at the gate is delivered again."""
        super().clear()
        self._fetched.clear()

    def _hold_more(self) -> None:
        for request in tuple(self._running):
            if request not in state.reserved_requests:
                self._running.discard(request)
        while self._let_one_in():
            pass
        if self._fetched:
            self._look_again(LOOK_EVERY)

    def _let_one_in(self) -> bool:
        """Give a free slot to a waiting message, or else to a fetched one; return whether one got it."""
        if self._fetched and not self._is_waited():
            self._pass(self._fetched.popleft())
        elif self._idle() <= 0:
            return False
        elif len(self._held) < self._claims:
            self._held.append(time.monotonic())
            self._on_held()
        elif self._fetched:
            self._pass(self._fetched.popleft())
        else:
            return False
        return True

    def _give_up(self) -> None:
        if self._fetched:
            self._pass(self._fetched.popleft())

    def _pass(self, request: Request) -> None:
        self._running.add(request)
        self._start(request)

    def _run_ends(self, task_id: str = "", **_: Any) -> None:
        """Called where a run ends, in the pools whose runs are in this very process."""
        request = state.requests.get(task_id)
        if request is not None:
            self._note_end(request)
            self._running.discard(request)
        if self._fetched or self._claims:
            self._look_again(0)

    def _idle(self) -> int:
        return slots_of(self._pool) - self._dead - len(self._running) - len(self._held)

    def _free(self, unplaced: int) -> int:
        return max(0, self._idle()) + len(self._held)

    def _run_in_held(self, request: Request) -> None:
        self._pass(request)

    def _run_in_free(self, request: Request) -> None:
        self._pass(request)


class SoloSlots(Slots):
    """The one of ``solo``, whose runs are in the thread that fetches: the room decides before a fetched message runs.

    Args:
        consumer, on_held, look_again: As for `Slots`.
        run_calls: Runs the messages that were called.
    """

    def __init__(
        self,
        consumer: Any,
        on_held: Callable[[], None],
        look_again: Callable[[float], None],
        run_calls: Callable[[], None],
    ) -> None:
        super().__init__(consumer, on_held, look_again)
        self._run_calls = run_calls
        self._has_seen = False
        self._has_decided = threading.Event()

    def begins_round(self) -> None:
        """Only a round that has seen the held slot decides about it."""
        super().begins_round()
        self._has_seen = bool(self._held)

    def ends_round(self, wanted: int) -> bool:
        """The fetched message has waited for this."""
        super().ends_round(wanted)
        self._wanted = wanted
        if self._has_seen:
            self._has_decided.set()
        return False

    def settle(self, wanted: int) -> None:
        """`admit` alone holds the slot and gives it up: else a slot that was given up would count as used."""
        self._wanted = wanted
        self._note_ended()

    def admit(self, request: Request) -> None:
        """Run the waiting messages that are called, and then `request`."""
        self._note_ended()
        while self._claims and self._runs_one():
            self._note_ended()
        self._start(request)

    def _runs_one(self) -> bool:
        """Let the room call a waiting message, and run that; return whether there was one."""
        self._has_decided.clear()
        self._held.append(time.monotonic())
        self._on_held()
        self._has_decided.wait(HELD_FOR)
        self._run_calls()
        is_unused = bool(self._held)
        self._held.clear()
        return not is_unused

    def _hold_more(self) -> None:
        """Nothing: the slot is held where a message was fetched."""

    def _give_up(self) -> None:
        """Nothing: the fetched message runs next."""

    def _free(self, unplaced: int) -> int:
        return max(0, slots_of(self._pool) - len(state.reserved_requests) + unplaced) + len(self._held)
