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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from celery_redislock.connection.outage import Outage
from celery_redislock.connection.pool import Wake
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable, shown
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import ALL_ROOMS, Demand, channel_of
from celery_redislock.protocol.replies import Called, Conflict
from celery_redislock.protocol.several import gathered

from . import lines
from .lines import SHORT_LOOK, Line, Lines
from .listener import Listener
from .waiters import Waiter, give_turn, is_ready

W = TypeVar("W", bound=Waiter)

logger = logging.getLogger(__name__)

#: Seconds between two checks of whether the first waiters in the lines set aside can start.
ASK_AGAIN = 0.05
#: How long `Room.leave_all` may take, in seconds.
LEAVING = 2.0
#: This many seconds after it first lost its turn, a waiter that needs several keys is given one after the other.
STARVES_AFTER = 10.0
#: The room asks again for the keys that it keeps for a waiter after this many seconds, before its calls end.
KEPT_FOR = 2.0
#: For how many seconds it keeps all of them while there is no slot for that waiter. A body there may need one of them.
KEPT_WITHOUT_SLOT = 5.0


class Host(Protocol):
    """Knows whether waiters can start. Its methods are called in the thread of their room."""

    def starts_round(self) -> None:
        """The room is about to call `Waiter.is_ready` on some of its waiters."""

    def keeps_offer(self, waiter: Any) -> bool:
        """Whether a newcomer would take the key that is offered to `waiter`, if the room were to decline it."""

    def ends_round(self, room: Room, aside: Mapping[str, int]) -> None:
        """The round has ended. `aside` counts the lines whose first waiter cannot start now, by `Waiter.group`."""


