"""LockServer: the store and the keeper of one process for one lock server; not shared over a fork."""

from __future__ import annotations

import math
import os
import time
import weakref
from typing import Any

import redis
from redis.cluster import RedisCluster

from celery_redislock.errors import LockConfigError
from celery_redislock.info import LockInfo

from .answers import Conflict, Granted
from .cluster import ClusterStore
from .connect import command_time, derive
from .event_loop import running_loop
from .held import HeldLock
from .keeper import Keeper
from .store import LockStore

_SERVERS = "_redislock_servers"
#: Seconds between two looks at a key whose release wakes nobody.
POLL = 0.1
#: The client of a Cluster resends a command by itself, for about so many seconds.
CLUSTER_COMMAND_TIME = 60.0


class LockServer:
    """A store for the threads of this process, a keeper and wake-ups, each with its own connections.

    Args:
        client: A client from `connect` or `derive`; or the user's client of a Cluster, which all three share.
    """

    def __init__(self, client: redis.Redis | RedisCluster) -> None:
        self.client = client
        self.store: LockStore
        keepers: LockStore
        if isinstance(client, RedisCluster):
            self.store = ClusterStore(client)
            keepers = ClusterStore(client, self.store.outage)
            self.command_time = CLUSTER_COMMAND_TIME
        else:
            self.store = LockStore(client)
            keepers = LockStore(derive(client, 1), self.store.outage)
            self.command_time = command_time(client)
            servers_of(client.connection_pool)[os.getpid()] = self
        self.keeper = Keeper(keepers, self.command_time)

    @classmethod
    def behind(cls, client: Any) -> LockServer:
        """The lock server of a user's redis-py client; the keeper's thread ends with the client's connection pool."""
        pool = getattr(client, "connection_pool", client)  # a Cluster's client has many pools, and stands for them
        servers = servers_of(pool)
        server = servers.get(os.getpid())
        if server is None:
            server = servers.setdefault(os.getpid(), cls(client if pool is client else derive(client)))
            weakref.finalize(pool, server.keeper.stop).atexit = False
        return server

    def take(
        self, held: HeldLock, timeout: float | None, *, poll: float = POLL, fence: bool = False
    ) -> Conflict | None:
        """Acquire `held`, waiting for its key to be released.

        Args:
            held: A lock that is not held yet.
            timeout: How long to wait, in seconds; None for ever.
            poll: Seconds between two looks while another library's lock holds the key: its release wakes nobody.
            fence: Ask for a fencing number.

        Returns:
            None once the key is granted, else who held it at the last look.

        Raises:
            LockUnavailable: Redis did not answer or refused.
            LockConfigError: To wait for the key would stop the event loop that runs the caller.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        waits = None if timeout is not None and timeout <= 0 else True
        stops_a_loop = waits is not None and running_loop() is not None
        if stops_a_loop:
            waits = None
        while True:
            left = end - time.monotonic()
            if left <= 0 and waits:
                waits = False
            result = self.store.acquire(held.key, held.token, held.lease, fence=fence)
            if isinstance(result, Granted):
                held.granted(result)
                return None
            # Finished: a run under the caller's own task id has succeeded, and the key cools down.
            conflict = result if isinstance(result, Conflict) else self.store.look(held.key)
            if conflict is not None:
                holder = conflict.holder.info(held.key, conflict.ttl)
                if stops_a_loop:
                    raise _would_stop_the_loop(holder)
                if not waits:
                    return conflict
                self.wait(holder, end - time.monotonic(), poll=poll)

    def give_up(self, key: str, claim: str, *, is_to_come: bool, now: bool = False) -> None:
        """Give up the reservations of a message that will not run.

        Args:
            key, claim, is_to_come: As `LockStore.give_up`.
            now: Whether the caller sends the command; else the keeper does, soon.

        Raises:
            LockUnavailable: Redis did not answer or refused; only where `now`.
        """
        if now:
            self.store.give_up(key, claim, is_to_come=is_to_come)
        else:
            self.keeper.later(lambda store: store.give_up(key, claim, is_to_come=is_to_come))

    def wait(self, holder: LockInfo, left: float, *, poll: float = POLL) -> None:
        """Block until `holder` has released its key, or its key must be asked for again for another reason.

        Args:
            holder: Who held the key at the last acquire, which must have told the server that the caller waits.
            left: How long to block, in seconds at most.
            poll: As `take`.
        """
        time.sleep(max(0.0, min(left, poll)))


def _would_stop_the_loop(holder: LockInfo) -> LockConfigError:
    return LockConfigError(
        f"the lock {holder.key} is held by {holder.who}, and to wait for it here would stop the asyncio event loop of "
        "this code: take and release it in a thread, as with asyncio.to_thread(), or do not wait, with wait=0 or "
        "blocking=False"
    )


def servers_of(owner: Any) -> dict[int, LockServer]:
    """The lock servers of a pool or an app, by process id: after a fork, those of the parent are of no use."""
    servers: dict[int, LockServer] = vars(owner).setdefault(_SERVERS, {})
    return servers
