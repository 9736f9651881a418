"""Sender: sends commands, resends them after a lost connection, and tells whether a reply is ambiguous."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Command, Script

from .connections import Connections, Late
from .outage import Outage

_random = random.SystemRandom()
#: The longest pause before a command is sent again, in seconds. If both attempts fail, the server is in an outage.
MAX_PAUSE = 0.1


class Sender:
    """Sends commands to one server.

    Args:
        client: Any redis-py client that does not retry. Replies must be bytes.
        outage: The server's `Outage`, shared by all its senders in this process.

    Attributes:
        known: The scripts that the server knows, unless it has restarted since.
    """

    def __init__(self, client: redis.Redis, outage: Outage | None = None) -> None:
        self._connections = Connections(client)
        self.outage = outage or Outage()
        self.known: set[Script] = set()

    def outage_of(self, key: str) -> Outage:
        """Return the `Outage` of the server that has `key`."""
        return self.outage

    def _ask(self, command: Command) -> tuple[Any, bool]:
        """Return the reply to `command`, and whether the script may have run once already, with its reply lost.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        try:
            reply, _, resent = self._call(command)
        except RedisError as error:
            raise LockUnavailable(command.keys[0], describe(error)) from error
        return reply, resent

    def send_late(self, command: Command, on_reply: Callable[[Any], object], in_doubt: Callable[[], object]) -> None:
        """Send `command`, which must be safe to send twice, and return without waiting for its reply.

        The reply is read together with the next command's on the same connection, or by the keeper. The first command
        with each script does wait for its reply, since the server may not know the script.

        Args:
            command: A release, for example.
            on_reply: Called with the script's reply, in the thread that reads it. The callback must be quick.
            in_doubt: Called, in that thread, if the script may not have run.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. `in_doubt` is not called then.
        """
        if command.script in self.known:
            try:
                self._connections.send_late(Late(command, on_reply, in_doubt, time.monotonic()))
                return
            except (RedisConnectionError, RedisTimeoutError):
                pass  # the server may have closed an idle connection: send the command again
        answer, resent = self._ask(command)
        self.known.add(command.script)
        on_reply(resent or answer)

    def read_late(self, seconds: float, longest: float) -> bool:
        """See `Connections.read_late`."""
        return self._connections.read_late(seconds, longest)

    def close(self) -> None:
        """See `Connections.close`."""
        self._connections.close()

    def _look_again(self, key: str) -> None:
        """Raise unless the server can be reached again. Every now and then one caller checks; the others fail at once.

        The check only reads, so there is nothing to undo.

        Raises:
            LockUnavailable: The server is believed to be unreachable.
        """
        outage = self.outage_of(key)
        if outage.let_look():
            began = time.monotonic()
            try:
                self._send(commands.inspect(Demand(key)))
            except RedisError as error:
                outage.look_failed(error, time.monotonic() - began)
        reason = self.outage_of(key).unreachable
        if reason is not None:
            raise LockUnavailable(key, reason)

    def _call(self, command: Command) -> tuple[Any, float, bool]:
        """Return the reply, the time at which `command` was sent, and whether the script may have run once already."""
        sent_at = time.monotonic()
        try:
            return self._send(command), sent_at, False
        except (RedisConnectionError, RedisTimeoutError):
            time.sleep(_random.uniform(0, MAX_PAUSE))
        except RedisError as error:
            self.outage_of(command.keys[0]).failed(command.script, error)
            raise
        sent_at = time.monotonic()
        try:
            return self._send(command), sent_at, True
        except RedisError as error:
            self.outage_of(command.keys[0]).failed(command.script, error)
            raise

    def _send(self, command: Command) -> Any:
        """Send `command` once, and return its reply."""
        reply = self.ask(command)
        self.outage_of(command.keys[0]).answered(command.script)
        return reply

    def ask(self, command: Command) -> Any:
        """Return the reply to `command` from the server that has its keys: in a Cluster, one of the nodes."""
        return self._connections.ask(command)
