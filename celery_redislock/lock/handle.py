"""Handle: the part of a `Lock` that sends nothing to Redis. Entry: a held lock, and how many times it was entered.

The owner of an entry is a context of `contextvars`, within one thread or greenlet and one asyncio task. A copy of that
context in another thread, greenlet or asyncio task is another owner.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, ClassVar, Self

from redis.exceptions import LockError

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LONGEST, LockConfigError, LockConflict, LockLost, shown
from celery_redislock.hold.held_lock import KEY_GONE, LONGEST_TTL, NOT_OURS, HeldLock, State
from celery_redislock.options import check_limit
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold, Phase
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Conflict
from celery_redislock.protocol.tokens import Token

from .lock_server import LockServer, running_task

logger = logging.getLogger(__name__)

#: The entries of the current context. The references are weak, so that a lock that is dropped without a release is no
#: longer renewed, even if its context lives on.
_entries: ContextVar[tuple[weakref.ref[Entry], ...]] = ContextVar("redislock_entries", default=())


class Entry:
    """A held lock, and how many `Lock` objects of its owner have entered but not left it.

    Args:
        held: The lock.
        server: The lock server that granted it.
        is_renewed: Whether the server's keeper renews the lock as long as this object lives. If not, other code renews
            the lock, or nothing does.
        is_own: Whether the last release of this entry releases the key. False if a task's request owns the lock.

    Attributes:
        in_block: Whether a ``with`` block has entered, and so will leave, even if the lock is lost.
    """

    __slots__ = ("__weakref__", "_is_renewed", "_owner", "count", "held", "in_block", "is_own", "server")

    def __init__(self, held: HeldLock, server: LockServer, *, is_renewed: bool = False, is_own: bool = True) -> None:
        self.held, self.server, self.is_own = held, server, is_own
        self._is_renewed, self.count, self.in_block = is_renewed, 0, False
        self._owner: Any = None

    def __del__(self) -> None:
        if getattr(self, "_is_renewed", False):  # a time limit may have interrupted `__init__`
            self.end_renewal()

    def end_renewal(self) -> None:
        """Have the keeper stop renewing the lock, if it does."""
        self._is_renewed = False
        self.server.keeper.remove(self.held)

    @property
    def is_mine(self) -> bool:
        """Whether the calling context owns the entry, or no context does."""
        return self._owner is None or self._owner == _owner()

    def own_by_context(self, *, is_reentrant: bool) -> None:
        """Make the calling context the owner. If `is_reentrant`, `entry_of_context` finds the entry there."""
        self._owner = _owner()
        if not is_reentrant:
            return
        held_too = [one for one in _entries.get() if (entry := one()) is not None and entry.count > 0]
        _entries.set((*held_too, weakref.ref(self)))


def entry_of_context(server: LockServer, key: str) -> Entry | None:
    """The calling context's entry for `key`; None if there is none or its lock is lost."""
    for reference in _entries.get():
        entry = reference()
        if (
            entry is not None
            and entry.count > 0
            and entry.held.key == key
            and entry.server is server  # this process's own: a forked child has another
            and entry.held.remaining > 0
            and entry.is_mine
        ):
            return entry
    return None


def check_fence(held: HeldLock, fence: bool) -> None:
    """Raise if a fence is required but the lock is held without one.

    Raises:
        LockConfigError: `fence` is True, and the lock is held without one.
    """
    if fence and held.fence is None:
        raise LockConfigError(f"lock {held.key} is held without a fence: ask for one in the outermost block")


def _owner() -> tuple[int, Any]:
    task = running_task()
    # Call `get_ident` through its module, because gevent replaces it there. Keep a weak reference to the asyncio
    # task instead of its `id()`, which a later task may reuse.
    return threading.get_ident(), task and weakref.ref(task)


