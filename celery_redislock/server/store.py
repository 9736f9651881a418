"""LockStore: acquire, renew, release, inspect. The only caller of the scripts.

Every script is safe to send twice, so the store resends after a lost connection, and knows when an answer is
ambiguous. It does not know Celery.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.info import LockInfo

from .answers import Claim, Finished, Granted, Held, Leaves
from .lines import Lines
from .names import keys_of
from .outage import Outage
from .scripts import ACQUIRE, EXPECT, INSPECT, RELEASE, RENEW, Script, Text, evaluate
from .tokens import Token, parse

logger = logging.getLogger(__name__)

#: A waiter that has died is remembered no longer than this, in milliseconds; a living one looks every second.
#: Text, as all that is sent: hiredis 3.5 crashes the process where a time limit strikes while it writes an int.
WAITER_TTL_MS = "3000"
#: The longest pause before a command is sent a second time, in seconds. Both failed: Redis counts as away.
MAX_PAUSE = 0.1


class LockStore(Lines):
    """The locks of one server.

    Args:
        client: Any redis-py client without retries of its own. Replies must be bytes.
        outage: Shared with the server's other stores in this process.
    """

    def __init__(self, client: redis.Redis, outage: Outage | None = None) -> None:
        super().__init__(client)
        self.outage = outage or Outage()

    def acquire(
        self,
        key: str,
        token: Text,
        nonce: Text,
        lease: float,
        note: str | None = None,
        *,
        fence: bool = False,
        waits: bool | None = None,
        claim: Claim | None = None,
    ) -> Granted | Held | Finished:
        """Take `key` for `lease` seconds: one round trip.

        Args:
            key: The key in Redis.
            token: The token to store; it begins with `nonce`.
            nonce: Of the token.
            lease: Seconds; infinite for a key without expiry.
            note: The key of the attempt's note, where this message may be a copy.
            fence: Ask for a fencing number.
            waits: Whether the caller will wait if the key is held, so that a release wakes it; False: it has waited,
                and no longer does. None: it never did.
            claim: Of the message.

        Raises:
            LockUnavailable: Redis did not answer or refused. The token has been released in case it was granted. At
                once where it is known that Redis cannot be reached.
        """
        if self.outage.unreachable is not None:
            self._look_again(key)
        keys: Sequence[str] = (key,) if note is None else (key, note)
        values: Sequence[Text] = (nonce, token, "" if lease == math.inf else _ms(lease))
        if fence or waits is not None or claim is not None:
            waiters = key if waits is None else keys_of(key).waiters
            keys = (key, note or key, keys_of(key).fence if fence else key, waiters)
            values = (*values, WAITER_TTL_MS if waits else "")
        if claim is not None:
            keys, values = (*keys, keys_of(key).queued), (*values, claim.nonce, _ms(claim.ttl))
        try:
            reply, sent_at, _ = self._call(ACQUIRE, keys, values)
        except BaseException as error:
            # By the whole token, if it is ours: where this arrives late, it must not undo the next try.
            self.undo(key, token if str(token).startswith(str(nonce)) else nonce)
            if isinstance(error, RedisError):
                raise LockUnavailable(key, describe(error)) from error
            raise
        if isinstance(reply, int):
            return Granted(sent_at, reply if fence else None) if reply else Finished()
        value, ttl = _held(reply)
        return Held(_token(value), ttl)

    def release(self, key: str, nonce: Text, leaves: Leaves = Leaves()) -> bool:  # noqa: B008 - immutable
        """Give `key` back if `nonce` owns it: one round trip.

        Args:
            key: The key in Redis.
            nonce: Of the owner.
            leaves: What is left behind.

        Returns:
            Whether it was still held. True as well where a lost reply leaves it open.

        Raises:
            LockUnavailable: Redis did not answer or refused; the key ends with its lease.
        """
        keys = _release_keys(key)
        if leaves.note is not None:
            keys = (*keys, leaves.note)
        values: Sequence[Text] = (nonce, _ms(leaves.note_ttl), "1" if leaves.copy_may_wait else "0")
        if leaves.token is not None:
            keys = (*keys[:3], leaves.note or key, keys_of(key).gone(leaves.token.partition(" ")[0]))
            values = (*values, leaves.token, _ms(leaves.ttl))
        try:
            reply, _, resent = self._call(RELEASE, keys, values)
        except RedisError as error:
            raise LockUnavailable(key, describe(error)) from error
        return resent or bool(reply)

    def renew(self, locks: Sequence[tuple[str, Text, float]]) -> list[bool]:
        """Give each lock its lease again if it is still owned: one round trip, no retry of its own.

        Args:
            locks: Triples of key, nonce and lease in seconds.

        Returns:
            For each, whether it is still held.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        values: list[Text] = []
        for _, nonce, lease in locks:
            values += (nonce, _ms(lease))
        reply = self._send(RENEW, [key for key, _, _ in locks], values)
        return [bool(renewed) for renewed in reply]

    def lengthen(self, key: str, nonce: Text, ttl: float) -> None:
        """Let `key` live for `ttl` seconds from now, if `nonce` owns it: one round trip.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        self._call(RENEW, (key,), (nonce, _ms(ttl)))

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
        held = self.held(key)
        return held and held.holder.info(key, held.ttl)

    def held(self, key: str) -> Held | None:
        """Who holds `key`, as `acquire` would say; None where it is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        found = self.look(key)
        return found and Held(_token(found[0]), found[1])

    def look(self, key: str) -> tuple[bytes, float | None] | None:
        """What `key` holds, and the seconds until it ends (None: never); None where it is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        try:
            reply = self._call(INSPECT, (key,), ())[0]
        except RedisError as error:
            raise LockUnavailable(key, describe(error)) from error
        return None if reply is None else _held(reply)

    def undo(self, key: str, nonce: Text) -> None:
        """Release what a failed acquire may have been granted; one try: else the lease ends it."""
        try:
            self._send(RELEASE, _release_keys(key), (nonce, "0", "0"))
        except RedisError:
            logger.debug("could not undo a failed acquire of %s; its lease ends it if it was granted", key)

    def _look_again(self, key: str) -> None:
        """Return if the server can be reached again; one caller at a time looks, now and then, and the others fail.

        A look writes nothing, so that there is nothing to undo.
        """
        if self.outage.let_look():
            began = time.monotonic()
            try:
                self._send(INSPECT, (key,), ())
            except RedisError as error:
                self.outage.looked(error, time.monotonic() - began)
        reason = self.outage.unreachable
        if reason is not None:
            raise LockUnavailable(key, reason)

    def _call(self, script: Script, keys: Sequence[str], values: Sequence[Text]) -> tuple[Any, float, bool]:
        """The reply, when it was sent for, and whether the script may have run before, its reply lost."""
        sent_at = time.monotonic()
        try:
            return self._send(script, keys, values), sent_at, False
        except (RedisConnectionError, RedisTimeoutError):
            time.sleep(random.uniform(0, MAX_PAUSE))  # noqa: S311 - jitter, no secret
        except RedisError as error:
            self.outage.begin(script, error)
            raise
        sent_at = time.monotonic()
        try:
            return self._send(script, keys, values), sent_at, True
        except RedisError as error:
            self.outage.begin(script, error)
            raise

    def _send(self, script: Script, keys: Sequence[str], values: Sequence[Text]) -> Any:
        reply = self._on_line(evaluate, script, keys, values)
        if self.outage.since is not None:
            self.outage.end(script)
        return reply


def _ms(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))


def _release_keys(key: str) -> tuple[str, ...]:
    names = keys_of(key)
    return key, names.waiters, names.wake


def _held(reply: Sequence[Any]) -> tuple[bytes, float | None]:
    value, ttl = reply
    if isinstance(value, str):  # from a Cluster's client that decodes
        value = value.encode()
    return value, ttl / 1000 if ttl >= 0 else None


def _token(value: bytes) -> Token:
    return parse(value.decode("utf-8", "replace"))
