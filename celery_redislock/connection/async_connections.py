"""AsyncConnections: the connections of one event loop to one server, or to the nodes of a Cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.protocol.scripts import Command, Reply

from . import redis_port
from .clients import raise_for_provider
from .cluster import hash_slot_of, route_of
from .cluster_client import ClusterClient, Node
from .connect import command_time


class AsyncConnections:
    """The connections to one server. A command that fails or is cancelled closes its own.

    redis-py's asyncio pools would lose a connection if a caller is cancelled while it returns it.

    Args:
        client: A client that does not retry, and that is not asyncio's. Its server and options are used.

    Raises:
        TypeError: An option of the client does not work with asyncio.
    """

    def __init__(self, client: redis.Redis) -> None:
        # `ask` counts the time. redis-py's own time-out for a write, in Python 3.11, may swallow a cancellation.
        self._pool = redis_port.pool_for_asyncio(client, socket_timeout=None)
        self._seconds = command_time(client)
        self._turns = asyncio.Semaphore(client.connection_pool.max_connections)
        self._free = [self._pool.make_connection()]  # here redis-py rejects an option that it does not know

    async def ask(self, command: Command, *, asking: bool = False) -> Reply:
        """Return the reply to `command`, sent once. `asking` is as for `Connection.ask`.

        Raises:
            RedisError: The server did not answer in time, or refused the command.
        """
        try:
            async with asyncio.timeout(self._seconds), self._turns:
                connection = self._free.pop() if self._free else self._pool.make_connection()
                try:
                    reply = await self._ask(connection, command, asking)
                except BaseException as error:
                    await connection.disconnect(nowait=True)  # a reply on its way would be taken for the next one's
                    if isinstance(error, RedisConnectionError | ReadOnlyError):  # the others are no better
                        await self.close()
                    raise_for_provider(connection, error)
                    raise
                self._free.append(connection)
        except TimeoutError:
            await self.close()
            raise RedisTimeoutError(f"no answer within {self._seconds:g} s") from None
        return reply if type(reply) is list else [reply]

    async def close(self) -> None:
        """Close all connections that no command uses."""
        while self._free:
            await self._free.pop().disconnect(nowait=True)

    async def _ask(self, connection: Any, command: Command, asking: bool) -> Any:
        words = str(len(command.keys)), *command.keys, *command.values
        for script in (("EVALSHA", command.script.sha), ("EVAL", command.script.text)):
            if asking:
                await redis_port.answer_in_loop(connection, ("ASKING",))
            with suppress(NoScriptError):  # the server is new or has restarted
                return await redis_port.answer_in_loop(connection, (*script, *words))
        raise AssertionError("EVAL needs no script")  # pragma: no cover


class AsyncNodeConnections:
    """The connections to the nodes of a Cluster. Hash slots are looked up in a thread.

    Args:
        cluster: Shared by all stores of this process.
    """

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._of_nodes: dict[Node, AsyncConnections] = {}

    async def ask(self, command: Command) -> Reply:
        """Return the reply to `command` from the node that has its hash slot. See `NodeConnections.ask`."""
        route = route_of(command, self._cluster)
        is_known = self._cluster.knows(hash_slot_of(command.keys[0]))
        at, asking = next(route) if is_known else await asyncio.to_thread(next, route)
        while True:
            try:
                return await self._connections_of(at).ask(command, asking=asking)
            except RedisError as error:
                at, asking = await asyncio.to_thread(route.throw, error)

    async def close(self) -> None:
        """Close all connections that no command uses."""
        for connections in [*self._of_nodes.values()]:
            await connections.close()

    def _connections_of(self, address: Node) -> AsyncConnections:
        if address not in self._of_nodes:
            self._of_nodes[address] = AsyncConnections(self._cluster.connect(address))
        return self._of_nodes[address]