class Keeping:
    """The keys that a room keeps for a waiter that needs several, while others of them are held.

    Attributes:
        again_at (float): When the room asks for all keys of the waiter again. Both times are by `time.monotonic()`.
        no_slot_since (float): Since when the room has kept all keys although the waiter has no slot.
    """

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.keys: Sequence[Demand] = ()
        self.again_at = self.no_slot_since = math.inf

    @property
    def has_all(self) -> bool:
        """Whether the room keeps all keys that the waiter needs, which then lacks only a slot."""
        return len(self.keys) == len(self.waiter.wants)


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
        hosts: Are told when a round starts and when it ends; empty if no waiter needs a slot.
    """

    def __init__(self, store: LockStore, client: Any, keyprefix: str = "") -> None:
        self.token = tokens.of_room(tokens.mint_nonce(), socket.gethostname(), keyprefix)
        self.hosts: set[Host] = set()
        self._store = store
        channels = [channel_of(room, keyprefix) for room in (self.token.nonce, ALL_ROOMS)]
        self._listener = Listener(client, channels, self._heard)
        self._numbers = itertools.count(1)
        # No lock guards these two, because a time limit may interrupt a caller at any point.
        #: All waiters, each with True. Whatever removes one must start it or drop it.
        self._waiters: dict[Waiter, bool] = {}
        #: What other threads have for the room's thread to do.
        self._inbox: deque[Callable[[], object]] = deque()
        self._left, self._wake = Wake(), Wake()
        self._stopped = self._started = False
        self._starting = threading.Lock()
        self._lines = Lines()
        self._keeping: Keeping | None = None

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

    def displace_last(self, line: str) -> None:
        """Displace the last waiter in `line`, if it may be displaced."""
        self._post(partial(self._displace, line))

    def call_of(self, waiter: Waiter, demand: Demand | None = None) -> bytes:
        """What the key of `waiter`, or the one it `demand`s, holds from its call until the waiter acquires it."""
        room = tokens.for_capacity(self.token, (demand or waiter.demand).capacity)
        return tokens.call(room, waiter.rank, waiter.number).value

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

    def leave_all(self, waiters: Iterable[W]) -> list[W]:
        """Remove `waiters`, and leave the lines that have none now, within `LEAVING` seconds; return those removed."""
        gone = [waiter for waiter in waiters if self.withdraw(waiter)]
        if self._started and not self._stopped:
            left = self._left = Wake()
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
            self._wake.wait(pause)
        self._store.close()

    def _round(self) -> float:
        """Check the lines that are due; return the seconds until the next round."""
        left = self._left
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        for waiter in self._lines.time_is_up():
            if self._take_out(waiter):
                self._lines.soon(waiter.line)
                give_turn(waiter, called=False)
        for host in self.hosts.copy():
            host.starts_round()
        keeping = self._keeping
        if keeping and keeping.waiter not in self._waiters:
            self._let_go()
        elif keeping and (time.monotonic() >= keeping.again_at or (keeping.has_all and is_ready(keeping.waiter))):
            self._keep(keeping)
        due = self._lines.take_due()
        for line, is_offered in due.items():
            self._ask(line, partial(self._consider, line, is_offered))
        while ready := self._lines.next_ready():
            self._ask(ready, partial(self._stand, ready))
        for line, is_offered in due.items():
            if line.aside is not None and is_offered and any(one.keeps_offer(line.first) for one in self.hosts.copy()):
                self._lines.hear(f"offer {line.demand.line}")  # look again in the next round
            elif line.aside is not None:
                self._ask(line, partial(self._decline if is_offered else self._enter_line, line))
        aside, keeping = self._lines.counts, self._keeping
        if keeping is not None and keeping.has_all:
            aside[keeping.waiter.group] = aside.get(keeping.waiter.group, 0) + 1
        for host in self.hosts.copy():
            host.ends_round(self, aside)
        left.set()
        now = time.monotonic()
        keep_at = math.inf if keeping is None else keeping.again_at
        return min(self._lines.next_at, keep_at, now + ASK_AGAIN if aside else math.inf) - now

    def _take_in(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._lines.add(waiter)

    def _forget(self, waiter: Waiter) -> None:
        self._lines.remove(waiter)
        self._lines.soon(waiter.line)

    def _displace(self, name: str) -> None:
        line = self._lines.by_name.get(name)
        if line and line.waiters and (last := line.waiters.last).may_be_displaced and self._take_out(last):
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
        line.is_offered = is_offered
        if not line.waiters:
            self._lines.drop(line)
            self._leave_line(line)
        elif self._keeping is not None and line.first is self._keeping.waiter:
            self._keep(self._keeping)
        elif not line.is_called_in_vain:
            self._lines.set_aside(line, is_out=self.is_out(line.demand.key))
        else:
            self._lines.within(line, SHORT_LOOK)
            if is_offered:
                self._leave_line(line)

    # These methods send a command. They raise LockUnavailable if Redis does not answer, or refuses the command.

    def _leave_line(self, line: Line) -> None:
        """Leave `line` unless the room is known not to be in it."""
        if line.rank is not None:
            self._store_of(line).leave(line.demand, self.token)
            line.rank = None

    def _decline(self, line: Line) -> None:
        """Leave `line`, whose key is offered to the room: its first waiter has no slot."""
        line.has_declined, line.is_offered = True, False
        self._leave_line(line)

    def _enter_line(self, line: Line) -> None:
        """Stand in `line` with the rank of its first waiter, which has no slot, until the key is offered."""
        if line.must_enter:
            line.stand(line.first.rank)  # before asking: the answer may be lost
            self._lines.within(line, lines.REFRESHED)
            self._store_of(line).enter(line.demand, self.token, line.first.rank)

    def _stand(self, line: Line) -> None:
        """Stand in `line`, and call its first waiter if it is that waiter's turn."""
        first = line.first
        if first.wants:
            self._gather(first, line)
            return
        reply = self._stand_for(first, line)
        if isinstance(reply, Called):
            self._call(first, line)
        self._let_start(line, reply)

    def _stand_for(self, waiter: Waiter, line: Line) -> Conflict | Called:
        """Stand in `line` for `waiter`, which is the first there. The key is kept for it if it is free."""
        next_rank = line.next_rank(waiter)
        line.stand(waiter.rank)  # before asking: the answer may be lost
        reply = self._store_of(line).stand(line.demand, self.token, waiter.rank, next_rank, waiter.number)
        if isinstance(reply, Called):
            line.rank = next_rank
        self._lines.later(line, line.look_in(reply, waiter.look_every, hears=self._listener.hears))
        return reply

    # A waiter that needs several keys.

    def _gather(self, waiter: Waiter, line: Line) -> None:
        """Ask for all keys of `waiter`, the first in `line`, and call it if it gets all. If not, pass them on."""
        if (keeping := self._may_keep(waiter)) is not None:
            self._keep(keeping)
            return
        demands = gathered(waiter.wants, line.demand, is_offered=line.is_offered, keeps=False)
        if (count := self._ask_in_order(waiter, demands)) == len(demands):
            self._call(waiter, line)
        else:
            self._give_back(waiter, demands[:count])

    def _ask_in_order(self, waiter: Waiter, demands: Sequence[Demand]) -> int:
        """Ask for keys of `waiter` until one is refused, and return how many were granted.

        The waiter then waits in the line of the key that was refused, or whose server gave no answer.
        """
        for number, demand in enumerate(demands):
            line = self._lines.of(demand)
            was_out, reply = self.is_out(demand.key), None
            # Unless another waiter of this room goes before it in this line.
            if not any(one is not waiter and one.rank <= waiter.rank for one in line.waiters.first(1)):
                try:
                    reply = self._stand_for(waiter, line)
                except LockUnavailable as error:
                    self._wait_in(line, waiter)
                    self._failed(line, error, was_out=was_out)
                    return number
            if not isinstance(reply, Called):
                self._wait_in(line, waiter)
            if reply is not None:  # else the server was not asked who has the key
                self._ask(line, partial(self._let_start, line, reply))
            if not isinstance(reply, Called):
                return number
            if not line.waiters:
                self._ask(line, partial(self._consider, line, False))
        return len(demands)

    def _wait_in(self, line: Line, waiter: Waiter) -> None:
        """Have `waiter` wait in `line`, and check the one in which it has waited."""
        before = self._lines.of(waiter.demand)
        if line is not before:
            waiter.lost_at = waiter.lost_at or time.monotonic()  # type: ignore[misc] # as for `number`
            self._lines.move(waiter, line)
            self._ask(before, partial(self._consider, before, before.is_offered))

    def _give_back(self, waiter: Waiter, demands: Sequence[Demand]) -> None:
        """Pass on the keys that are kept for `waiter`. If that fails, they are soon free."""
        for demand in demands:
            line, call = self._lines.by_name.get(demand.line, Line(demand)), self.call_of(waiter, demand)
            self._ask(line, partial(self._send_pass_on, line, call))

    def _send_pass_on(self, line: Line, call: bytes) -> None:
        self._store_of(line).pass_on(line.demand, call)

    # The room keeps keys for one waiter at a time: the first in rank of those that lost their turn long ago. Nothing
    # else would bound how often that happens. It is given one key after the other, in the order that all rooms share.

    def _may_keep(self, waiter: Waiter) -> Keeping | None:
        """What the room keeps for `waiter`; None if it keeps nothing for it. An earlier one displaces a later one."""
        keeping, lost_at = self._keeping, waiter.lost_at
        if keeping is None or keeping.waiter.rank > waiter.rank:
            if lost_at is None or time.monotonic() - lost_at < STARVES_AFTER:
                return None
            self._let_go()
            self._keeping = keeping = Keeping(waiter)
        return keeping if keeping.waiter is waiter else None

    def _keep(self, keeping: Keeping) -> None:
        """Ask for the keys of the waiter, also for those that the room keeps: its calls end. Call it if it gets all.

        If a key is lost or refused, those that come after it in the order are given back.
        """
        waiter, now = keeping.waiter, time.monotonic()
        keeping.again_at = now + KEPT_FOR
        count = self._ask_in_order(waiter, gathered(waiter.wants, waiter.demand, is_offered=False, keeps=True))
        self._give_back(waiter, [one for one in waiter.wants[count:] if one in keeping.keys])
        keeping.keys = waiter.wants[:count]
        has_slot = is_ready(waiter)
        if has_slot and keeping.has_all:
            keeping.keys = ()  # they are the waiter's from now on
            self._let_go()
            self._call(waiter, self._lines.of(waiter.demand))
        elif has_slot or not keeping.has_all:
            keeping.no_slot_since = math.inf
        elif now > keeping.no_slot_since + KEPT_WITHOUT_SLOT:
            waiter.lost_at = now  # type: ignore[misc] # as for `number`
            self._let_go()
            self._lines.within(self._lines.of(waiter.demand), 0.0)  # called to all, it stands in no line
        else:
            keeping.no_slot_since = min(now, keeping.no_slot_since)

    def _let_go(self) -> None:
        """Give back what the room keeps."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            self._give_back(keeping.waiter, keeping.keys)

    def _call(self, first: Waiter, line: Line) -> None:
        if self._take_out(first) and give_turn(first, called=True):
            line.call(first)
        else:  # the waiter has left meanwhile, or failed to start
            self._post(partial(self._pass_on, first))

    def _let_start(self, line: Line, reply: Conflict | Called) -> None:
        """Start the waiters that need not wait for their turn, now that the key has the holders in `reply`."""
        if line.moves_up(reply.now):
            self._lines.within(line, 0.0)  # tell the server at once
        if isinstance(reply, Called) and line.watching and line.demand.capacity > 1:
            reply = self._store.look(line.demand) or reply
        holders = reply.holders if isinstance(reply, Conflict) else ()
        for waiter in [one for one in line.watching if one.need_not_wait(holders)]:
            if self._take_out(waiter):
                give_turn(waiter, called=False)

    def _pass_on(self, waiter: Waiter) -> None:
        """Pass on the key that `waiter` was called to but will not ask for. If that fails, the key soon expires."""
        demands = waiter.wants or (waiter.demand,)
        self._give_back(waiter, demands)
        for demand in demands:
            self._lines.soon(demand.line)

    def _ask(self, line: Line, send: Callable[[], object]) -> None:
        """Call `send`, which sends a command about `line`. If that fails, check the line again in a while.

        If the server has just stopped answering, tell all waiters for its keys. A line that cannot be left now expires
        by itself.
        """
        was_out = self.is_out(line.demand.key)
        try:
            send()
        except LockUnavailable as error:
            self._failed(line, error, was_out=was_out)
        except BaseException:  # the other waiters must still get their turn
            logger.exception("checking the lock %s failed; trying again", shown(line.demand.key))
            self._lines.later(line, SHORT_LOOK)

    def _failed(self, line: Line, error: LockUnavailable, *, was_out: bool) -> None:
        outage = self._outage_of(line)
        others = [*self._lines.by_name.values()] if outage.unreachable is not None and not was_out else []
        for one in {line, *(one for one in others if self._outage_of(one) is outage)}:
            self._unavailable(one, error)

    def _unavailable(self, line: Line, error: LockUnavailable) -> None:
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
            LockUnavailable: The server did not answer last time, nor does it answer at once now. A thread of its own
                checks it: a silent node of a Cluster must not delay the turns at the others.
        """
        key, outage = line.demand.key, self._outage_of(line)
        if outage.unreachable is not None and time.monotonic() >= outage.look_at:
            look = threading.Thread(target=self._store.look_again, args=(key,), name="redislock-look", daemon=True)
            look.start()
            look.join(ASK_AGAIN)  # a server that answers by now is asked at once, and waiters are told nothing
        # In a Cluster, another node may have been found to have the key.
        if (reason := self._outage_of(line).unreachable) is not None:
            raise LockUnavailable(key, reason)
        return self._store

    def _outage_of(self, line: Line) -> Outage:
        return self._store.outage_of(line.demand.key)
