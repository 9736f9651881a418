"""Room: where those of one process wait for their turn at the keys of one server. It does not know Celery.

A room stands in the line of each key for which somebody in it waits, at the place of its first waiter for that key.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import socket
import threading
import time
from collections import deque
from typing import Any

from celery_redislock.errors import LockUnavailable

from . import commands, tokens
from .answers import Conflict
from .listener import Listener
from .names import channel_of
from .queues import Queue, Queues
from .store import LockStore
from .tokens import Token
from .waiter import Waiter

__all__ = ("Room", "Waiter")

logger = logging.getLogger(__name__)

#: A room looks again at a key for which it stands after so many seconds at the latest; and while it cannot hear that a
#: key is offered to it, or the server does not answer, after so many.
LONGEST_LOOK, SHORT_LOOK = 60.0, 1.0
#: A key is kept for so many seconds for a room to which it is offered, and then for the waiter that was called, by
#: lua/prelude.lua.
OFFERED, CALLED = 1.0, 5.0
#: A room looks again so much later than what it waits for ends, in seconds at least and at most: so that it has ended,
#: and not all rooms look at the same moment.
MARGIN = 0.005, 0.03
#: A room asks a waiter for whom there was no slot, and who is not told of a free one, again after so many seconds.
RETRY = 0.05
#: The longest that `Room.leave_all` may take, in seconds.
LEAVING = 2.0


class Room:
    """Calls those who wait in it when it is their turn.

    The room has two threads, which start with the first waiter: one hears that a key is offered to the room, the other
    looks at the keys. What is heard is a hint, which only makes a look come sooner.

    Args:
        store: A store with a connection that nobody else uses.
        client: The client on a connection of which the room listens.

    Attributes:
        token: What a key holds while it is kept for the room.
    """

    def __init__(self, store: LockStore, client: Any) -> None:
        self.token = tokens.offer(tokens.mint_nonce(), tokens.origin(socket.gethostname(), None))
        self._store = store
        self._listener = Listener(client, channel_of(self.token.nonce), self._heard)
        self._queues = Queues()
        # What other threads tell the room's thread.
        self._asked: deque[str | None] = deque()
        self._hints: deque[str] = deque()
        self._passed: deque[Waiter] = deque()
        self._left: threading.Event | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._started = False
        self._starting = threading.Lock()
        # What only the room's thread uses.
        self._looks: list[tuple[float, str]] = []
        self._aside: dict[str, None] = {}
        self._silent_until = -math.inf

    def __len__(self) -> int:
        return len(self._queues)

    def waiting(self) -> list[Waiter]:
        """Those who wait."""
        return self._queues.waiting()

    def enter(self, waiter: Waiter) -> None:
        """Let `waiter` wait, until it begins or leaves.

        Raises:
            ValueError: Its place is no place.
        """
        commands.check_place(waiter.place)
        self._start()
        self._queues.add(waiter)
        self._wake.set()

    def leave(self, waiter: Waiter) -> None:
        """Let `waiter` wait no longer. If it was called already, it does not ask for the key: the key is passed on."""
        if not self._queues.remove(waiter):
            self._passed.append(waiter)
        self._look_soon(waiter.key)

    def leave_all(self) -> list[Waiter]:
        """Let nobody wait any longer, and leave all lines, in `LEAVING` seconds; return those who waited."""
        gone = [waiter for waiter in self.waiting() if self._queues.remove(waiter)]
        if self._started and not self._stopped:
            left = self._left = threading.Event()
            self._look_soon(None)
            left.wait(LEAVING)
        return gone

    def try_again(self) -> None:
        """Ask those again who could not begin: there may be slots for them now."""
        if self._aside:
            self._wake.set()

    def stop(self) -> None:
        """End the threads: nobody in this process can reach the room's server any more."""
        self._stopped = True
        self._listener.stop()
        self._wake.set()

    def _heard(self, message: str | None) -> None:
        if message is None:
            self._look_soon(None)
        else:
            self._hints.append(message)
            self._wake.set()

    def _look_soon(self, key: str | None) -> None:
        """Look at `key`; None for all keys. Called in any thread."""
        self._asked.append(key)
        self._wake.set()

    def _start(self) -> None:
        if self._started:
            return
        with self._starting:
            if not self._started:
                threading.Thread(target=self._run, name="redislock-room", daemon=True).start()
                self._started = True  # not before the start: if that fails, the next waiter tries again
                self._listener.start()

    # What follows runs in the room's thread.

    @property
    def _by_key(self) -> dict[str, Queue]:
        return self._queues.by_key

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause = self._turn()
            except BaseException:  # also a sys.exit() in a waiter: the others must still have their turn
                logger.exception("a room of waiters failed; it goes on in a second")
                pause = 1.0
                self._asked.append(None)
            self._wake.wait(None if pause == math.inf else max(0.0, pause))

    def _turn(self) -> float:
        """Look at the keys that are due; return the seconds until something is due again."""
        self._wake.clear()
        left = self._left
        self._asked.extend(key for key in self._queues.take_in() if key not in self._aside)
        for waiter in self._queues.end(time.monotonic()):
            self._asked.append(waiter.key)
            self._begin(waiter, called=False)
        due = self._due(time.monotonic())
        try:
            if time.monotonic() >= self._silent_until:
                self._pass_on()
                for key in sorted(due, key=self._queues.place):
                    self._try_to_look(key)
                    del due[key]
        except LockUnavailable as error:
            self._silent(error)
        finally:
            self._asked.extend(due)  # the keys at which it has not looked
        if left is not None:
            left.set()
        return self._pause()

    def _due(self, now: float) -> dict[str, None]:
        """The keys at which to look now."""
        due: dict[str, None] = {}
        while self._hints:
            when, _, key = self._hints.popleft().partition(" ")
            if when == "now":
                due[key] = None
            self._note_offer(when, key)
        while self._asked:
            asked = self._asked.popleft()
            due |= dict.fromkeys(self._by_key) if asked is None else {asked: None}
        while self._looks and self._looks[0][0] <= now:
            at, key = heapq.heappop(self._looks)
            if key in self._by_key and self._by_key[key].look_at == at:
                due[key] = None
        for key in [*self._aside]:
            first = self._queues.first(key)
            if first is None or _can_begin(first):
                due[key] = None
        return due

    def _note_offer(self, when: str, key: str) -> None:
        queue = self._by_key.get(key)
        if when == "soon" and queue is not None and queue.look_at > time.monotonic() + OFFERED + MARGIN[1]:
            self._look_at(key, OFFERED + _little())  # the key is offered to the room before this one

    def _try_to_look(self, key: str) -> None:
        try:
            self._look(key)
        except LockUnavailable:
            raise
        except BaseException:  # the others must still have their turn
            logger.exception("a look at the lock %s failed; it is tried again", key)
            if key in self._by_key:
                self._look_at(key, SHORT_LOOK)

    def _look(self, key: str) -> None:
        """See whether it is the turn of the first who waits for `key`, or leave the line.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        first, queue = self._queues.first(key), self._by_key.get(key)
        self._aside.pop(key, None)
        if first is None or queue is None:
            if queue is None or queue.stands:
                self._store.leave(key, self.token)
            self._by_key.pop(key, None)
        elif _can_begin(first):
            self._stand(key, queue, first)
        else:
            if queue.stands:
                self._store.leave(key, self.token)
                queue.stands = False
            self._aside[key] = None

    def _stand(self, key: str, queue: Queue, first: Waiter) -> None:
        following = self._queues.second(key)
        queue.stands = True  # also where no answer comes
        answer = self._store.stand(key, self.token, first.place, following.place if following else None)
        if isinstance(answer, Conflict):
            self._look_at(key, self._look_in(answer, first))
            self._let_begin(key, answer.holder)
            return
        queue.stands = following is not None
        self._look_at(key, min(CALLED, self._longest_look) + _little())
        if not self._queues.remove(first) or not self._begin(first, called=True):  # it has left meanwhile, or fails
            self._passed.append(first)
            self._wake.set()
        self._let_begin(key, None)

    def _let_begin(self, key: str, holder: Token | None) -> None:
        """Let those begin who need not wait for their turn, now that `holder` has the key."""
        for waiter in self._queues.need_not_wait(key, holder):
            if self._queues.remove(waiter):
                self._begin(waiter, called=False)

    def _look_in(self, conflict: Conflict, first: Waiter) -> float:
        """Seconds until the next look at a key that another holds, or that is kept for another."""
        longest = self._longest_look
        if conflict.holder.since is None and first.look_every is not None:
            longest = min(longest, first.look_every)
        return longest if conflict.ttl is None else min(longest, conflict.ttl + _little())

    @property
    def _longest_look(self) -> float:
        return LONGEST_LOOK if self._listener.hears else SHORT_LOOK

    def _look_at(self, key: str, seconds: float) -> None:
        self._by_key[key].look_at = at = time.monotonic() + seconds
        heapq.heappush(self._looks, (at, key))

    def _pass_on(self) -> None:
        """Pass on the keys for which somebody was called who does not ask for them.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        while self._passed:
            waiter = self._passed[0]
            self._store.release(waiter.key, tokens.called(self.token, waiter.place), exactly=True)
            self._passed.popleft()
            if waiter.key in self._by_key:
                self._look_soon(waiter.key)

    def _silent(self, error: LockUnavailable) -> None:
        """Look again at all keys in a while: the server does not answer."""
        self._silent_until = time.monotonic() + SHORT_LOOK
        self._asked.append(None)
        for waiter in self.waiting():
            waiter.unavailable(error)

    def _begin(self, waiter: Waiter, *, called: bool) -> bool:
        try:
            waiter.begin(called=called)
        except BaseException:
            logger.exception("who waited for the lock %s could not begin", waiter.key)
            return False
        return True

    def _pause(self) -> float:
        now = time.monotonic()
        at = self._looks[0][0] if self._looks else math.inf
        if self._aside:
            at = min(at, now + RETRY)
        if self._asked or self._passed:
            at = now
        return min(max(at, self._silent_until), self._queues.next_deadline) - now


def _can_begin(waiter: Waiter) -> bool:
    try:
        return waiter.can_begin()
    except BaseException:
        logger.exception("who waits for the lock %s cannot tell whether it can begin; it begins", waiter.key)
        return True


def _little() -> float:
    return random.uniform(*MARGIN)  # noqa: S311 - jitter
