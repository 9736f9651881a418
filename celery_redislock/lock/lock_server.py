"""LockServer: this process's store, keeper and rooms for one lock server. A forked child creates its own."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from asyncio import AbstractEventLoop, _get_running_loop
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import RedisCluster

from celery_redislock.connection.clients import derive
from celery_redislock.connection.cluster import ClusterStore, of_cluster
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.connection.connect import command_time
from celery_redislock.connection.outage import Outage
from celery_redislock.connection.pool import Wake
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockConfigError, LockUnavailable
from celery_redislock.hold.held_lock import TRUSTED, HeldLock
from celery_redislock.hold.keeper import Keeper
from celery_redislock.line import lines
from celery_redislock.line.room import Room
from celery_redislock.line.waiters import Waiter
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.scripts import NOTE_TTL, Command

T = TypeVar("T")
#: The attribute of a pool or an app that has its `Servers`.
SERVERS = "_redislock_servers"
#: Seconds between two checks of a key whose release sends no hint.
POLL = 0.1


class LockServer:
    """This process's store, keeper and rooms, each with its own connections.

    Args:
        client: A client from `connect` or `derive`.
        keyprefix: The prefix of channel names on that server. The names of keys already include it.

    Attributes:
        pid: The process that the server belongs to.
        keeper: Renews the locks that this process holds on the server.
        in_loops: What `AsyncServer.here` has made for the event loops of this process.
        room: The room where this process's callers wait for the server's keys.
        message_room: The room where its messages wait. In one room with the callers, a message without a slot would
            hold up the callers behind it, and in a pool of threads or greenlets their bodies may have all the slots.
    """

    def __init__(self, client: redis.Redis | ClusterClient, keyprefix: str = "") -> None:
        self.client, self.keyprefix = client, keyprefix
        self.pid = os.getpid()
        self._outage = Outage()
        self.store = ClusterStore(client) if isinstance(client, ClusterClient) else LockStore.of(client, self._outage)
        self.command_time = command_time(client)
        self.keeper = Keeper(self._store(1), self.command_time, self.store)
        self.store.later = self.undo_later
        self.room, self.message_room = self._new_room(), self._new_room()
        self.in_loops: dict[AbstractEventLoop, Any] = {}
        # Lets `behind` find this server for a `Lock` made with the same client.
        servers_of(getattr(client, "connection_pool", client)).setdefault(self.pid, self)

    def stop(self) -> None:
        """Stop the threads and close the connections. Called when this process no longer uses the server."""
        self.keeper.stop()
        self.room.stop()
        self.message_room.stop()
        self.store.close()

    def _store(self, max_connections: int) -> LockStore:
        """A store with connections of its own; on a Cluster, with `max_connections` to each node."""
        if isinstance(self.client, ClusterClient):
            return ClusterStore(self.client, max_connections)
        return LockStore.of(derive(self.client, max_connections), self._outage)

    def _new_room(self) -> Room:
        listens = self.client if isinstance(self.client, ClusterClient) else derive(self.client, 1)
        # A room uses one connection at a time. As one of two, it is a spare, and no command goes through the pool.
        return Room(self._store(2), listens, self.keyprefix)

    @classmethod
    def behind(cls, client: Any) -> LockServer:
        """The lock server for a user's redis-py client, which may be asyncio's.

        Its threads end when the client's pool is garbage-collected.
        """
        pool = getattr(client, "connection_pool", client)  # a Cluster's client has many pools: use the client itself
        servers = servers_of(pool)
        if (server := servers.get(os.getpid())) is None:
            keyprefix = next((one.keyprefix for one in servers.values()), "")  # after a fork, the parent's
            is_cluster = isinstance(client, RedisCluster | AsyncRedisCluster | ClusterClient)
            ours = of_cluster(client) if is_cluster else derive(client)
            server = servers.setdefault(os.getpid(), cls(ours, keyprefix))
            weakref.finalize(pool, server.stop).atexit = False
        return server

    def take(
        self, held: HeldLock, timeout: float | None, *, poll: float = POLL, fence: bool = False
    ) -> Conflict | None:
        """Acquire `held`, waiting while others hold its key.

        Args:
            held: A lock that is not held yet.
            timeout: How long to wait, in seconds; None for no limit.
            poll: Seconds between two checks of the key while another library's lock, whose release sends no hint, holds
                it.
            fence: Ask for a fencing number.

        Returns:
            None once the key is granted, otherwise the last conflict.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
            LockConfigError: Waiting for the key would block the caller's event loop.
        """
        conflict = self._acquire(held, fence)
        if conflict is None or (timeout is not None and timeout <= 0):
            return conflict
        if running_loop() is not None:
            raise LockConfigError(
                f"the lock {held.key} is held by {conflict.info(held.key).who}, and waiting for it here would "
                "block the asyncio event loop: use celery_redislock.asyncio or the task's alock_for(), or acquire and "
                "release it in a thread, as with asyncio.to_thread(), or do not wait, with block_for=0 or "
                "blocking=False"
            )
        end = math.inf if timeout is None else time.monotonic() + timeout
        rank = conflict.rank or conflict.now or time.time_ns() // 1000
        while conflict is not None:
            caller = BlockedCaller(held.demand, rank, poll)
            try:
                self.room.enter(caller)
                if not caller.is_called_before(end):
                    self.room.leave(caller)
                    return conflict
                held.hold = held.hold.called(self.room.call_of(caller))
                conflict = self._acquire(held, fence)
            except BaseException:
                self.room.leave(caller)
                raise
        return None

    def _acquire(self, held: HeldLock, fence: bool) -> Conflict | None:
        """Ask for the key of `held`; return the conflict, or None if the key was granted."""
        while True:
            result = self.store.acquire(held, held.lease, fence=fence)
            if isinstance(result, Granted):
                held.granted(result)
                return None
            # Finished means that a run with the caller's own task id has succeeded and the key is cooling down.
            conflict = result if isinstance(result, Conflict) else self.store.look(held.demand)
            if conflict is not None:
                return conflict

    def send_late(self, command: Command, on_reply: Callable[[bool], object], in_doubt: Callable[[], object]) -> None:
        """Like `LockStore.send_late`, but the keeper reads the answer if no other command does.

        Raises:
            LockUnavailable: See `LockStore.send_late`.
        """
        self.store.send_late(command, on_reply, in_doubt)
        self.keeper.expect_answers()

    def undo_later(self, undo: Command, until: float = math.inf) -> None:
        """Have the keeper send `undo`, a release for example, as soon as Redis answers.

        Args:
            undo: The command.
            until: When it stops being useful, by `time.monotonic()`. The keeper tries for `NOTE_TTL` seconds at most.
        """
        self.keeper.send(undo, min(until, time.monotonic() + NOTE_TTL))

    def give_up(
        self, demand: Demand, claim: str, ttl: float, *, is_to_come: bool, closes: tuple[str, ...] = ()
    ) -> None:
        """Have the keeper give up the reservations of a message that will not run; see `LockStore.give_up`.

        Args:
            demand: The lock.
            claim: The claim that the message carries.
            ttl: How long the reservations may live, in seconds. The keeper stops trying after that time.
            is_to_come: Whether the key may still be handed over to the message. If so, the keeper tries for at least
                `NOTE_TTL` seconds.
            closes: As for `LockStore.give_up`.
        """
        until = time.monotonic() + (max(ttl, NOTE_TTL) if is_to_come else ttl)
        self.keeper.send(commands.give_up(demand, claim, is_to_come=is_to_come, closes=closes), until)

    def pass_on(self, demand: Demand, call: bytes) -> None:
        """Have the keeper pass on the key: its called waiter will not ask for it. See `LockStore.pass_on`."""
        self.keeper.send(commands.release(demand, call), time.monotonic() + lines.CALLED_FOR / TRUSTED)


class BlockedCaller(Waiter):
    """A caller of `LockServer.take`, blocked in its own thread."""

    def __init__(self, demand: Demand, rank: int, poll: float) -> None:
        self.demand, self.rank, self.look_every = demand, rank, poll
        self._ended = Wake()
        self._is_called = False
        self._error: LockUnavailable | None = None

    def take_turn(self, *, called: bool) -> None:
        """See `Waiter.take_turn`."""
        self._is_called = called
        self._ended.set()

    def unavailable(self, error: LockUnavailable) -> None:
        """See `Waiter.unavailable`."""
        self._error = error
        self._ended.set()

    def is_called_before(self, end: float) -> bool:
        """Block until this waiter is called, but not past `end`, by `time.monotonic()`; return whether it was called.

        Raises:
            LockUnavailable: The server did not answer.
        """
        self._ended.wait(end - time.monotonic())
        if self._error is not None and not self._is_called:
            raise LockUnavailable(self.key, self._error.reason)
        return self._is_called


class Servers(dict[int, LockServer]):
    """The lock servers of a pool or an app, by process id. A forked child cannot use its parent's."""


