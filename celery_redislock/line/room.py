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
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from celery_redislock.connection.outage import Outage
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable
from celery_redislock.info import shown
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, channel_of
from celery_redislock.protocol.replies import Conflict
from celery_redislock.protocol.tokens import Token

from . import schedule, waiters
from .listener import Listener
from .schedule import SHORT_LOOK, Aside, Looks, look_in
from .waiters import Queue, Queues, Waiter, give_turn, is_ready

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
    room, the other checks the keys. A hint only makes a check happen sooner.

    Args:
        store: A store that shares its connection with nothing else.
        client: The client that provides the listener's connection.
        keyprefix: The prefix of the name of the room's channel.

    Attributes:
        token: What a key holds while it is kept for the room.
    """

    def __init__(self, store: LockStore, client: Any, keyprefix: str = "") -> None:
        self.token = tokens.of_room(tokens.mint_nonce(), socket.gethostname(), keyprefix)
        self._store = store
        self._listener = Listener(client, channel_of(self.token.nonce, keyprefix), self._heard)
        self._queues = Queues()
        self._numbers = itertools.count(1)
        self._looks = Looks()
        #: Waiters that were called but will not ask for their key.
        self._called_and_gone: deque[Waiter] = deque()
        self._left = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._started = False
        self._starting = threading.Lock()
        #: Told when a round starts and when it ends.
        self.hosts: set[Host] = set()
        self._aside = Aside()  # only the room's thread uses this and the attributes below
        #: The servers, or nodes of a Cluster, that did not answer, each with the time to ask it again.
        self._silent: dict[Outage, float] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def waiting(self) -> list[Waiter]:
        """All waiters."""
        return self._queues.waiting()

    def enter(self, waiter: Waiter) -> None:
        """Add `waiter`, which waits until it starts or leaves.

        Raises:
            ValueError: Its rank is invalid.
        """
        commands.check_rank(waiter.rank)
        if not waiter.number:  # a waiter that enters again may still have its call
            waiter.number = next(self._numbers)  # type: ignore[misc] # each subclass has a slot or a dict for it
        self._start()
        self._queues.add(waiter)
        self._wake.set()

    def wake(self) -> None:
        """Have the room ask its waiters again whether they can start."""
        self._wake.set()

    def look(self, line: str) -> bool:
        """Check `line` soon; return whether the room has a queue for it."""
        if line not in self._queues.by_line:
            return False
        self._looks.soon(line)
        self._wake.set()
        return True

    def call_of(self, waiter: Waiter) -> bytes:
        """What the key of `waiter` holds from its call until the waiter acquires the key."""
        return tokens.call(tokens.for_capacity(self.token, waiter.demand.capacity), waiter.rank, waiter.number).value

    def leave(self, waiter: Waiter) -> None:
        """Remove `waiter`. If it was already called, pass its key on, because it will not ask for the key."""
        if not self.withdraw(waiter):
            self._called_and_gone.append(waiter)
            self._wake.set()

    def withdraw(self, waiter: Waiter) -> bool:
        """Remove `waiter` unless it was already called; return whether it was still waiting."""
        waited = self._queues.remove(waiter)
        self._looks.soon(waiter.line)
        self._wake.set()
        return waited

    def is_out(self, line: str) -> bool:
        """Whether the server of `line` did not answer last time. In a Cluster, lines on the other nodes come first."""
        return self._outage_of(line).unreachable is not None

    def leave_all(self) -> list[Waiter]:
        """Remove all waiters and leave all lines, within `LEAVING` seconds; return the waiters that were removed."""
        gone = [waiter for waiter in self.waiting() if self._queues.remove(waiter)]
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
        self._looks.hear(message)
        self._wake.set()

    def _start(self) -> None:
        if self._started:
            return
        with self._starting:
            if not self._started:
                threading.Thread(target=self._run, name="redislock-room", daemon=True).start()
                self._started = True  # after start(): if that fails, the next waiter tries again
                self._listener.start()

    def _run(self) -> None:
        """Run the room's thread. No other thread runs the methods below."""
        while not self._stopped:
            try:
                pause = self._round()
            except BaseException:  # pragma: no cover - a bug in this class: `waiters` catches the errors of waiters
                logger.exception("a room of waiters failed; it goes on in a second")
                pause = SHORT_LOOK
                self._looks.soon(None)
            self._wake.wait(None if pause == math.inf else max(0.0, pause))
        self._store.close()

    def _round(self) -> float:
        """Check the keys that are due; return the seconds until the next round."""
        self._wake.clear()
        left = self._left
        for line in self._queues.take_in():
            self._looks.soon(line)
        for waiter in self._queues.end(time.monotonic()):
            self._looks.soon(waiter.line)
            give_turn(waiter, called=False)
        self._silent = {outage: until for outage, until in self._silent.items() if until > time.monotonic()}
        self._pass_on()
        for host in tuple(self.hosts):
            host.starts_round()
        due = self._looks.due(self._queues.by_line)
        for line in sorted(due, key=lambda line: (self.is_out(line), self._queues.rank(line))):
            self._look_aside(self._queues.rank(line))
            self._try_to_look(line, is_offered=due[line])
        self._look_aside(math.inf)
        for host in tuple(self.hosts):
            host.ends_round(self, self._aside.counts)
        left.set()
        return self._pause()

    def _look_aside(self, before: float) -> None:
        """Check the lines set aside with a rank below `before`, as long as their first waiters can start."""
        while line := next((line for rank, line in self._aside.heads() if self._can_look(rank, line, before)), None):
            self._try_to_look(line, has_slot=True)

    def _can_look(self, rank: int, line: str, before: float) -> bool:
        first = self._queues.first(line)
        return rank < before and (first is None or is_ready(first))

    def _try_to_look(self, line: str, *, is_offered: bool = False, has_slot: bool = False) -> None:
        self._aside.discard(line)
        silent_until = self._silent.get(self._outage_of(line))
        if silent_until is not None:
            if line in self._queues.by_line:
                self._looks.later(line, silent_until - time.monotonic())
            return
        try:
            self._look(line, is_offered, has_slot)
        except LockUnavailable as error:
            self._refused(line, error)
        except BaseException:  # the other waiters must still get their turn
            logger.exception("a look at the lock %s failed; it is tried again", shown(Demand.of_line(line).key))
            self._looks.later(line, SHORT_LOOK)

    def _look(self, line: str, is_offered: bool, has_slot: bool) -> None:
        """Check whether it is the turn of the first waiter in `line`; leave a line without waiters.

        If that waiter cannot start now, the room stays in line with the waiter's rank until the key is offered.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        first, queue = self._queues.first(line), self._queues.by_line.get(line)
        if first is None or queue is None:
            self._queues.by_line.pop(line, None)
            self._leave(line, queue)
        elif queue.lapsed(schedule.CALLED_FOR) >= first.demand.capacity:
            # The waiters that were called found no slot: let other rooms go first.
            self._looks.within(line, SHORT_LOOK)
            if is_offered:
                self._leave(line, queue)
        elif has_slot or is_ready(first):
            self._stand(queue, first)
        else:
            self._aside.put(line, first.group, first.rank)
            if is_offered:
                queue.has_declined = True
                self._leave(line, queue)
            else:
                self._enter(queue, first)

    def _leave(self, line: str, queue: Queue | None) -> None:
        """Leave `line` unless the room is known not to be in it.

        Without a queue, that is never known: a command that arrived late may have put the room in the line.
        """
        if queue is None or queue.rank is not None:
            self._store.leave(Demand.of_line(line), self.token)
        if queue is not None:
            queue.rank = None

    def _enter(self, queue: Queue, first: Waiter) -> None:
        """Stand in line while `first` has no slot."""
        if queue.must_enter(first.rank):
            queue.stand(first.rank)  # before asking: the answer may be lost
            self._looks.within(first.line, waiters.REFRESHED)
            self._store.enter(first.demand, self.token, first.rank)

    def _stand(self, queue: Queue, first: Waiter) -> None:
        demand, line = first.demand, first.line
        following = self._queues.second(line)
        queue.stand(first.rank)  # before asking: the answer may be lost
        queue.has_declined = False
        next_rank = following.rank if following else None
        answer = self._store.stand(demand, self.token, first.rank, next_rank, first.number)
        if isinstance(answer, Conflict):
            self._give_turns(line, answer.holders)
            self._looks.later(line, look_in(answer, queue, first, hears=self._listener.hears))
            return
        queue.rank = next_rank
        self._looks.later(line, look_in(None, queue, first, hears=self._listener.hears))
        if self._queues.remove(first) and give_turn(first, called=True):
            queue.call(first)
        else:  # the waiter has left meanwhile, or failed to start
            self._called_and_gone.append(first)
            self._wake.set()
        if queue.watching:
            others = self._store.look(demand) if demand.capacity > 1 else None
            self._give_turns(line, others.holders if others else ())

    def _give_turns(self, line: str, holders: Sequence[Token]) -> None:
        """Start the waiters that need not wait for their turn, now that `holders` have the key."""
        for waiter in self._queues.take_out(line, holders):
            give_turn(waiter, called=False)

    def _pass_on(self) -> None:
        """Pass on the keys of called waiters that will not ask for them."""
        for waiter in [self._called_and_gone.popleft() for _ in range(len(self._called_and_gone))]:
            if self._store.outage_of(waiter.key) in self._silent:
                self._called_and_gone.append(waiter)
                continue
            try:
                self._store.pass_on(waiter.demand, self.call_of(waiter))
            except LockUnavailable as error:
                self._refused(waiter.line, error)
                continue
            if waiter.line in self._queues.by_line:
                self._looks.soon(waiter.line)

    def _refused(self, line: str, error: LockUnavailable) -> None:
        """Check `line` again in a while: the server refused a command about its key, or did not answer.

        As long as a server does not answer, the room sends it no commands, but still asks the other nodes of a
        Cluster. A line that cannot be left now, or a key that cannot be passed on, expires by itself.
        """
        outage = self._outage_of(line)
        lines = {line}
        if outage.unreachable is not None:
            self._silent[outage] = time.monotonic() + SHORT_LOOK
            lines |= {one for one in self._queues.by_line if self._outage_of(one) is outage}
        for one in lines:
            if self._queues.first(one) is None:
                self._queues.by_line.pop(one, None)
            else:
                self._looks.later(one, SHORT_LOOK)
        for waiter in self.waiting():
            if waiter.line in lines:
                waiter.unavailable(error)

    def _outage_of(self, line: str) -> Outage:
        return self._store.outage_of(Demand.of_line(line).key)

    def _pause(self) -> float:
        now = time.monotonic()
        at = min(self._looks.next, now + ASK_AGAIN if self._aside else math.inf, *self._silent.values())
        return min(at, self._queues.next_deadline) - now
