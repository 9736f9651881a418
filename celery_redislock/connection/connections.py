"""Connections: those to one server, each used by one command at a time, and the answers on them that are read late."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_redislock.info import shown
from celery_redislock.protocol.scripts import Command

from . import redis_port
from .pool import ConnectionQueue, NoConnectionFree

logger = logging.getLogger(__name__)

#: At most so many spare connections are kept out of the pool.
MAX_SPARE = 8


class Late(NamedTuple):
    """A command whose sender does not wait for its answer. It must be safe to send it once more."""

    command: Command
    on_reply: Callable[[Any], object]
    """Is called with what the script has answered."""
    in_doubt: Callable[[], object]
    """Is called where the server has refused the command, or the connection was lost before the answer was read: the
    script has not run, or may not have run."""
    sent_at: float
    """When it was sent, by `time.monotonic()`."""


class Connection:
    """One connection out of the client's pool, for one command at a time.

    Attributes:
        late: The command that was sent last, if its answer has not been read. It is read together with the answer of
            the next command, so it costs nobody a round trip.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        #: The connection as redis-py has it.
        self._raw = redis_port.connection_of(client)
        self.late: Late | None = None

    def ask(self, command: Command, *, asking: bool = False) -> Any:
        """The answer to `command`, in one round trip; in two where the server does not know the script yet.

        With `asking`, the server is a Cluster's node to which another has sent us with ASK; no answer is late there.
        """
        if asking:
            self._ask_to_follow()
        self._send("EVALSHA", command.script.sha, command)
        self.read_late()
        try:
            return redis_port.answer_on(self._raw)
        except NoScriptError:  # a server that is new or has restarted
            if asking:
                self._ask_to_follow()
            self._send("EVAL", command.script.text, command)
            return redis_port.answer_on(self._raw)

    def send_late(self, late: Late) -> None:
        """Send a command, whose answer is read later."""
        self.read_late()
        self._send("EVALSHA", late.command.script.sha, late.command)
        self.late = late

    def read_late(self) -> None:
        """Read the answer that has not been read, if there is one, and tell who has sent the command."""
        late = self.late
        if late is None:
            return
        try:
            answer = redis_port.answer_on(self._raw)
        except ResponseError:  # the server has refused it: where it has restarted, it does not know the script
            self.late = None
            late.in_doubt()
            return
        self.late = None
        try:
            late.on_reply(answer)
        except Exception:
            key = shown(late.command.keys[0])
            logger.exception("the lock server's answer %r about the lock %s could not be told to its run", answer, key)

    def is_answered(self) -> bool:
        """Whether an answer can be read without waiting for it."""
        return redis_port.is_answered(self._raw)

    def drop(self) -> None:
        """Close the connection: an answer may still be on its way, and would be read as that of the next command."""
        late, self.late = self.late, None
        try:
            self._raw.disconnect()
            self._client.close()
        finally:  # a time limit may strike there
            if late is not None:
                late.in_doubt()

    def close(self) -> None:
        """Return the connection to the pool; but close it where an answer has not been read."""
        if self.late is not None:
            self.drop()
        else:
            self._client.close()

    def _ask_to_follow(self) -> None:
        """Have a Cluster's node answer the next command although the hash slot is still on its way to it."""
        self._raw.send_command("ASKING")
        redis_port.answer_on(self._raw)

    def _send(self, how: str, script: str, command: Command) -> None:
        keys, values = command.keys, command.values
        words = (how, script, str(len(keys)), *keys, *values)
        # A check of the connection's health would take the answer that has not been read for its own.
        redis_port.send(self._raw, words, checks_health=self.late is None)


