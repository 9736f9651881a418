"""Lines: connections to one server, each used by one command at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import redis

T = TypeVar("T")

#: At most so many spare connections are kept out of the pool.
MAX_SPARE = 8


class Lines:
    """Takes connections out of the client's pool, and keeps some of them as spares for the next commands.

    To ask the pool for a connection each time costs a third of a command, and a time limit that strikes while the pool
    holds its lock would hang the process for ever.

    Args:
        client: A redis-py client without retries of its own. Replies must be bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._spare: list[redis.Redis] = []
        self._pid = os.getpid()
        # Half of the pool's connections stay there, so that a thread that waits for one gets one.
        self._max_spare = min(MAX_SPARE, client.connection_pool.max_connections // 2)

    def _on_line(self, command: Callable[..., T], *args: Any) -> T:
        """Return ``command(client, *args)``; no other thread uses that client, which is one connection, meanwhile."""
        client = self._take_client()
        try:
            reply = command(client, *args)
        except BaseException:
            if client.connection is not None:  # a late reply would be read as the next command's
                client.connection.disconnect()  # type: ignore[no-untyped-call]
            client.close()
            self._drop_spares()
            raise
        if len(self._spare) < self._max_spare:
            self._spare.append(client)
        else:
            client.close()  # returns the connection to the pool
        return reply

    def _take_client(self) -> redis.Redis:
        if self._pid != os.getpid():  # after a fork: the spares are the parent's connections
            self._pid = os.getpid()
            self._spare.clear()
        try:
            return self._spare.pop()
        except IndexError:
            client: redis.Redis = self._client.client()  # type: ignore[no-untyped-call]
            return client

    def _drop_spares(self) -> None:
        """Return the spares to the pool after an error: the server may have closed them, which only the pool checks."""
        while True:
            try:
                self._spare.pop().close()
            except IndexError:
                return
