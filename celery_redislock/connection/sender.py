"""Sender: sends a command, once more after a lost connection, and tells whether the answer is ambiguous."""

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
from celery_redislock.protocol.scripts import Command, Script

from .connections import Connections, Late
from .outage import Outage

_random = random.SystemRandom()
#: The longest pause before a command is sent a second time, in seconds. If both fail, the server is in an outage.
MAX_PAUSE = 0.1


class Sender:
    """Sends commands to one server.

    Args:
        client: Any redis-py client that does not retry by itself. Replies must be bytes.
        outage: The `Outage` of the server, which all its senders in this process share.

    Attributes:
        known: The scripts that the server knows, unless it has restarted since.
    """

    def __init__(self, client: redis.Redis, outage: Outage | None = None) -> None:
        self._connections = Connections(client)
        self.outage = outage or Outage()
        self.known: set[Script] = set()

    def outage_of(self, key: str) -> Outage:
        """The `Outage` of the server that has `key`."""
        return self.outage

    def _ask(self, command: Command) -> tuple[Any, bool]:
        """Send `command`; return the reply, and whether the script may have run before, its reply being lost.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        try:
            reply, _, resent = self._call(command)
        except RedisError as error:
            raise LockUnavailable(command.keys[0], describe(error)) from error
        return reply, resent

    def send_late(self, command: Command, on_reply: Callable[[Any], object], in_doubt: Callable[[], object]) -> None:
        """Send `command`, which must be safe to send once more, and return without its answer.

        The answer is read together with that of the next command on the same connection, or by the keeper. Only the
        first command with a script waits for it, for the server may not know the script.

        Args:
            command: Such as a release.
            on_reply: Called with the script's reply, in the thread that reads it, so it must be quick.
            in_doubt: Called, in that thread, when the script may not have run.

        Raises:
            LockUnavailable: Redis did not answer or refused, and `in_doubt` is not called.
        """
        if command.script in self.known:
            try:
                self._connections.send_late(Late(command, on_reply, in_doubt, time.monotonic()))
                return
            except (RedisConnectionError, RedisTimeoutError):
                pass  # the server may have closed the connection meanwhile: the command is sent once more
        answer, resent = self._ask(command)
        self.known.add(command.script)
        on_reply(resent or answer)

    def read_late(self, seconds: float, longest: float) -> bool:
        """As `Connections.read_late`."""
        return self._connections.read_late(seconds, longest)

    def close(self) -> None:
        """As `Connections.close`."""
        self._connections.close()

    def _look_again(self, key: str) -> None:
        """Return if the server can be reached again; one caller at a time looks, now and then, and the others fail.

        A look writes nothing, so that there is nothing to undo.

        Raises:
            LockUnavailable: The server cannot be reached, as far as is known.
        """
        outage = self.outage_of(key)
        if outage.let_look():
            began = time.monotonic()
            try:
                self._send(commands.inspect(key))
            except RedisError as error:
                outage.look_failed(error, time.monotonic() - began)
        reason = self.outage_of(key).unreachable
        if reason is not None:
            raise LockUnavailable(key, reason)

    def _call(self, command: Command) -> tuple[Any, float, bool]:
        """The reply, when the command was sent, and whether the script may have run before, its reply being lost."""
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
        """The reply to `command`, which is sent once."""
        reply = self.ask(command)
        self.outage_of(command.keys[0]).answered(command.script)
        return reply

    def ask(self, command: Command) -> Any:
        """The reply to `command` of the server that has its keys. A Cluster has many."""
        return self._connections.ask(command)