def servers_of(owner: Any) -> Servers:
    """The lock servers of a pool or an app."""
    servers: Servers = vars(owner).get(SERVERS) or vars(owner).setdefault(SERVERS, Servers())
    return servers


def running_loop() -> AbstractEventLoop | None:
    """The event loop that runs the caller, or None. A caller that blocks would stop the whole loop."""
    if (loop := _get_running_loop()) is None:
        return None
    # To asyncio, all gevent greenlets are one thread, so this may be the loop of another greenlet. The `_thread_id` of
    # an asyncio loop is the id of the greenlet that runs it. (A uvloop loop has no such attribute.)
    return loop if getattr(loop, "_thread_id", None) in {None, threading.get_ident()} else None


def in_loop(made: dict[AbstractEventLoop, T], make: Callable[[], T]) -> T:
    """What was made for the running event loop, or is made now. Forgets what was made for loops that are closed."""
    loop = asyncio.get_running_loop()
    if loop not in made:
        for closed in [one for one in [*made] if one.is_closed()]:
            made.pop(closed, None)
        made[loop] = make()
    return made[loop]


def running_task() -> asyncio.Task[object] | None:
    """The asyncio task that runs the caller, or None."""
    loop = running_loop()
    return None if loop is None else asyncio.current_task(loop)
