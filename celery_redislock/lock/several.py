"""Locks: several locks as one, for code outside tasks. All of them are held, or none. AsyncLocks: for coroutines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from celery_redislock.errors import LockConflict
from celery_redislock.protocol.replies import Conflict

from .async_lock import Lock as AsyncLock
from .handle import Handle
from .lock import Lock

#: After this many seconds, a caller that was refused again and again keeps what it gets. As it asks in the order that
#: all callers share, it cannot be deadlocked.
KEEPS_AFTER = 10.0
L = TypeVar("L", bound=Handle)


class _Attempt(NamedTuple, Generic[L]):
    """One attempt to acquire all locks."""

    waits_for: L
    """The lock that was refused last: it is asked for first, and waited for."""
    began: float
    """When the first attempt began. All times are by `time.monotonic()`."""
    until: float
    """When to stop waiting."""
    keeps: bool = False
    """Whether to wait for the other locks too, and to keep what it gets meanwhile."""
    in_block: bool = False
    """Whether a ``with`` block is to begin."""

    def seconds_for(self, lock: L) -> float | None:
        """How long to wait for `lock`; None for no limit."""
        if not self.keeps and lock is not self.waits_for:
            return 0.0
        return None if self.until == math.inf else max(0.0, self.until - time.monotonic())

    def order(self, locks: Sequence[L]) -> Sequence[L]:
        """The order in which to ask for `locks`, which are in the order that all callers share."""
        return locks if self.keeps else sorted(locks, key=lambda one: one is not self.waits_for)


class _Several(Generic[L]):
    """The part that sends nothing to Redis.

    A caller waits for one key and holds nothing meanwhile. When it gets that key, it tries the others; if one of them
    is held, it gives all back and waits for that one.

    Args:
        locks: The locks, each with another key, in the order that all callers share.
        first: The one that stands for all: `name`, `key`, `token` and `fence` are its own.
    """

    def __init__(self, locks: Sequence[L], first: L) -> None:
        self._locks, self._first = tuple(locks), first
        self.name, self.key = first.name, first.key

    def __repr__(self) -> str:
        return f"<Locks {' '.join(map(repr, self.parts))}>"

    @property
    def parts(self) -> tuple[L, ...]:
        """All locks, the first key's first."""
        return (self._first, *(one for one in self._locks if one is not self._first))

    @property
    def token(self) -> str | None:
        """The token of the first key; None while the locks are not held."""
        return self._first.token

    @property
    def fence(self) -> int | None:
        """The fencing number of the first key, if the locks ask for one."""
        return self._first.fence

    @property
    def remaining(self) -> float:
        """Seconds until the holder's nearest deadline; 0.0 while the locks are not held."""
        return min(one.remaining for one in self._locks)

    @property
    def state(self) -> Literal["held", "at_risk", "lost"] | None:
        """``"held"``, ``"at_risk"`` or ``"lost"``, whichever is worst among the locks; None while they are not held."""
        states = [one.state for one in self._locks]
        return None if None in states else max(states, key=("held", "at_risk", "lost").index)

    def check(self) -> None:
        """Raise if any of the keys is not held. Call this right before a step that must not happen twice.

        Raises:
            LockLost: A key was lost, or the locks are not held.
        """
        for one in self._locks:
            one.check()

    def _first_attempt(self, blocking: bool | None, blocking_timeout: float | None) -> _Attempt[L]:
        seconds = self._first.patience(blocking, blocking_timeout)
        now = time.monotonic()
        return _Attempt(self._locks[0], now, math.inf if seconds is None else now + seconds)

    def _next_attempt(self, last: _Attempt[L], refused: L) -> _Attempt[L] | None:
        now = time.monotonic()
        return None if now >= last.until else last._replace(waits_for=refused, keeps=now - last.began > KEEPS_AFTER)

    def _entered(self, refused: tuple[L, Conflict] | None) -> Self:
        if refused is not None:
            lock, conflict = refused
            raise LockConflict(lock.key, conflict.info(lock.key))
        return self