class Connections:
    """Takes connections out of the client's pool, and keeps some of them as spares for the next commands.

    To ask the pool for a connection each time costs a third of a command, and a time limit that strikes while the pool
    holds its lock would hang the process for ever.

    Args:
        client: A redis-py client without retries of its own. Replies must be bytes.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._spare: list[Connection] = []
        self._queue: ConnectionQueue[Connection] = ConnectionQueue()
        self._pid = os.getpid()
        self._is_closed = False
        # Half of the pool's connections stay there, so that a thread that waits for one gets one.
        self._max_spare = min(MAX_SPARE, client.connection_pool.max_connections // 2)

    def ask(self, command: Command, *, asking: bool = False) -> Any:
        """The answer to `command`, on a connection that no other thread uses meanwhile; as `Connection.ask`."""
        connection = self._take_connection()
        try:
            answer = connection.ask(command, asking=asking)
        except BaseException:
            self._drop(connection)
            raise
        self._put(connection)
        return answer

    def send_late(self, late: Late) -> None:
        """Send a command, and return without its answer."""
        connection = self._take_connection()
        try:
            connection.send_late(late)
            if len(self._spare) >= self._max_spare:
                connection.read_late()  # for the connection goes back to the pool, where nobody would read the answer
        except BaseException:
            self._drop(connection)
            raise
        self._put(connection)

    def read_late(self, seconds: float, longest: float) -> bool:
        """Read, without waiting, the answers that nobody has read for so many seconds; return whether any is left.

        Args:
            seconds: How old an answer must be, in seconds. A younger one is read with the next command there.
            longest: How long to hope for an answer, in seconds.
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
                    self._queue.give(None)  # the pool may make one now
                    continue
            except BaseException as error:
                self._drop(connection)
                if not isinstance(error, RedisError | OSError):
                    raise
                continue
            self._put(connection)
        return any(connection.late is not None for connection in self._spare.copy())

    def close(self) -> None:
        """Close all connections: nobody uses the server any more. Those of a command that still comes close after it.

        The garbage collector would close them too, but its order is by chance: where a socket comes before what closes
        it, Python warns. The collector itself may call this, in any thread, so no lock is waited for here.
        """
        self._is_closed = True
        if self._pid == os.getpid():  # after a fork they are the parent's connections
            self._client.connection_pool.disconnect()

    def _take_connection(self) -> Connection:
        if self._pid != os.getpid():  # after a fork: the spares are the parent's connections
            self._pid = os.getpid()
            self._spare.clear()
            self._queue = ConnectionQueue()
        if self._is_closed:
            self._spare.clear()  # on them may be late answers, which will never come
        try:
            return self._spare_or_new()
        except NoConnectionFree:
            return self._wait_for_one()

    def _spare_or_new(self) -> Connection:
        try:
            return self._spare.pop()  # the one that was put there last: it may have an answer that is not read yet
        except IndexError:
            client: redis.Redis = self._client.client()  # type: ignore[no-untyped-call]
            return Connection(client)

    def _wait_for_one(self) -> Connection:
        """Wait until a connection is returned, for as long as the server answers those who use them.

        Raises:
            NoConnectionFree: The server has answered nobody for as long as the pool makes a caller wait.
        """
        pool: Any = self._client.connection_pool
        mine = self._queue.add()
        try:
            while True:
                try:
                    return self._spare_or_new()  # it may have been returned before this caller was queued
                except NoConnectionFree:
                    given = self._queue.wait(mine, pool.timeout)
                if given is not None:
                    return given
                mine = self._queue.add(first=True)
        except BaseException:
            self._queue.give(None)  # if this caller was called, the next one is in its stead
            raise
        finally:
            unused = self._queue.leave(mine)
            if unused is not None:
                self._put(unused)

    def _put(self, connection: Connection) -> None:
        if self._is_closed:
            connection.drop()
        elif self._queue.give(connection):
            pass
        elif len(self._spare) < self._max_spare:
            self._spare.append(connection)
        else:
            connection.close()  # returns the connection to the pool
            self._queue.give(None)  # a caller may have arrived in between

    def _drop(self, connection: Connection) -> None:
        """Close it after an error, and return the spares to the pool: only the pool checks whether they live."""
        connection.drop()
        while True:
            try:
                self._spare.pop().close()
            except IndexError:
                break
        self._queue.give(None)  # the pool may make some now
