"""Lock: a lock for any code, over any redis-py client, with the interface of redis-py's own lock."""

from __future__ import annotations

import math
import time
from typing import Literal, Self

from redis.exceptions import LockError

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockConfigError, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Conflict
from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Token

from .handle import Handle, time_left
from .lock_server import LockServer


class Lock(Handle):
    """A lock on one key.

    Used as ``client.lock(name, lock_class=Lock)``, it does what redis-py's own lock does, and more.

    This lock and redis-py's exclude each other on the same name. Waiters are served in order of arrival, even across
    processes. redis-py's lock does not announce its release, so while it holds the key, waiters check every `sleep`
    seconds.

    Args:
        client: Any synchronous redis-py client. The lock uses the client's server and credentials, but opens its own
            connections, so the client's retries, encoding and protocol do not matter.
        name: The key in Redis.
        timeout: Seconds until the key expires after its holder dies or, without `renew`, after the acquire; None for
            no expiry.
        sleep: Seconds between two checks of the key while another library's lock holds the key.
        blocking: Whether `acquire` waits while another holder has the key.
        blocking_timeout: How long `acquire` waits, in seconds; None for no limit.
        thread_local: Whether this object holds the lock only in the thread that acquired it.
        raise_on_release_error: Whether the end of a ``with`` block raises if the lock was lost. If False, the
            loss is only logged.
        renew: Renew the key while it is held and this process lives. Needs a `timeout`.
        reentrant: Code that acquires a key held by its own context enters the lock again, without asking Redis. The
            last release in that context releases the key. A context is one of `contextvars`, within one thread and one
            asyncio task: two asyncio tasks exclude each other.
        fence: Ask for a fencing number.
        limit: How many holders the lock may have at once, 1 to 50. Use the same limit wherever you use the name.

    Raises:
        LockConfigError: `renew` without a `timeout`, an invalid `timeout` or `limit`, a `limit` above 1 with a
            `fence`, or an asyncio client.
    """

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the key.

        Args:
            sleep, blocking, blocking_timeout: Override the lock's own for this call.
            token: The token that the key will hold, if the caller must know it beforehand. By default, a fresh one.

        Returns:
            Whether the lock is held now.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
            LockConfigError: Waiting for the key would block the caller's event loop, or a `token` was given for a lock
                with a limit.
        """
        capacity = self.demand.capacity
        if token is not None and capacity > 1:
            raise LockConfigError(f"lock {self.key}: a lock with limit = {capacity} takes no token from the caller")
        given = None if token is None else Token.of(token if isinstance(token, bytes) else str(token))
        return self._acquire(sleep, self.patience(blocking, blocking_timeout), given) is None

    def release(self) -> None:
        """Release the key. If a reentrant lock was entered several times, only the last call releases it.

        Raises:
            LockError: This object does not hold the lock.
            LockLost: The lock is no longer held.
            LockUnavailable: Redis did not answer, or refused the release, which is sent again until the key expires.
        """
        entry = left = None
        try:
            entry = self._entry()
            left = self._leave(entry)
            was_held = left is None or left.server.store.send(left.held.hold.release())
        except BaseException as error:  # a time limit, for example; after a LockError, there is nothing to release
            if not isinstance(error, LockError) and (entry := left or entry or self._entry()):
                self._leave_later(entry)
            raise
        if left is not None:
            self._released(left.held, was_held=was_held)

    def extend(self, additional_time: float | None = None, replace_ttl: bool = False) -> Literal[True]:
        """Give the key more time.

        Args:
            additional_time: Seconds; None for the whole timeout from now.
            replace_ttl: Count `additional_time` from now instead of adding it to the time that the key has left.

        Returns:
            True.

        Raises:
            LockError: This object does not hold the lock, or the lock has no timeout.
            LockLost: The lock is no longer held.
            LockUnavailable: Redis did not answer, or refused the command.
            ValueError: `additional_time` is not a number of seconds, at most a billion.
        """
        held = self._limited("extend")
        if additional_time is not None and not replace_ttl:
            additional_time += time_left(held, LockServer.behind(self.redis).store.look(Demand(held.permit)))
        return self._extend(held, additional_time)  # counted from now: sending it twice adds nothing

    def reacquire(self) -> Literal[True]:
        """Renew the key for its whole timeout. It returns and raises the same as `extend`."""
        return self._extend(self._limited("reacquire"), None)

    def locked(self) -> bool:
        """Whether the lock is held, by this object or another; with a limit, whether all its permits are held.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        found = LockServer.behind(self.redis).store.look(self.demand)
        return found is not None and len(found.holders) >= self.demand.capacity

    def owned(self) -> bool:
        """Whether this object holds the key, according to Redis.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return self._is_in(LockServer.behind(self.redis).store.look(self.demand))

    def __enter__(self) -> Self:
        """Acquire the key.

        Raises:
            LockConflict: Another holder still had the key when `blocking_timeout` ended.
            LockUnavailable, LockConfigError: See `acquire`.
        """
        return self._entered(self._acquire(None, self.patience(None, None), in_block=True))

    def __exit__(self, *error: object) -> None:
        with self.end_of_block():
            self.release()

    def _acquire(
        self, sleep: float | None, timeout: float | None, token: Token | None = None, *, in_block: bool = False
    ) -> Conflict | None:
        server = LockServer.behind(self.redis)
        if self.reentrant and (entry := self._enter_again(server)) is not None:
            self._set(entry, in_block)
            return None
        held = HeldLock(server.store, self._hold(), self.timeout or math.inf)
        poll = float(self.sleep if sleep is None else sleep)
        try:
            while (conflict := server.take(held, timeout, poll=poll, fence=self._fence)) is None:
                if token is None or _choose_token(server, held, token):  # otherwise it was lost before that
                    self._set(self._keep(server, held), in_block)
                    return None
            return conflict
        except BaseException:
            server.keeper.remove(held)
            if held.hold.may_be_held:  # nothing else would release the key
                server.store.take_back(held.hold.undo(), is_lost=True)
            raise

    def _extend(self, held: HeldLock, ttl: float | None) -> Literal[True]:
        try:
            held.extend(ttl)
        finally:
            if self.renew:  # even if the answer was lost: the next renewal may be due earlier now
                LockServer.behind(self.redis).keeper.look_at(held)
        return True


def _choose_token(server: LockServer, held: HeldLock, token: Token) -> bool:
    """Have the key of `held` hold `token`, which the caller of a `Lock` chose, in place of the minted one.

    The key is acquired with a minted token first. Another caller may choose the same `token`, so if a reply is lost,
    only a minted token proves that the key was granted to this lock.

    Returns:
        Whether the lock is still held.

    Raises:
        LockUnavailable: Redis did not answer, or refused the command; the lock is not held.
    """
    store, sent_at = server.store, time.monotonic()
    try:
        reply, _, _ = store.ask(commands.release(held.demand, held.token.owner, keeps=(token, held.lease)))
        if reply[0] != Tag.REPLACED and not _has_stored(store, held, token):
            return False
    except BaseException:
        for undo in (held.hold.undo(), held.hold.renamed(token).undo()):  # in this order: the exchange may come late
            if held.remaining > 0 and store.undo(undo):  # after that, `token` may be another caller's
                server.keeper.send(undo, held.deadline)
        held.hold = held.hold.over()
        raise
    held.hold = held.hold.renamed(token)
    held.start_lease(sent_at)
    return True


def _has_stored(store: LockStore, held: HeldLock, token: Token) -> bool:
    """Whether `_choose_token` has stored `token`: its reply was lost, or an earlier command of it has come late.

    Until the deadline, only this lock can have stored it, because the key held the minted token before.
    """
    found = store.look(held.demand)
    if found is None or found.holder != token:
        return False
    if held.remaining <= 0:
        raise LockUnavailable(held.key, "Redis answered too late to tell whether the token is this lock's")
    return True