class Locks(_Several[Lock]):
    """Several locks, used like one `Lock`: what `LockedTask.lock_for` and `locked` return for several keys."""

    def acquire(self, blocking: bool | None = None, blocking_timeout: float | None = None) -> bool:
        """Acquire all keys. Arguments and errors are as for `Lock.acquire`.

        Returns:
            Whether they are held now.

        Raises:
            LockLost: A key was lost while this caller waited for another one. No key is held.
        """
        return self._acquire(self._first_attempt(blocking, blocking_timeout)) is None

    def _acquire(self, attempt: _Attempt[Lock]) -> tuple[Lock, Conflict] | None:
        while (refused := self._try(attempt)) and (again := self._next_attempt(attempt, refused[0])):
            attempt = again
        return refused

    def _try(self, attempt: _Attempt[Lock]) -> tuple[Lock, Conflict] | None:
        """Take all locks, or none; then return the one that was refused, and who holds it."""
        with ExitStack() as taken:
            for lock in attempt.order(self._locks):
                conflict = lock._acquire(None, attempt.seconds_for(lock), in_block=attempt.in_block)
                if conflict is not None:
                    return lock, conflict
                taken.callback(lock.release)
            self.check()
            taken.pop_all()
        return None

    def release(self) -> None:
        """Release all keys.

        Raises:
            LockError, LockLost, LockUnavailable: As for `Lock.release`, for one of the keys. The others are released.
        """
        with ExitStack() as all_of_them:
            for lock in self._locks:
                all_of_them.callback(lock.release)

    def extend(self, additional_time: float | None = None, replace_ttl: bool = False) -> Literal[True]:
        """Give all keys more time, as `Lock.extend` does for one."""
        for lock in self._locks:
            lock.extend(additional_time, replace_ttl)
        return True

    def reacquire(self) -> Literal[True]:
        """Renew all keys for their whole timeout."""
        for lock in self._locks:
            lock.reacquire()
        return True

    def locked(self) -> bool:
        """Whether any of the keys is held, by this object or another; see `Lock.locked`."""
        return any(lock.locked() for lock in self._locks)

    def owned(self) -> bool:
        """Whether this object holds all keys, according to Redis."""
        return all(lock.owned() for lock in self._locks)

    def __enter__(self) -> Self:
        """Acquire all keys.

        Raises:
            LockConflict: Another holder still had one of them when the time was over. The error names that key.
            LockLost, LockUnavailable, LockConfigError: As for `acquire`.
        """
        return self._entered(self._acquire(self._first_attempt(None, None)._replace(in_block=True)))

    def __exit__(self, *error: object) -> None:
        with self._first.end_of_block():
            self.release()


class AsyncLocks(_Several[AsyncLock]):
    """`Locks` for coroutines."""

    async def acquire(self, blocking: bool | None = None, blocking_timeout: float | None = None) -> bool:
        """Acquire all keys; see `Locks.acquire`. If the call is cancelled, they are released."""
        return await self._acquire(self._first_attempt(blocking, blocking_timeout)) is None

    async def _acquire(self, attempt: _Attempt[AsyncLock]) -> tuple[AsyncLock, Conflict] | None:
        while (refused := await self._try(attempt)) and (again := self._next_attempt(attempt, refused[0])):
            attempt = again
        return refused

    async def _try(self, attempt: _Attempt[AsyncLock]) -> tuple[AsyncLock, Conflict] | None:
        async with AsyncExitStack() as taken:
            for lock in attempt.order(self._locks):
                conflict = await lock._acquire(None, attempt.seconds_for(lock), in_block=attempt.in_block)
                if conflict is not None:
                    return lock, conflict
                taken.push_async_callback(lock.release)
            self.check()
            taken.pop_all()
        return None

    async def release(self) -> None:
        """Release all keys; see `Locks.release`."""
        async with AsyncExitStack() as all_of_them:
            for lock in self._locks:
                all_of_them.push_async_callback(lock.release)

    async def extend(self, additional_time: float | None = None, replace_ttl: bool = False) -> Literal[True]:
        """Give all keys more time; see `Locks.extend`."""
        for lock in self._locks:
            await lock.extend(additional_time, replace_ttl)
        return True

    async def reacquire(self) -> Literal[True]:
        """Renew all keys for their whole timeout."""
        for lock in self._locks:
            await lock.reacquire()
        return True

    async def locked(self) -> bool:
        """Whether any of the keys is held; see `Locks.locked`."""
        return any([await lock.locked() for lock in self._locks])

    async def owned(self) -> bool:
        """Whether this object holds all keys, according to Redis."""
        return all([await lock.owned() for lock in self._locks])

    async def __aenter__(self) -> Self:
        """Acquire all keys; see `Locks`."""
        return self._entered(await self._acquire(self._first_attempt(None, None)._replace(in_block=True)))

    async def __aexit__(self, *error: object) -> None:
        with self._first.end_of_block():
            await self.release()
