"""Sender: sends commands, resends them after a lost connection, and tells whether a reply is ambiguous."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import GRANTED, LOST, Command, Reply, Script

from .connections import Late
from .outage import REFUSALS, Outage, is_refusal

_random = random.SystemRandom()
#: The longest pause before a command is sent again, in seconds. If both attempts fail, the server is in an outage.
MAX_PAUSE = 0.1


class Transport(Protocol):
    """The connections to a server, or to the nodes of a Cluster."""

    def ask(self, command: Command) -> Reply:
        """Return the reply to `command`, sent once.

        Raises:
            RedisError: The server did not answer, or refused the command.
        """

    def ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies to `commands`, each sent once; in one round trip, if one server has all keys.

        Raises:
            RedisError: As for `ask`, for one of them.
        """

    def send_late(self, late: Late) -> bool:
        """Send a command, and return without its reply; return False, having sent nothing, if that is not possible."""

    def read_late(self, seconds: float, longest: float) -> bool:
        """Read the late replies that have arrived; see `Connections.read_late`."""

    def close(self) -> None:
        """Close all connections."""


#: A reply; `time.monotonic()` just before its command was sent for the last time; and whether the script may have run
#: once already, with its reply lost.
Answer = tuple[Reply, float, bool]


class Sender:
    """Sends commands to one server, or to the nodes of a Cluster.

    Args:
        transport: The connections. They do not retry.
        outage_of: Returns the `Outage` of the server that has a key.

    Attributes:
        outage_of: The same.
        later: Sends a command as soon as the server answers again; None in a store without a keeper.
        known: The scripts that the server knows, unless it has restarted since.
        read_late, close: See `Connections`.
    """

    def __init__(self, transport: Transport, outage_of: Callable[[str], Outage]) -> None:
        self._transport = transport
        self.later: Callable[[Command], object] | None = None
        self._answered = False  # whether the server has answered, or may have
        self.outage_of = outage_of
        self.read_late, self.close = transport.read_late, transport.close
        self.known: set[Script] = set()

    def ask(self, command: Command, undo: Callable[[], Command] | None = None) -> Answer:
        """Send `command`, and once more if its connection is lost, its reply does not come, or a replica refuses it.

        Args:
            command: The command.
            undo: Given if `command` asks for a key. If there is no reply, the command that this returns is sent.
                While the server is known to be out of reach, most callers get an error at once instead.

        Raises:
            LockUnavailable: The server did not answer, or refused the command.
        """
        key = command.keys[0]
        if undo is not None and self.outage_of(key).unreachable is not None:
            self.look_again(key)
            if (reason := self.outage_of(key).unreachable) is not None:
                raise LockUnavailable(key, reason)
        sent_at, is_lost, outer = time.monotonic(), False, sys.exception()
        try:
            try:
                reply = self._transport.ask(command)
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError) as error:
                # After a failover, a new connection to the same address may lead to the new primary.
                if isinstance(error, ReadOnlyError) and undo is None and self.outage_of(key).since is not None:
                    raise  # it does not
                is_lost = not is_refusal(error, outer)
                time.sleep(_random.uniform(0, MAX_PAUSE))
                sent_at = time.monotonic()
                reply = self._transport.ask(command)
        except BaseException as error:
            self._answered |= not isinstance(error, RedisError)  # interrupted: the server may have carried it out
            if isinstance(error, RedisError):
                self.outage_of(key).failed(command.script, error)
            if undo is not None:
                self.take_back(undo(), is_lost=is_lost or not isinstance(error, REFUSALS))
            if isinstance(error, RedisError):
                raise LockUnavailable(key, describe(error)) from error
            raise
        self._answered = True
        if (outage := self.outage_of(key)).since is not None:
            outage.answered(command.script, granted=reply[0] == GRANTED)
        return reply, sent_at, is_lost

    def ask_all(self, commands: Sequence[Command], undo: Callable[[], Sequence[Command]]) -> tuple[list[Reply], float]:
        """Send `commands`, each of which asks for a key, once. Return the replies, and when they were sent.

        If a reply is missing, the commands that `undo` returns are sent.

        Raises:
            LockUnavailable: As for `ask`. The outage of the server is left for the next command to find.
        """
        for command in commands:
            if (reason := self.outage_of(command.keys[0]).unreachable) is not None:
                raise LockUnavailable(command.keys[0], reason)
        sent_at = time.monotonic()
        try:
            replies, self._answered = self._transport.ask_all(commands), True
        except BaseException as error:
            self._answered |= not isinstance(error, RedisError)  # as above
            for command in undo():
                self.take_back(command, is_lost=not isinstance(error, REFUSALS))
            if isinstance(error, RedisError):
                raise LockUnavailable(commands[0].keys[0], describe(error)) from error
            raise
        for command, reply in zip(commands, replies, strict=True):
            self.outage_of(command.keys[0]).answered(command.script, granted=reply[0] == GRANTED)
        return replies, sent_at

    def ask_once(self, command: Command) -> Reply:
        """Send `command` once.

        Raises:
            RedisError: The server did not answer, or refused the command.
        """
        reply = self._transport.ask(command)
        self.outage_of(command.keys[0]).answered(command.script)
        return reply

    def undo(self, command: Command) -> RedisError | None:
        """Send, once, a command that takes back what may have been granted; return the error if that fails."""
        try:
            self.ask_once(command)
        except RedisError as error:
            return error
        return None

    def take_back(self, undo: Command, *, is_lost: bool) -> None:
        """Send `undo` now. If that fails, send it later, unless the server has refused it and what it would undo.

        With a wrong password or certificate it has never answered, and would be asked again and again for nothing.

        Args:
            undo: The command.
            is_lost: Whether the reply to what it undoes is lost.
        """
        error = self.undo(undo)
        if error and self.later is not None and self._answered and (is_lost or not isinstance(error, REFUSALS)):
            self.later(undo)

    def send(self, command: Command) -> bool:
        """Send a command that only the owner of its key may give, and return whether the caller was the owner.

        Return True even if a lost reply leaves that open.

        Raises:
            LockUnavailable: The server did not answer, or refused the command.
        """
        reply, _, is_lost = self.ask(command)
        return is_lost or reply[0] != LOST

    def send_late(self, command: Command, on_reply: Callable[[bool], object], in_doubt: Callable[[], object]) -> None:
        """Send `command`, which must be safe to send twice, and return without waiting for its reply.

        The reply is read together with the next command's on the same connection, or by the keeper. The first command
        with each script does wait for its reply, since the server may not know the script. So does every command to a
        Cluster: the hash slot may have moved.

        Args:
            command: A release, for example.
            on_reply: Called with whether the caller owned the key, in the thread that reads the reply. The callback
                must be quick.
            in_doubt: Called, in that thread, if the script may not have run.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. `in_doubt` is not called then.
        """
        if command.script in self.known:
            try:
                if self._transport.send_late(Late(command, on_reply, in_doubt, time.monotonic())):
                    return
            except (RedisConnectionError, RedisTimeoutError):
                pass  # the server may have closed an idle connection: send the command again
        was_owned = self.send(command)
        self.known.add(command.script)
        on_reply(was_owned)

    def look_again(self, key: str) -> None:
        """See if the server of `key` can be reached again, unless another caller does so or has just done so.

        The check only reads, so there is nothing to undo.
        """
        outage = self.outage_of(key)
        if outage.let_look():
            began = time.monotonic()
            try:
                self.ask_once(commands.inspect(Demand(key)))
            except RedisError as error:
                outage.look_failed(error, time.monotonic() - began)
