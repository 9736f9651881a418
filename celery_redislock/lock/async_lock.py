"""Lock: the lock of `celery_redislock.asyncio`, over any redis-py client."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Conflict, Renewed

from .async_server import AsyncServer, LockOfLoop
from .handle import Entry, Handle, Local, time_left
from .lock_server import LockServer, running_task


class Lock(Handle):
    """A lock on one key, for coroutines.

    Used as ``client.lock(name, lock_class=Lock)``, it does what the lock of `redis.asyncio` does, and more. It is the
    same lock as `celery_redislock.Lock`, with the same line, and takes the same arguments.

    Args:
        client: A client of `redis.asyncio`. The lock uses the client's server and credentials, but opens its own
            connections, so the client's retries, encoding and protocol do not matter.
        name: The key in Redis.
        timeout: Seconds until the key expires after its holder dies or, without `renew`, after the acquire; None for
            no expiry.
        sleep: Seconds between two checks of the key while another library's lock holds the key.
        blocking: Whether `acquire` waits while another holder has the key.
        blocking_timeout: How long `acquire` waits, in seconds; None for no limit.
        thread_local: Whether this object holds the lock only in the asyncio task that acquired it.
        raise_on_release_error: Whether the end of an ``async with`` block raises if the lock was lost. If False, the
            loss is only logged.
        renew: Renew the key while it is held, this process lives and the event loop is open. Needs a `timeout`.
        reentrant: Code that acquires a key held by its own asyncio task enters the lock again, without asking Redis.
            The last release in that task releases the key.
        fence: Ask for a fencing number.
        limit: How many holders the lock may have at once, 1 to 50. Use the same limit wherever you use the name.

    Raises:
        LockConfigError: `renew` without a `timeout`, an invalid `timeout` or `limit`, or a `limit` above 1 with
            a `fence`.
    """

    _is_for_asyncio: ClassVar[bool] = True

    @property
    def local(self) -> Local:
        """The state of this object: with `thread_local`, the running asyncio task's.

        A task inherits the state of one that has ended: `asyncio.wait_for` may acquire the lock in a task of its own.
        It does not if that was a task of another loop that is still open, in another thread. Until it releases or
        extends the lock, it only looks at that state: another task may look too, and is not to keep it.
        """
        return self._local_state(takes_over=False)

    def _local_state(self, *, takes_over: bool) -> Local:
        if not self.thread_local:
            return super().local
        task = running_task()
        states: dict[Any, Local] = self._local
        if task is None or task in states:
            return states.get(task) or Local()
        loop = task.get_loop()
        over = (one for one in [*states][::-1] if one.done() and (one.get_loop() is loop or one.get_loop().is_closed()))
        # After a loop was closed, two threads may get here at once.
        if (state := (states.pop if takes_over else states.get)(next(over, None), None)) is None:
            return Local()
        for entry in state.entries if self.reentrant else ():
            entry.own_by_context(is_reentrant=takes_over)
        if takes_over:
            states[task] = state
        return state

    def _new_local(self) -> Any:
        return {} if self.thread_local else Local()

    def _set(self, entry: Entry, in_block: bool) -> None:
        if self.thread_local:
            # Forget the tasks that have ended and hold nothing. Inherit from none: another task is to release the lock.
            for task, state in [*self._local.items()]:
                if task and task.done() and not any(one.held.left > 0 for one in state.entries):
                    self._local.pop(task, None)
            self._local.setdefault(running_task(), Local())
        super()._set(entry, in_block)

    def _unset(self, entry: Entry | None) -> Entry:
        self._local_state(takes_over=True)
        entry = super()._unset(entry)
        if self.thread_local and self.local.token is None:
            self._local.pop(running_task(), None)
        return entry

    async def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, *, sleep: float | None = None
    ) -> bool:
        """Acquire the key.

        If the call is cancelled, the key is released.

        Args:
            blocking, blocking_timeout, sleep: Override the lock's own for this call.

        Returns:
            Whether the lock is held now.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return await self._acquire(sleep, self.patience(blocking, blocking_timeout)) is None

    async def release(self) -> None:
        """Release the key. If a reentrant lock was entered several times, only the last call releases it.

        If the call is cancelled, the key is released all the same.

        Raises:
            LockError: This object does not hold the lock.
            LockLost: The lock is no longer held.
            LockUnavailable: Redis did not answer, or refused the command; it is sent again until the key expires.
        """
        if (entry := self._leave(self._entry())) is not None:
            self._released(entry.held, was_held=await AsyncServer.here(entry.server).release(entry.held))

    async def extend(self, additional_time: float | None = None, replace_ttl: bool = False) -> Literal[True]:
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
        self._local_state(takes_over=True)
        held = self._limited("extend")
        if additional_time is not None and not replace_ttl:
            additional_time += time_left(held, await self._server().look(Demand(held.permit)))
        return await self._extend(held, additional_time)

    async def reacquire(self) -> Literal[True]:
        """Renew the key for its whole timeout. It returns and raises the same as `extend`."""
        self._local_state(takes_over=True)
        return await self._extend(self._limited("reacquire"), None)

    async def locked(self) -> bool:
        """Whether the lock is held, by this object or another; with a limit, whether all its permits are held.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        found = await self._server().look(self.demand)
        return found is not None and len(found.holders) >= self.demand.capacity

    async def owned(self) -> bool:
        """Whether this object holds the key, according to Redis.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return self._is_in(await self._server().look(self.demand))

    async def __aenter__(self) -> Self:
        """Acquire the key.

        Raises:
            LockConflict: Another holder still had the key when `blocking_timeout` ended.
            LockUnavailable: See `acquire`.
        """
        return self._entered(await self._acquire(None, self.patience(None, None), in_block=True))

    async def __aexit__(self, *error: object) -> None:
        with self.end_of_block():
            await self.release()

    def _server(self) -> AsyncServer:
        return AsyncServer.here(LockServer.behind(self.redis))

    async def _acquire(self, sleep: float | None, timeout: float | None, *, in_block: bool = False) -> Conflict | None:
        here = self._server()
        entry: Entry | None = self._enter_again(here.server) if self.reentrant else None
        if entry is None:
            held = LockOfLoop(here, self._hold(), self.timeout or math.inf)
            poll = float(self.sleep if sleep is None else sleep)
            if (conflict := await here.take(held, timeout, poll=poll, fence=self._fence)) is not None:
                return conflict
            entry = self._keep(here.server, held)
        self._set(entry, in_block)
        return None

    async def _extend(self, held: HeldLock, ttl: float | None) -> Literal[True]:
        here = self._server()
        for part in held.parts:  # as `HeldLock.extend` does
            part.check_held()
            renewal = part.extending(ttl)
            try:
                reply, _, is_lost = await here.ask(commands.renew([(part.permit, part.token, renewal.ttl)]))
            except BaseException:
                part.unanswered(renewal)
                raise
            finally:
                if self.renew:  # even if the answer was lost: the next renewal may be due earlier now
                    here.server.keeper.look_at(part)
            part.extended(renewal, Renewed.of(reply[0]), is_lost=is_lost)
        return True
