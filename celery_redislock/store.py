"""LockStore: acquire, renew, release, inspect. The only caller of the scripts.

Every script is safe to send twice, so the store resends after a lost connection, and knows when an answer is
ambiguous. It does not know Celery.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .errors import LockUnavailable, describe
from .info import LockInfo
from .tokens import Token, parse

logger = logging.getLogger(__name__)

#: A note outlives every redelivery that a broker may still make, in milliseconds: a day.
#: Text, as all that is sent: hiredis 3.5 crashes the process where a time limit strikes while it writes an int.
NOTE_TTL_MS = str(24 * 3600 * 1000)
#: At most so many connections are kept at hand, out of the pool.
MAX_SPARE = 8
#: The longest pause before a command is sent a second time, in seconds. Both failed: Redis counts as away.
MAX_PAUSE = 0.1


class Script:
    """One Lua file and its digest."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8")
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, RELEASE, RENEW, INSPECT, EXPECT = (
    Script(name) for name in ("acquire", "release", "renew", "inspect", "expect")
)


class Held(NamedTuple):
    """The key is held by another."""

    holder: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""


class Finished(NamedTuple):
    """The attempt that asks has already finished in another execution."""


class Outage:
    """Says once when a server cannot be asked any more, and once when it can again."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._changing = threading.Lock()

    def begin(self, error: RedisError) -> None:
        """A command failed, and so did its second try."""
        with self._changing:
            if self.since is None:
                self.since = time.monotonic()
                logger.warning(
                    "the lock server cannot be asked: %s; until it can, runs go by their lock_on_outage and held locks "
                    "live until their deadline",
                    describe(error),
                )

    def end(self) -> None:
        """A command was answered."""
        with self._changing:
            if self.since is not None:
                logger.warning("the lock server answers again, after %.1f s", time.monotonic() - self.since)
                self.since = None


class LockStore:
    """The locks of one server.

    Args:
        client: Any redis-py client without retries of its own. Replies must be bytes.
        outage: Shared with the server's other stores in this process.
    """

    def __init__(self, client: redis.Redis, outage: Outage | None = None) -> None:
        self.outage = outage or Outage()
        self._client = client
        self._spare: list[redis.Redis] = []
        # Half of the pool stays in it, so that whoever waits there is served.
        self._max_spare = min(MAX_SPARE, client.connection_pool.max_connections // 2)

    def acquire(
        self, key: str, token: str, nonce: str, lease: float, note: str | None = None
    ) -> float | Held | Finished:
        """Take `key` for `lease` seconds: one round trip.

        Args:
            key: The key in Redis.
            token: The token to store; it begins with `nonce`.
            nonce: Of the token.
            lease: Seconds.
            note: The key of the attempt's note, where this message may be a copy.

        Returns:
            Where it is granted, `time.monotonic()` before the command was sent: the lease began no earlier. Else Held,
            with who holds it, or Finished.

        Raises:
            LockUnavailable: Redis did not answer or refused. The token has been released in case it was granted.
        """
        keys = (key,) if note is None else (key, note)
        try:
            reply, sent_at, _ = self._call(ACQUIRE, keys, (nonce, token, str(int(lease * 1000))))
        except BaseException as error:
            self._undo(key, token)
            if isinstance(error, RedisError):
                raise LockUnavailable(key, describe(error)) from error
            raise
        if reply == 1:
            return sent_at
        if reply == 0:
            return Finished()
        return Held(*_holder(reply))

    def release(self, key: str, nonce: str, note: str | None = None, *, copy_may_wait: bool = False) -> bool:
        """Give `key` back if `nonce` owns it: one round trip.

        Args:
            key: The key in Redis.
            nonce: Of the owner.
            note: The key of the attempt's note, where the attempt has ended for good.
            copy_may_wait: A copy may wait in the queue unseen, so leave the note in any case.

        Returns:
            Whether it was still held. True as well where a lost reply leaves it open.

        Raises:
            LockUnavailable: Redis did not answer or refused; the key ends with its lease.
        """
        keys = (key,) if note is None else (key, note)
        try:
            reply, _, resent = self._call(RELEASE, keys, (nonce, NOTE_TTL_MS, "1" if copy_may_wait else "0"))
        except RedisError as error:
            raise LockUnavailable(key, describe(error)) from error
        return resent or bool(reply)

    def renew(self, locks: Sequence[tuple[str, str, float]]) -> list[bool]:
        """Give each lock its lease again if it is still owned: one round trip, no retry of its own.

        Args:
            locks: Triples of key, nonce and lease in seconds.

        Returns:
            For each, whether it is still held.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        values: list[str] = []
        for _, nonce, lease in locks:
            values += (nonce, str(int(lease * 1000)))
        reply = self._send(RENEW, [key for key, _, _ in locks], values)
        return [bool(renewed) for renewed in reply]

    def expect_copy(self, key: str, nonce: str) -> bool:
        """Say that a copy of the holder's message is to come: its release will leave the note.

        Args:
            key: The key in Redis.
            nonce: Of the owner.

        Returns:
            Whether it was still held.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        try:
            return bool(self._call(EXPECT, (key,), (nonce,))[0])
        except RedisError as error:
            raise LockUnavailable(key, describe(error)) from error

    def inspect(self, key: str) -> LockInfo | None:
        """Who holds `key`; None where it is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        try:
            reply = self._call(INSPECT, (key,), ())[0]
        except RedisError as error:
            raise LockUnavailable(key, describe(error)) from error
        if reply is None:
            return None
        token, ttl = _holder(reply)
        return token.info(key, ttl)

    def _undo(self, key: str, token: str) -> None:
        """Release what a failed acquire may have been granted; one try: else the lease ends it.

        By the whole token: where it arrives late, it must not undo the next try under the same nonce.
        """
        try:
            self._send(RELEASE, (key,), (token, NOTE_TTL_MS, "0"))
        except RedisError:
            logger.debug("could not undo a failed acquire of %s; its lease ends it if it was granted", key)

    def _call(self, script: Script, keys: Sequence[str], values: Sequence[str]) -> tuple[Any, float, bool]:
        """The reply, when it was sent for, and whether the script may have run before, its reply lost."""
        sent_at = time.monotonic()
        try:
            return self._send(script, keys, values), sent_at, False
        except (RedisConnectionError, RedisTimeoutError):
            time.sleep(random.uniform(0, MAX_PAUSE))  # noqa: S311 - jitter, no secret
        except RedisError as error:
            self.outage.begin(error)
            raise
        sent_at = time.monotonic()
        try:
            return self._send(script, keys, values), sent_at, True
        except RedisError as error:
            self.outage.begin(error)
            raise

    def _send(self, script: Script, keys: Sequence[str], values: Sequence[str]) -> Any:
        client = self._take_client()
        try:
            reply = _evaluate(client, script, keys, values)
        except BaseException:
            if client.connection is not None:  # a late reply would be taken for the next command's
                client.connection.disconnect()  # type: ignore[no-untyped-call]
            client.close()
            self._drop_spares()
            raise
        if self.outage.since is not None:
            self.outage.end()
        if len(self._spare) < self._max_spare:
            self._spare.append(client)
        else:
            client.close()  # gives its connection back to the pool
        return reply

    def _drop_spares(self) -> None:
        """After an error: a server that has restarted has ended all of them, and the pool looks before it gives."""
        while True:
            try:
                self._spare.pop().close()
            except IndexError:
                return

    def _take_client(self) -> redis.Redis:
        """A client with a connection of its own.

        To ask the pool for a connection each time costs a third of a command, and a time limit that strikes while the
        pool holds its lock would hang the process for ever.
        """
        try:
            return self._spare.pop()
        except IndexError:
            client: redis.Redis = self._client.client()  # type: ignore[no-untyped-call]
            return client


def _evaluate(client: redis.Redis, script: Script, keys: Sequence[str], values: Sequence[str]) -> Any:
    execute: Callable[..., Any] = client.execute_command
    try:
        return execute("EVALSHA", script.sha, str(len(keys)), *keys, *values)
    except NoScriptError:  # a new or restarted server
        return execute("EVAL", script.text, str(len(keys)), *keys, *values)


def _holder(reply: Sequence[Any]) -> tuple[Token, float | None]:
    value, ttl = reply
    return parse(value.decode("utf-8", "replace")), ttl / 1000 if ttl >= 0 else None
