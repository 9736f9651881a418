"""Room: where the waiters of one process wait for the keys of one server. It does not depend on Celery.

A room stands in the line of each key that its waiters want, with the rank of its first waiter for that key.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from celery_redislock.connection.outage import Outage
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable, shown
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import ALL_ROOMS, channel_of
from celery_redislock.protocol.replies import Conflict

from . import lines
from .lines import SHORT_LOOK, Line, Lines
from .listener import Listener
from .waiters import Waiter, give_turn

logger = logging.getLogger(__name__)

#: Seconds between two checks of whether the first waiters in the lines set aside can start.
ASK_AGAIN = 0.05
#: How long `Room.leave_all` may take, in seconds.
LEAVING = 2.0


class Host(Protocol):
    """Knows whether waiters can start. Its methods are called in the thread of their room."""

    def starts_round(self) -> None:
        """The room is about to call `Waiter.is_ready` on some of its waiters."""

    def ends_round(self, room: Room, aside: Mapping[str, int]) -> None:
        """The round has ended. `aside` counts the lines whose first waiter cannot start now, by `Waiter.group`."""


class Room:
    """Calls its waiters when their turn comes.

    The room has two threads, which start with the first waiter: one listens for hints that a key is offered to the
    room, the other checks the keys. It goes in rounds: a hint, a waiter that enters or leaves, or the time makes lines
    due; a round checks these, and those set aside because their first waiters could not start.

    Args:
        store: A store that shares its connection with nothing else.
        client: The client that provides the listener's connection.
        keyprefix: The prefix of the name of the room's channel.

    Attributes:
        token: What a key holds while it is kept for the room.
        host: Is told when a round starts and when it ends; None if no waiter needs a slot.
    """

    def __init__(self, store: LockStore, client: Any, keyprefix: str = "") -> None:
        self.token = tokens.of_room(tokens.mint_nonce(), socket.gethostname(), keyprefix)
        self.host: Host | None = None
        self._store = store
        channels = [channel_of(room, keyprefix) for room in (self.token.nonce, ALL_ROOMS)]
        self._listener = Listener(client, channels, self._heard)
        self._numbers = itertools.count(1)
        # No lock guards these two, because a time limit may interrupt a caller at any point.
        #: All waiters, each with True. Whatever removes one must start it or drop it.
        self._waiters: dict[Waiter, bool] = {}
        #: What other threads have for the room's thread to do.
        self._inbox: deque[Callable[[], object]] = deque()
        self._left = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._started = False
        self._starting = threading.Lock()
        self._lines = Lines()

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self) -> list[Waiter]:
        """All waiters."""
        return [*self._waiters.copy()]

    def enter(self, waiter: Waiter) -> None:
        """Add `waiter`, which waits until it starts or leaves.

        Raises:
            ValueError: Its rank is invalid.
        """
        commands.check_rank(waiter.rank)
        if not waiter.number:  # a waiter that enters again may still have its call
            waiter.number = next(self._numbers)  # type: ignore[misc] # each subclass has a slot or a dict for it
        self._start()
        self._waiters[waiter] = True
        self._post(partial(self._take_in, waiter))

    def wake(self) -> None:
        """Have the room ask its waiters again whether they can start."""
        self._wake.set()

    def look(self, line: str) -> bool:
        """Check `line` soon; return whether the room has waiters in it, or had until a moment ago."""
        self._post(partial(self._lines.soon, line))
        return line in self._lines.by_name

    def make_room(self, line: str) -> None:
        """Displace the last waiter in `line`, if it may be displaced."""
        self._post(partial(self._displace, line))

    def call_of(self, waiter: Waiter) -> bytes:
        """What the key of `waiter` holds from its call until the waiter acquires the key."""
        return tokens.call(tokens.for_capacity(self.token, waiter.demand.capacity), waiter.rank, waiter.number).value

    def leave(self, waiter: Waiter) -> None:
        """Remove `waiter`. If it was already called, pass its key on, because it will not ask for the key."""
        if not self.withdraw(waiter):
            self._post(partial(self._pass_on, waiter))

    def withdraw(self, waiter: Waiter) -> bool:
        """Remove `waiter` unless it was already called; return whether it was still waiting."""
        waited = self._waiters.pop(waiter, False)
        self._post(partial(self._forget, waiter))
        return waited

    def is_out(self, key: str) -> bool:
        """Whether the server of `key` did not answer last time."""
        return self._store.outage_of(key).unreachable is not None

    def leave_all(self) -> list[Waiter]:
        """Remove all waiters and leave all lines, within `LEAVING` seconds; return the waiters that were removed."""
        gone = [waiter for waiter in self.waiting() if self.withdraw(waiter)]
        if self._started and not self._stopped:
            left = self._left = threading.Event()
            self._heard(None)
            left.wait(LEAVING)
        return gone

    def stop(self) -> None:
        """Stop the threads, which close their connections. Called when this process no longer uses the server."""
        self._stopped = True
        self._listener.stop()
        self._wake.set()

    def _heard(self, message: str | None) -> None:
        self._post(partial(self._lines.hear, message))

    def _post(self, what: Callable[[], object]) -> None:
        self._inbox.append(what)
        self._wake.set()

    def _start(self) -> None:
        if self._started:
            return
        with self._starting:
            if not self._started:
                threading.Thread(target=self._run, name="redislock-room", daemon=True).start()
                self._started = True  # after start(): if that fails, the next waiter tries again
                self._listener.start()

    # No other thread runs the methods below.

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause = self._round()
            except BaseException:  # pragma: no cover - a bug in this class: `waiters` catches the errors of waiters
                logger.exception("handling the waiting messages of this process failed; trying again in a second")
                pause = SHORT_LOOK
                self._lines.hear(None)
            self._wake.wait(None if pause == math.inf else max(0.0, pause))
        self._store.close()

    def _round(self) -> float:
        """Check the lines that are due; return the seconds until the next round."""
        self._wake.clear()
        left = self._left
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        for waiter in self._lines.time_is_up():
            if self._take_out(waiter):
                self._lines.soon(waiter.line)
                give_turn(waiter, called=False)
        if self.host is not None:
            self.host.starts_round()
        due = self._lines.take_due()
        for line, is_offered in due.items():
            self._ask(line, partial(self._consider, line, is_offered))
        while ready := self._lines.next_ready():
            self._ask(ready, partial(self._stand, ready))
        for line, is_offered in due.items():
            if line.aside is not None:
                self._ask(line, partial(self._decline if is_offered else self._enter, line))
        aside = self._lines.counts
        if self.host is not None:
            self.host.ends_round(self, aside)
        left.set()
        now = time.monotonic()
        return min(self._lines.next_at, now + ASK_AGAIN if aside else math.inf) - now

    def _take_in(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._lines.add(waiter)

    def _forget(self, waiter: Waiter) -> None:
        self._lines.remove(waiter)
        self._lines.soon(waiter.line)

    def _displace(self, name: str) -> None:
        line = self._lines.by_name.get(name)
        last = line.waiters.last if line and line.waiters else None
        if last is not None and last.may_be_displaced and self._take_out(last):
            self._lines.soon(name)
            last.displaced()

    def _take_out(self, waiter: Waiter) -> bool:
        """Remove `waiter`; return False if it has left meanwhile."""
        self._lines.remove(waiter)
        return self._waiters.pop(waiter, False)

    def _consider(self, line: Line, is_offered: bool) -> None:
        """Set `line` aside until its first waiter can start; leave it if it has no waiter.

        If as many waiters as can hold the key were called and found no slot, let other rooms go first.
        """
        self._lines.take_aside(line)
        if not line.waiters:
            self._lines.drop(line)
            self._leave(line)
        elif not line.is_called_in_vain:
            self._lines.set_aside(line, is_out=self._outage_of(line).unreachable is not None)
        else:
            self._lines.within(line, SHORT_LOOK)
            if is_offered:
                self._leave(line)

    # These methods send a command. They raise LockUnavailable if Redis does not answer, or refuses the command.

    def _leave(self, line: Line) -> None:
        """Leave `line` unless the room is known not to be in it."""
        if line.rank is not None:
            self._store_of(line).leave(line.demand, self.token)
            line.rank = None

    def _decline(self, line: Line) -> None:
        """Leave `line`, whose key is offered to the room: its first waiter has no slot."""
        line.has_declined = True
        self._leave(line)

    def _enter(self, line: Line) -> None:
        """Stand in `line` with the rank of its first waiter, which has no slot, until the key is offered."""
        if line.must_enter:
            line.stand()  # before asking: the answer may be lost
            self._lines.within(line, lines.REFRESHED)
            self._store_of(line).enter(line.demand, self.token, line.first.rank)

    def _stand(self, line: Line) -> None:
        """Stand in `line`, and call its first waiter if it is that waiter's turn."""
        first, *others = line.waiters.first(2)
        next_rank = others[0].rank if others else None
        line.stand()  # before asking: the answer may be lost
        reply = self._store_of(line).stand(line.demand, self.token, first.rank, next_rank, first.number)
        if isinstance(reply, Conflict):
            self._let_start(line, reply)
        else:
            line.rank = next_rank
            self._call(first, line)
            if line.watching:
                self._let_start(line, self._store.look(line.demand) if line.demand.capacity > 1 else None)
        self._lines.later(line, line.look_in(reply, first.look_every, hears=self._listener.hears))

    def _call(self, first: Waiter, line: Line) -> None:
        if self._take_out(first) and give_turn(first, called=True):
            line.call(first)
        else:  # the waiter has left meanwhile, or failed to start
            self._post(partial(self._pass_on, first))

    def _let_start(self, line: Line, conflict: Conflict | None) -> None:
        """Start the waiters that need not wait for their turn, now that the holders in `conflict` have the key."""
        holders = conflict.holders if conflict else ()
        for waiter in [one for one in line.watching if one.need_not_wait(holders)]:
            if self._take_out(waiter):
                give_turn(waiter, called=False)

    def _pass_on(self, waiter: Waiter) -> None:
        """Pass on the key that `waiter` was called to but will not ask for. If that fails, the key soon expires."""
        line = self._lines.by_name.get(waiter.line, Line(waiter.demand))
        self._ask(line, lambda: self._store_of(line).pass_on(line.demand, self.call_of(waiter)))
        self._lines.soon(waiter.line)

    def _ask(self, line: Line, send: Callable[[], object]) -> None:
        """Call `send`, which sends a command about `line`. If that fails, check the line again in a while.

        If the server has just stopped answering, tell all waiters for its keys. A line that cannot be left now expires
        by itself.
        """
        outage = self._outage_of(line)
        was_out = outage.unreachable is not None
        try:
            send()
        except LockUnavailable as error:
            others = [*self._lines.by_name.values()] if outage.unreachable is not None and not was_out else []
            for one in {line, *(one for one in others if self._outage_of(one) is outage)}:
                self._refused(one, error)
        except BaseException:  # the other waiters must still get their turn
            logger.exception("checking the lock %s failed; trying again", shown(line.demand.key))
            self._lines.later(line, SHORT_LOOK)

    def _refused(self, line: Line, error: LockUnavailable) -> None:
        if not line.waiters:
            self._lines.drop(line)
            return
        line.refreshed = -math.inf  # the command may not have been sent
        self._lines.later(line, SHORT_LOOK)
        for waiter in line.waiters:
            waiter.unavailable(error)

    def _store_of(self, line: Line) -> LockStore:
        """The store, to send a command about `line`.

        Raises:
            LockUnavailable: The server does not answer, and it is not yet time to check again.
        """
        self._outage_of(line).check(line.demand.key)
        return self._store

    def _outage_of(self, line: Line) -> Outage:
        return self._store.outage_of(line.demand.key)
