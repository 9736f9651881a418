"""Connections: the connections to one server, each used by one command at a time, and replies that are read later."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_redislock.errors import shown
from celery_redislock.protocol.scripts import LOST, Command, Reply

from . import redis_port
from .pool import ConnectionQueue, NoConnectionFree

logger = logging.getLogger(__name__)

#: The maximum number of spare connections kept out of the pool.
MAX_SPARE = 8


class Late(NamedTuple):
    """A command whose sender does not wait for its reply. It must be safe to send twice."""

    command: Command
    on_reply: Callable[[bool], object]
    """Called with whether the sender owned the key."""
    in_doubt: Callable[[], object]
    """Called if the server refused the command, or the connection was lost before the reply was read: the script may
    not have run."""
    sent_at: float
    """When it was sent, by `time.monotonic()`."""


class Connection:
    """One connection from the client's pool, for one command at a time.

    Attributes:
        late: The last command sent, if its reply has not been read. That reply is read together with the next
            command's, so it costs no extra round trip.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        #: redis-py's connection.
        self._raw = redis_port.connection_of(client)
        self.late: Late | None = None

    def ask(self, command: Command, *, asking: bool = False) -> Reply:
        """Return the reply to `command`, in one round trip; two if the server does not know the script yet.

        Set `asking` if another node of the Cluster has redirected the caller to this one with ASK. The connection must
        then have no late reply to read.
        """
        if asking:
            self._ask_to_follow()
        script, keys, values = command
        # A health check would mistake the outstanding reply for its own.
        redis_port.send(self._raw, "EVALSHA", script.sha, keys, values, checks_health=self.late is None)
        self.read_late()
        try:
            reply = redis_port.answer_on(self._raw)
        except NoScriptError:  # the server is new or has restarted
            if asking:
                self._ask_to_follow()
            redis_port.send(self._raw, "EVAL", script.text, keys, values, checks_health=True)
            reply = redis_port.answer_on(self._raw)
        return reply if type(reply) is list else [reply]

    def ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies to `commands`, in one round trip if the server knows the scripts."""
        checks_health = self.late is None
        for number, (script, keys, values) in enumerate(commands):
            is_checked = checks_health and not number
            redis_port.send(self._raw, "EVALSHA", script.sha, keys, values, checks_health=is_checked)
        self.read_late()
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(redis_port.answer_on(self._raw))
            except ResponseError as error:  # the others must be read all the same
                replies.append(error)
        for number, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                replies[number] = self.ask(commands[number])
            elif isinstance(reply, ResponseError):
                raise reply
        return [reply if type(reply) is list else [reply] for reply in replies]

    def send_late(self, late: Late) -> None:
        """Send a command. Its reply is read later."""
        self.read_late()
        script, keys, values = late.command
        redis_port.send(self._raw, "EVALSHA", script.sha, keys, values, checks_health=True)
        self.late = late

    def read_late(self) -> None:
        """Read the outstanding reply, if any, and pass it to the command's sender."""
        late = self.late
        if late is None:
            return
        try:
            reply = redis_port.answer_on(self._raw)
        except ResponseError:  # refused: after a restart, the server does not know the script
            self.late = None
            late.in_doubt()
            return
        self.late = None
        try:
            late.on_reply(reply != LOST)
        except Exception:
            key = shown(late.command.keys[0])
            logger.exception("could not handle the lock server's reply %r about lock %s", reply, key)

    def is_answered(self) -> bool:
        """Whether a reply can be read without waiting for it."""
        return redis_port.is_answered(self._raw)

    def drop(self) -> None:
        """Close the connection: a reply still on its way would be mistaken for the next command's."""
        late, self.late = self.late, None
        try:
            self._raw.disconnect()
            self._client.close()
        finally:  # a time limit may interrupt the lines above
            if late is not None:
                late.in_doubt()

    def close(self) -> None:
        """Return the connection to the pool, or close it if a reply is outstanding."""
        if self.late is not None:
            self.drop()
        else:
            self._client.close()

    def _ask_to_follow(self) -> None:
        """Send ASKING: the node then answers the next command even though the hash slot is still moving to it."""
        self._raw.send_command("ASKING")
        redis_port.answer_on(self._raw)


