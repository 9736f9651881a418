"""AsyncServer: a lock server as the coroutines of one event loop use it.

Commands are sent over connections of the loop. The keeper of the process renews the locks, and coroutines wait in its
room with the threads: so a busy loop loses no lock, and one connection listens for all waiters.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Self

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.connection.async_connections import AsyncConnections, AsyncNodeConnections
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.connection.outage import REFUSALS, is_refusal
from celery_redislock.connection.sender import MAX_PAUSE, Answer
from celery_redislock.errors import LockConfigError, LockInfo, LockUnavailable, describe
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol import commands
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.scripts import Command, Tag

from .lock_server import BlockedCaller, LockServer, in_loop

_random = random.SystemRandom()


class AsyncServer:
    """The lock server in one event loop.

    Attributes:
        server: The process's lock server.
    """

    def __init__(self, server: LockServer) -> None:
        self.server = server
        client = server.client
        try:
            self._transport = (
                AsyncNodeConnections(client) if isinstance(client, ClusterClient) else AsyncConnections(client)
            )
        except TypeError as error:
            raise LockConfigError(f"could not make an asyncio client for the lock server: {error}") from None
        self._closes = _close_with_the_loop(self._transport)
        with suppress(StopIteration):  # run it up to its `yield`: that registers it with the loop
            self._closes.asend(None).send(None)

    @classmethod
    def here(cls, server: LockServer) -> Self:
        """The lock server in the running event loop. Its connections are closed at the end of `asyncio.run`.

        Raises:
            LockConfigError: An option of the server's client does not work with asyncio.
        """
        here: Self = in_loop(server.in_loops, lambda: cls(server))
        return here

    async def ask(self, command: Command, in_doubt: tuple[Command, float] | None = None) -> Answer:
        """Like `Sender.ask`. If a command is cancelled or fails, the keeper sends `in_doubt`.

        Args:
            command: The command.
            in_doubt: What is sent if `command` may have been carried out or not, and for how many seconds it is of use:
                an undo; or `command` itself, which is then also sent again if the server has refused it.

        Raises:
            LockUnavailable: The server did not answer, or refused the command.
        """
        key = command.keys[0]
        sent_at, is_lost, outer = time.monotonic(), False, sys.exception()
        try:
            try:
                reply = await self._transport.ask(command)
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError) as error:
                is_lost = not is_refusal(error, outer)
                await asyncio.sleep(_random.uniform(0, MAX_PAUSE))
                sent_at = time.monotonic()
                reply = await self._transport.ask(command)
        except BaseException as error:
            if in_doubt is not None and (is_lost or in_doubt[0] is command or not isinstance(error, REFUSALS)):
                self.server.undo_later(in_doubt[0], time.monotonic() + in_doubt[1])
            if isinstance(error, RedisError):
                self.server.store.outage_of(key).failed(command.script, error)
                raise LockUnavailable(key, describe(error)) from error
            raise
        self.server.store.outage_of(key).answered(command.script, granted=reply[0] == Tag.GRANTED)
        return reply, sent_at, is_lost

    async def take(self, held: HeldLock, timeout: float | None, *, poll: float, fence: bool) -> Conflict | None:
        """Acquire `held`, waiting while others hold its key. See `LockServer.take`.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        conflict = await self._acquire(held, fence)
        if conflict is None or (timeout is not None and timeout <= 0):
            return conflict
        until, room = None if timeout is None else time.monotonic() + timeout, self.server.room
        rank = conflict.rank or conflict.now or time.time_ns() // 1000
        while conflict is not None:
            waiter = _WaitingCoroutine(held.demand, rank, poll)
            try:
                room.enter(waiter)
                left = None if until is None else max(0.0, until - time.monotonic())
                if not await waiter.is_called_within(left):
                    room.leave(waiter)
                    return conflict
                held.hold = held.hold.called(room.call_of(waiter))
                conflict = await self._acquire(held, fence)
            except BaseException:
                room.leave(waiter)
                raise
        return None

    async def release(self, held: HeldLock) -> bool:
        """Send the release of `held`; return whether its owner still owned the key, as `Sender.send` does.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. The keeper sends it again.
        """
        release = held.hold.release()
        reply, _, is_lost = await self.ask(release, (release, held.ends_at - time.monotonic()))
        return is_lost or reply[0] != Tag.LOST

    async def look(self, demand: Demand) -> Conflict | None:
        """See `LockStore.look`."""
        reply, _, _ = await self.ask(commands.inspect(demand))
        return None if reply[0] == Tag.FREE else Conflict.of(reply)

    async def inspect(self, demand: Demand) -> LockInfo | None:
        """See `LockStore.inspect`."""
        found = await self.look(demand)
        return found and found.info(demand.key)

    async def _acquire(self, held: HeldLock, fence: bool) -> Conflict | None:
        """Ask for the key of `held`; return the conflict, or None if the key was granted."""
        outage = self.server.store.outage_of(held.key)
        if (reason := outage.unreachable) is not None and not outage.let_look():
            raise LockUnavailable(held.key, reason)
        held.hold = hold = held.hold.asked()
        try:
            reply, sent_at, _ = await self.ask(hold.acquire(held.lease, fence=fence), (hold.undo(), held.lease))
        except LockUnavailable:
            held.hold = hold.doubted(hold.asks)
            raise
        held.hold = hold.answered(hold.asks, reply[0])
        if reply[0] != Tag.GRANTED:
            return Conflict.of(reply)
        held.granted(Granted.of(reply, sent_at))
        return None


class LockOfLoop(HeldLock):
    """A lock of coroutines. Once their event loop is closed, it is no longer renewed."""

    __slots__ = ("_loop", "_renew_at")

    def __init__(self, here: AsyncServer, hold: Hold, lease: float) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(here.server.store, hold, lease)

    @property
    def renew_at(self) -> float:
        """See `Term`."""
        return math.inf if self._loop.is_closed() else self._renew_at

    @renew_at.setter
    def renew_at(self, at: float) -> None:
        self._renew_at = at


class _WaitingCoroutine(BlockedCaller):
    """A caller of `AsyncServer.take`."""

    def __init__(self, demand: Demand, rank: int, poll: float) -> None:
        super().__init__(demand, rank, poll)
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()

    def take_turn(self, *, called: bool) -> None:
        """See `Waiter.take_turn`."""
        super().take_turn(called=called)
        self._loop.call_soon_threadsafe(self._woken.set)

    def unavailable(self, error: LockUnavailable) -> None:
        """See `Waiter.unavailable`."""
        super().unavailable(error)
        with suppress(RuntimeError):  # the loop is closed, with this waiter in it
            self._loop.call_soon_threadsafe(self._woken.set)

    async def is_called_within(self, seconds: float | None) -> bool:
        """Like `is_called_before`, without blocking the loop; None for no limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        return self.is_called_before(-math.inf)


async def _close_with_the_loop(transport: AsyncConnections | AsyncNodeConnections) -> AsyncGenerator[None, None]:
    """Close the connections of `transport` when the loop shuts down its asynchronous generators."""
    try:
        yield
    finally:
        await transport.close()