class Local:
    """The state of one `Lock` object.

    Attributes:
        entries: What it has entered and not left, each entry as many times as that. With a limit, it may enter several.
        other: The token of another object, whose lock this one takes over; empty if it was told to hold none; None if
            its own entries count.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.other: bytes | None = None

    @property
    def token(self) -> bytes | None:
        """The token, as in redis-py, whose users may store one here."""
        own = (one.held.token.value for one in reversed(self.entries) if one.count)
        return next(own, None) if self.other is None else self.other or None

    @token.setter
    def token(self, token: bytes | None) -> None:
        is_own = any(one.held.token.value == token for one in self.entries[-1:])
        self.other = None if is_own else token or b""


class _ThreadLocal(threading.local, Local):
    """The state of one `Lock` object, separate for each thread."""


class Handle:
    """The part of `Lock` that sends nothing to Redis.

    If a lock is `reentrant` and `thread_local`, only the context that acquired it holds it. See `Lock` for the
    arguments.
    """

    _is_for_asyncio: ClassVar[bool] = False

    def __init__(
        self,
        client: Any,
        name: Any,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        renew: bool = False,
        reentrant: bool = False,
        fence: bool = False,
        limit: int = 1,
    ) -> None:
        key = name.decode() if isinstance(name, bytes) else str(name)
        self.demand = Demand(key, check_limit(f"lock {key}", limit, fence=fence))
        if renew and not timeout:
            raise LockConfigError(f"lock {key}: renew=True needs a timeout: how long the key outlives a dead holder")
        # Redis would accept less than a millisecond, and delete the key.
        if timeout not in (None, 0) and not (isinstance(timeout, int | float) and 0.001 <= timeout <= LONGEST_TTL):
            allowed = f"seconds, from 0.001 to {LONGEST_TTL:,}, or None"
            raise LockConfigError(f"lock {key}: timeout = {timeout!r} is not allowed; allowed: {allowed}")
        if inspect.iscoroutinefunction(getattr(client, "execute_command", None)) and not self._is_for_asyncio:
            raise LockConfigError(
                f"lock {key}: this Lock needs a synchronous client; for an asyncio client, use "
                "celery_redislock.asyncio.Lock"
            )
        self.redis, self.name = client, name
        #: The key in Redis.
        self.key: str = key
        self.timeout, self.sleep = timeout, sleep
        self.blocking, self.blocking_timeout = blocking, blocking_timeout
        self.thread_local, self.raise_on_release_error = bool(thread_local), raise_on_release_error
        self.renew, self.reentrant = renew, reentrant
        self._local, self._fence = self._new_local(), fence

    def __repr__(self) -> str:
        return f"<Lock {shown(self.key, LONGEST)} {self.state or 'not held'}>"

    @property
    def local(self) -> Local:
        """The state of this object: with `thread_local`, the calling thread's."""
        state: Local = self._local
        return state

    def _new_local(self) -> Any:
        return _ThreadLocal() if self.thread_local else Local()

    @property
    def token(self) -> str | None:
        """The token that the key holds while this object holds the lock; None while it does not."""
        return entry.held.token.value.decode("utf-8", "replace") if (entry := self._entry()) else None

    @property
    def fence(self) -> int | None:
        """The fencing number, if the lock asked for one: greater than any earlier holder's."""
        return entry.held.fence if (entry := self._entry()) else None

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; 0.0 while the lock is not held."""
        return entry.held.remaining if (entry := self._entry()) else 0.0

    @property
    def state(self) -> State | None:
        """``"held"``, ``"at_risk"`` (less than half of the timeout remains), ``"lost"``; None while not held."""
        return entry.held.state if (entry := self._entry()) else None

    def check(self) -> None:
        """Raise if the key is not held. Call this right before a step that must not happen twice.

        Raises:
            LockLost: This object does not hold the key, or no longer does.
        """
        if (entry := self._entry()) is None:
            raise LockLost(self.key, "this object does not hold it")
        entry.held.check()

    def _set(self, entry: Entry, in_block: bool) -> None:
        """Record that the lock was acquired or entered again; `in_block`: by a ``with`` block."""
        local = self.local
        local.other = None
        # Who uses a timeout as a pause never leaves. A count of 0: the beginning or the end of a block was interrupted.
        for one in [*local.entries]:
            is_over = not one.count or (one.held.left <= 0 and not one.in_block)
            if is_over and (self._is_for_asyncio or one.is_mine):
                with suppress(ValueError):  # another thread removes it too
                    local.entries.remove(one)
        entry.in_block |= in_block
        local.entries.append(entry)
        entry.count += 1

    def _unset(self, entry: Entry | None) -> Entry:
        """Record one release of `entry`, which this object has entered; return the entry.

        Raises:
            LockError: This object does not hold the lock.
        """
        if entry is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", self.key)
        local = self.local
        try:
            local.entries.remove(entry)
        except ValueError:
            if local.other is None:  # another thread has just left it
                return self._unset(self._entry())
            local.other = None
            local.entries.clear()
        return entry

    def _leave(self, entry: Entry | None) -> Entry | None:
        """Record one release. Return the entry if its key must now be released: send that, and call `_released`.

        Raises:
            LockError: This object does not hold the lock.
        """
        entry = self._unset(entry)
        entry.count -= 1
        if entry.count or not entry.is_own:
            return None
        entry.end_renewal()
        entry.held.hold = entry.held.hold.ended()  # an eager run inside the block may have shared the lock
        return entry

    def _leave_later(self, entry: Entry) -> None:
        """Finish a release of `entry` that was interrupted at any point."""
        # `_leave` may have counted already, but only if it was the last: after an inner one, it calls nothing more.
        entry.count = max(0, entry.count - 1)
        if entry.count == 0 and entry.is_own:
            entry.end_renewal()
            if entry.held.token.since:  # another caller may choose the token that this one has chosen
                entry.server.undo_later(entry.held.hold.ended().release(), entry.held.ends_at)

    def _released(self, held: HeldLock, *, was_held: bool) -> None:
        """Record the reply to the release.

        Raises:
            LockLost: The lock was no longer held.
        """
        if not was_held:
            held.lose(NOT_OURS)
        if held.was_lost:  # the keeper may know of a loss that a lost reply hid from this release
            held.check()

    def _entered(self, conflict: Conflict | None) -> Self:
        if conflict is not None:
            raise LockConflict(self.key, conflict.info(self.key))
        return self

    @contextmanager
    def end_of_block(self) -> Iterator[None]:
        """Around the release: log the loss instead of raising it, if the lock says so."""
        try:
            yield
        except LockError as lost:
            if self.raise_on_release_error:
                raise
            logger.warning("at the end of a block: %s", lost)

    def patience(self, blocking: bool | None, blocking_timeout: float | None) -> float | None:
        """How long an acquire with these arguments waits, in seconds; None for no limit."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        return self.blocking_timeout if blocking_timeout is None else blocking_timeout

    def _hold(self) -> Hold:
        """A new owner's hold."""
        return Hold(self.demand, tokens.mint(tokens.mint_nonce(), None, _origin()))

    def _keep(self, server: LockServer, held: HeldLock) -> Entry:
        """The entry of a lock that was just granted."""
        entry = Entry(held, server, is_renewed=self.renew)
        if self.renew:
            server.keeper.add(held)
        entry.own_by_context(is_reentrant=self.reentrant)
        return entry

    def _is_in(self, found: Conflict | None) -> bool:
        """Whether this object is among the holders that were found."""
        entry = self._entry()
        holders = found.holders if found is not None else ()
        return entry is not None and any(one.owner == entry.held.token.owner for one in holders)

    def _enter_again(self, server: LockServer) -> Entry | None:
        """Enter the lock again if the caller already holds its key. Return None if the key must be acquired.

        Raises:
            LockConfigError: The lock is held without a fence, and this object asks for one.
        """
        entry = entry_of_context(server, self.key)
        held = entry.held if entry else self._held_around(server.store)
        if held is None:
            return None
        check_fence(held, self._fence)
        entry = entry or self._entry()  # the latter if this object has entered that lock before
        return entry if entry is not None and entry.held is held else Entry(held, server, is_own=False)

    def _held_around(self, store: LockStore) -> HeldLock | None:
        """The lock on this key that surrounding code, such as a task's run, already holds. Subclasses override this."""
        return None

    def _entry(self) -> Entry | None:
        """What the caller holds through this object, its own before another thread's; None if there is nothing."""
        local = self.local
        if local.other is not None:
            return self._adopt(local.other) if local.other else None
        # A forked child does not hold the locks of its parent.
        entries = [one for one in reversed(local.entries) if one.count and one.server.pid == os.getpid()]
        for one in entries:
            if one.is_mine:
                return one
        return entries[0] if entries and not (self.reentrant and self.thread_local) else None

    def _adopt(self, token: bytes) -> Entry:
        """A new entry for a lock whose token the user has stored in `local.token`, as users of redis-py's lock do.

        Raises:
            LockConfigError: The lock has a limit: a token alone does not tell which permit is held.
        """
        if self.demand.capacity > 1:
            raise LockConfigError(f"lock {self.key}: a lock with a limit cannot take over the token of another object")
        hold = Hold(self.demand, Token.of(token), phase=Phase.HELD)
        server = LockServer.behind(self.redis)
        held = HeldLock(server.store, hold, self.timeout or math.inf)
        held.start_lease(time.monotonic())
        entry = Entry(held, server)
        entry.count = 1
        return entry

    def _limited(self, verb: str) -> HeldLock:
        """Return the held lock if it has a timeout. Otherwise raise the error that redis-py's lock raises."""
        if (entry := self._entry()) is None:
            raise LockError(f"Cannot {verb} an unlocked lock", self.key)
        if entry.held.lease == math.inf:  # not this object's own timeout: another may have acquired the lock
            raise LockError(f"Cannot {verb} a lock with no timeout", self.key)
        return entry.held


@functools.cache
def _origin() -> str:
    return tokens.origin(socket.gethostname(), None)


def time_left(held: HeldLock, found: Conflict | None) -> float:
    """Seconds until the key expires, by the server's clock.

    Args:
        held: The lock.
        found: Who holds the key.

    Raises:
        LockLost: The key is free, or has no expiry.
    """
    if found is None or found.ttl is None:
        held.lose(KEY_GONE)
        held.check()
    return (found and found.ttl) or 0.0