class Connections:
    """Takes connections from the client's pool, and keeps a few as spares for the next commands.

    Going through the pool every time adds a third to the cost of a command. Worse, if a time limit fires while the pool
    holds its lock, the process hangs.

    Args:
        client: A redis-py client that does not retry. Replies must be bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._spare: list[Connection] = []
        self._queue: ConnectionQueue[Connection] = ConnectionQueue()
        self._pid, self._is_closed = os.getpid(), False
        # Leave half of the connections in the pool for code that uses the client itself, such as the command line.
        self._max_spare = min(MAX_SPARE, client.connection_pool.max_connections // 2)

    def ask(self, command: Command, *, asking: bool = False) -> Reply:
        """Like `Connection.ask`, but on a connection that no other thread uses at the same time."""
        connection = self._take_connection()
        try:
            answer = connection.ask(command, asking=asking)
        except BaseException:
            self._drop(connection)
            raise
        self._put(connection)
        return answer

    def ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `Connection.ask_all`, but on a connection that no other thread uses at the same time."""
        connection = self._take_connection()
        try:
            replies = connection.ask_all(commands)
        except BaseException:
            self._drop(connection)
            raise
        self._put(connection)
        return replies

    def send_late(self, late: Late) -> bool:
        """Send a command, and return True without its reply."""
        connection = self._take_connection()
        try:
            connection.send_late(late)
            if len(self._spare) >= self._max_spare:
                connection.read_late()  # the connection goes back to the pool, where the reply would never be read
        except BaseException:
            self._drop(connection)
            raise
        self._put(connection)
        return True

    def read_late(self, seconds: float, longest: float) -> bool:
        """Read the late replies that have arrived, without waiting for any; return whether some are still outstanding.

        Args:
            seconds: Skip commands sent less than this many seconds ago: the next command on the same connection reads
                their replies.
            longest: After this many seconds without a reply, drop the connection.
        """
        now = time.monotonic()
        for connection in self._spare.copy():
            late = connection.late
            if late is None or now - late.sent_at < seconds:
                continue
            try:
                self._spare.remove(connection)
            except ValueError:  # another thread has taken it
                continue
            try:
                if connection.is_answered():
                    connection.read_late()
                elif now - late.sent_at > longest:
                    connection.drop()
                    self._queue.give(None)  # the pool can make a new one now
                    continue
            except BaseException as error:
                self._drop(connection)
                if not isinstance(error, RedisError | OSError):
                    raise
                continue
            self._put(connection)
        return any(connection.late is not None for connection in self._spare.copy())

    def close(self) -> None:
        """Close all connections. A command still in flight closes its own connection when it is done.

        The garbage collector would close them too, but in no fixed order: if a socket is collected before its
        owner, Python warns. The collector itself may call `close`, in any thread, so it must not wait for a lock.
        """
        self._is_closed = True
        if self._pid == os.getpid():  # after a fork, the connections are the parent's
            self._client.connection_pool.disconnect()

    def _take_connection(self) -> Connection:
        if self._pid != os.getpid():  # after a fork, the spares are the parent's connections
            self._pid = os.getpid()
            self._spare.clear()
            self._queue = ConnectionQueue()
        if self._is_closed:
            self._spare.clear()  # the spares may have late replies, which will never arrive
        try:
            # The most recent one, which may have a late reply to read. Popped here, because every run passes by.
            return self._spare.pop() if self._spare else self._spare_or_new()
        except IndexError:  # another thread has taken the last one
            return self._take_connection()
        except NoConnectionFree:
            return self._wait_for_one()

    def _spare_or_new(self) -> Connection:
        try:
            return self._spare.pop()
        except IndexError:
            client: redis.Redis = self._client.client()  # type: ignore[no-untyped-call]
            return Connection(client)

    def _wait_for_one(self) -> Connection:
        """Wait until a connection is returned, for as long as the server keeps answering other callers.

        Raises:
            NoConnectionFree: No caller was given a connection for as long as the pool's `timeout`.
        """
        pool: Any = self._client.connection_pool
        mine = self._queue.add()
        try:
            while True:
                try:
                    return self._spare_or_new()  # one may have been returned before this caller was queued
                except NoConnectionFree:
                    given = self._queue.wait(mine, pool.timeout)
                if given is not None:
                    return given
                mine = self._queue.add(first=True)
        except BaseException:
            self._queue.give(None)  # in case this caller was just called, call the next one instead
            raise
        finally:
            if (unused := self._queue.leave(mine)) is not None:
                self._put(unused)

    def _put(self, connection: Connection) -> None:
        if self._is_closed:
            connection.drop()
        elif self._queue.callers and self._queue.give(connection):
            return
        elif len(self._spare) < self._max_spare:
            self._spare.append(connection)
        else:
            connection.close()  # back to the pool
        if self._queue.callers:  # one may have joined the queue in the meantime
            self._queue.give(None)

    def _drop(self, connection: Connection) -> None:
        """Close `connection` after an error, and the spares: a gateway may have forgotten all that were idle.

        They may also still lead to a former primary.
        """
        connection.drop()
        with suppress(IndexError):
            while True:
                self._spare.pop().drop()
        self._queue.give(None)  # the pool can make new ones now
