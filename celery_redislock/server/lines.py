"""Lines: commands to one server, each on a connection of its own while it is on its way."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import redis

T = TypeVar("T")

#: At most so many connections are kept at hand, out of the pool.
MAX_SPARE = 8


class Lines:
    """Takes a connection out of the pool once and keeps it at hand.

    To ask the pool for a connection each time costs a third of a command, and a time limit that strikes while the pool
    holds its lock would hang the process for ever.

    Args:
        client: A redis-py client without retries of its own. Replies must be bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._spare: list[redis.Redis] = []
        self._pid = os.getpid()
        # Half of the pool stays in it, so that whoever waits there is served.
        self._max_spare = min(MAX_SPARE, client.connection_pool.max_connections // 2)

    def _on_line(self, command: Callable[..., T], *args: Any) -> T:
        """``command(client, *args)`` with a client that nobody else uses meanwhile."""
        client = self._take_client()
        try:
            reply = command(client, *args)
        except BaseException:
            if client.connection is not None:  # a late reply would be taken for the next command's
                client.connection.disconnect()  # type: ignore[no-untyped-call]
            client.close()
            self._drop_spares()
            raise
        if len(self._spare) < self._max_spare:
            self._spare.append(client)
        else:
            client.close()  # gives its connection back to the pool
        return reply

    def _take_client(self) -> redis.Redis:
        if self._pid != os.getpid():  # after a fork: those are the parent's, and so are the replies that come there
            self._pid = os.getpid()
            self._spare.clear()
        try:
            return self._spare.pop()
        except IndexError:
            client: redis.Redis = self._client.client()  # type: ignore[no-untyped-call]
            return client

    def _drop_spares(self) -> None:
        """After an error: a server that has restarted has ended all of them, and the pool looks before it gives."""
        while True:
            try:
                self._spare.pop().close()
            except IndexError:
                return
