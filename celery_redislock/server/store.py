"""LockStore: what can be done with the locks of a server, in the words of the model in tests/model.

Every script is safe to send twice, so the store resends after a lost connection, and knows when an answer is
ambiguous. It does not know Celery.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.info import LockInfo

from . import commands
from .answers import NOTE_TTL, Claim, Conflict, Finished, Granted, Note
from .names import keys_of
from .scripts import Command
from .sender import Sender
from .tokens import Token, cooling

logger = logging.getLogger(__name__)


class LockStore(Sender):
    """The locks of one server; each verb is one round trip."""

    def acquire(
        self,
        key: str,
        token: Token,
        lease: float,
        note: str | None = None,
        *,
        fence: bool = False,
        waits: bool | None = None,
    ) -> Granted | Conflict | Finished:
        """Take `key` for `lease` seconds.

        Args:
            key: The key in Redis.
            token: The token to store.
            lease: Seconds; infinite for a key without expiry.
            note: The key of the attempt's note, where this message may be a copy.
            fence: Ask for a fencing number.
            waits: Whether the caller will wait if the key is held, so that a release wakes it; False: it has waited,
                and no longer does. None: it never did.

        Raises:
            LockUnavailable: Redis did not answer or refused. The token has been released in case it was granted. At
                once where it is known that Redis cannot be reached.
        """
        return self._take(commands.acquire(key, token.owner, token, lease, note=note, fence=fence, waits=waits), token)

    def claim(
        self,
        key: str,
        token: Token,
        lease: float,
        claim: Claim,
        note: str | None = None,
        *,
        fence: bool = False,
        waits: bool | None = None,
    ) -> Granted | Conflict | Finished:
        """As `acquire`, for a message to which the key, or a place in its queue, was left.

        Args:
            key, token, lease, note, fence, waits: As `acquire`.
            claim: Of the message; it opens a key that is kept for it.

        Raises:
            LockUnavailable: As `acquire`.
        """
        how = commands.acquire(key, token.owner, token, lease, note=note, fence=fence, waits=waits, claim=claim)
        return self._take(how, token)

    def rename(self, key: str, token: Token, new: Token, lease: float, *, fence: bool) -> Granted | Conflict | Finished:
        """As `acquire`, by the owner of `token`; but the key is to hold `new`, which is a caller's own.

        Raises:
            LockUnavailable: As `acquire`; but a key that holds `new` is left as it is.
        """
        return self._take(commands.acquire(key, token.owner, new, lease, fence=fence), token)

    def release(self, key: str, token: Token, note: Note | None = None, *, exactly: bool = False) -> bool:
        """Give `key` back if `token` owns it.

        Args:
            key: The key in Redis.
            token: Of the owner.
            note: For copies of its message, where the attempt has ended for good.
            exactly: Only where the key holds this token, and no other of the same owner.

        Returns:
            Whether it was still held. True as well where a lost reply leaves it open.

        Raises:
            LockUnavailable: Redis did not answer or refused; the key ends with its lease.
        """
        return self._give_back(commands.release(key, token.value if exactly else token.owner, note))

    def hand_over(self, key: str, token: Token, to: Token, ttl: float, note: Note | None = None) -> bool:
        """As `release`; but the key is left to a message, unless that has been given up.

        Args:
            key, token, note: As `release`.
            to: What the key holds until the message comes, which carries its nonce.
            ttl: Seconds that it is kept.

        Raises:
            LockUnavailable: As `release`.
        """
        return self._give_back(commands.release(key, token.owner, note, (to, ttl), keys_of(key).gone(to.nonce)))

    def cool_down(self, key: str, token: Token, ttl: float, note: Note | None = None) -> bool:
        """As `release`; but the key is free only after `ttl` seconds.

        Raises:
            LockUnavailable: As `release`.
        """
        return self._give_back(commands.release(key, token.owner, note, (cooling(token), ttl)))

    def give_up(self, key: str, claim: str, *, is_to_come: bool) -> bool:
        """Give back what was left to a message that will not run: the key, and its place in the queue.

        Args:
            key: The key in Redis.
            claim: What the message carries.
            is_to_come: The run before may not have ended yet, and leave it the key only then: it shall not.

        Returns:
            Whether the key was left to it.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        return bool(self._ask(commands.give_up(key, claim, NOTE_TTL if is_to_come else None))[0])

    def renew(self, locks: Sequence[tuple[str, Token, float]]) -> list[bool]:
        """Give each lock its lease again if it is still owned. This is not sent a second time.

        Args:
            locks: Triples of key, token and lease in seconds.

        Returns:
            For each, whether it is still held.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        return [bool(renewed) for renewed in self._send(commands.renew(locks))]

    def lengthen(self, key: str, token: Token, ttl: float) -> None:
        """Let `key` live for `ttl` seconds from now, if `token` owns it.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        self._call(commands.renew([(key, token, ttl)]))

    def expect_copy(self, key: str, token: Token) -> bool:
        """Say that a copy of the holder's message is to come: its release will leave the note.

        Args:
            key: The key in Redis.
            token: Of the owner.

        Returns:
            Whether it was still held.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        return bool(self._ask(commands.expect(key, token))[0])

    def inspect(self, key: str) -> LockInfo | None:
        """Who holds `key`, in words; None where it is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        found = self.look(key)
        return found and found.holder.info(key, found.ttl)

    def look(self, key: str) -> Conflict | None:
        """What `acquire` would answer to anybody else than the holder; None where the key is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        reply, _ = self._ask(commands.inspect(key))
        return None if reply is None else _conflict(reply)

    def undo(self, key: str, token: Token) -> None:
        """Release what a failed acquire may have been granted; one try: else the lease ends it.

        By the whole token: where this arrives late, the key may hold another one of the same owner, and must keep it.
        """
        try:
            self._send(commands.release(key, token.value))
        except RedisError:
            logger.debug("could not undo a failed acquire of %s; its lease ends it if it was granted", key)

    def _take(self, command: Command, token: Token) -> Granted | Conflict | Finished:
        key = command.keys[0]
        if self.outage.unreachable is not None:
            self._look_again(key)
        try:
            reply, sent_at, _ = self._call(command)
        except BaseException as error:
            self.undo(key, token)
            if isinstance(error, RedisError):
                raise LockUnavailable(key, describe(error)) from error
            raise
        if isinstance(reply, int):
            return Granted(sent_at, reply if reply > 1 else None) if reply else Finished()
        return _conflict(reply)

    def _give_back(self, command: Command) -> bool:
        reply, resent = self._ask(command)
        return resent or bool(reply)


def _conflict(reply: Sequence[Any]) -> Conflict:
    value, ttl = reply
    return Conflict(Token.of(value), ttl / 1000 if ttl >= 0 else None)
