"""LockStore: what can be done with the locks of a server, in the words of the model in tests/model.

Every script is safe to send twice, so the store sends a command once more after a lost connection, and knows when an
answer is ambiguous. This module does not know Celery.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.info import LockInfo
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.scripts import (
    ACQUIRE_PERMIT,
    NOTE_TTL,
    Claim,
    Command,
    Conflict,
    Finished,
    Granted,
    Note,
    Outstanding,
    Passed,
    Reserved,
    Taken,
)
from celery_redislock.protocol.tokens import Token

from .sender import Sender

logger = logging.getLogger(__name__)

#: A held lock as it is renewed: its key, its token, and its lease in seconds.
Lease = tuple[str, Token, float]


class LockStore(Sender):
    """The locks of one server; each method sends one command."""

    def acquire(
        self,
        key: str,
        token: Token,
        lease: float,
        note: str | None = None,
        *,
        fence: bool = False,
        call: bytes | None = None,
        claim: Claim | None = None,
    ) -> Granted | Conflict | Finished:
        """Acquire `key` for `lease` seconds.

        Args:
            key: The key in Redis.
            token: The token to store.
            lease: Seconds; infinite for a key without expiry.
            note: The key of the attempt's note, where this message may be a copy.
            fence: Ask for a fencing number.
            call: What the key holds since the caller was called to it, from `Room.call_of`; None where it was not.
            claim: What the message carries for which the key, or the place in its queue, is reserved; a key that is
                reserved for this claim is granted.

        Raises:
            LockUnavailable: Redis did not answer or refused. In case the key was granted, the store has tried to
                release it. While Redis is known to be out of reach, the error comes at once and nothing is sent.
        """
        how = commands.acquire(key, token.owner, token, lease, note=note, fence=fence, call=call, claim=claim)
        return self._take(how, token)

    def reserve(
        self, key: str, token: Token, ttl: float, passed: Passed, *, in_queue: bool = False
    ) -> Reserved | Outstanding:
        """Reserve `key` for a message that is about to be sent, or the place in its queue, unless a job is outstanding.

        Args:
            key: The key in Redis.
            token: Of the message's reservation.
            ttl: Seconds.
            passed: The jobs that are passed over, of which this publisher has been told.
            in_queue: Reserve the place, even where the key is free.

        Raises:
            LockUnavailable: As `acquire`.
        """
        command = commands.reserve(key, token, ttl, passed, in_queue=in_queue)
        reply, _ = self._grant(command, commands.give_up(key, token.nonce, None))
        if isinstance(reply, int):
            return Reserved(key if reply == 1 else keys_of(key).queued)
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return Outstanding(tuple((Token.of(value), ttl / 1000 if ttl >= 0 else None) for value, ttl in pairs))

    def rename(self, key: str, token: Token, new: Token, lease: float, *, fence: bool) -> Granted | Conflict | Finished:
        """As `acquire`, by the owner of `token`; but the key is to hold `new`, which the caller of a `Lock` has chosen.

        Raises:
            LockUnavailable: As `acquire`; but the store releases a key that holds `token`, and none that holds `new`.
        """
        return self._take(commands.acquire(key, token.owner, new, lease, fence=fence), token)

    def release(self, key: str, token: Token, note: Note | None = None, *, exactly: bool = False) -> bool:
        """Release `key` if `token` owns it.

        Args:
            key: The key in Redis.
            token: Of the owner.
            note: For copies of the owner's message; None where the attempt is not over.
            exactly: Whether to release the key only where it holds this token, and no other of the same owner.

        Returns:
            Whether `token` still owned the key. True as well where a lost reply leaves that open.

        Raises:
            LockUnavailable: Redis did not answer or refused; the key ends with its lease.
        """
        return self.send(commands.release(key, token.value if exactly else token.owner, note))

    def send(self, command: Command) -> bool:
        """Send a command that releases a key, hands it over or lets it cool down, as `release` does.

        Raises:
            LockUnavailable: As `release`.
        """
        reply, resent = self._ask(command)
        return resent or bool(reply)

    def give_up(self, key: str, claim: str, *, is_to_come: bool) -> bool:
        """Give up the reservations of a message that will not run: of the key, and of the place in the queue.

        Args:
            key: The key in Redis.
            claim: What the message carries.
            is_to_come: Whether the key may yet be handed over to the message, by a run that has not ended. A note then
                tells that run's release not to.

        Returns:
            Whether the key was reserved for the message.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        return bool(self._ask(commands.give_up(key, claim, NOTE_TTL if is_to_come else None))[0])

    def pass_on(self, key: str, call: bytes) -> bool:
        """Release a key that is kept for a waiter which was called and does not ask for it: the next one gets its turn.

        Args:
            key: The key in Redis.
            call: What the key holds for that waiter, from `Room.call_of`.

        Returns:
            Whether the key was still kept for that waiter.

        Raises:
            LockUnavailable: Redis did not answer or refused; the key is free in a few seconds.
        """
        return self.send(commands.release(key, call))

    def renew(self, locks: Sequence[Lease]) -> list[bool | RedisError]:
        """Renew each key that its token still owns. After a lost connection this command is not sent once more.

        Args:
            locks: Triples of key, token and lease in seconds.

        Returns:
            For each lock, whether its token still owns the key; in a Cluster, the error of a node that did not answer
            or refused, where others answered.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        return [bool(renewed) for renewed in self._send(commands.renew(locks))]

    def lengthen(self, key: str, token: Token, ttl: float) -> None:
        """Let `key` live for `ttl` seconds from now, if `token` owns the key.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        self._ask(commands.lengthen(key, token, ttl))

    def expect_copy(self, key: str, token: Token) -> bool:
        """Mark `key`: a copy of the holder's message is to come, so the key's release must write a note for the copy.

        Args:
            key: The key in Redis.
            token: Of the owner.

        Returns:
            Whether `token` still owned the key.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        return bool(self._ask(commands.expect(key, token))[0])

    def inspect(self, key: str) -> LockInfo | None:
        """Who holds `key`, for people; None where the key is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        found = self.look(key)
        return found and found.info(key)

    def enter(self, key: str, room: Token, rank: int) -> None:
        """Let a room stand in line for `key` which has no slot for its first waiter.

        Args:
            key: The key in Redis.
            room: The token of the room.
            rank: Of the room's first waiter for this key, in microseconds since the epoch.

        Raises:
            LockUnavailable: Redis did not answer or refused.
            ValueError: The rank is no rank.
        """
        self._ask(commands.enter(key, room, rank))

    def stand(self, key: str, room: Token, rank: int, next_rank: int | None, number: int = 0) -> Taken | Conflict:
        """Let a room stand in line for `key`, and take the key where it is the turn of the room's first waiter.

        Args:
            key: The key in Redis.
            room: The token of the room.
            rank: Of the room's first waiter for this key, in microseconds since the epoch.
            next_rank: Of the room's next waiter for this key; None where there is none.
            number: Tells the first waiter from others of the room with the same rank, as for `tokens.call`.

        Raises:
            LockUnavailable: Redis did not answer or refused.
            ValueError: A rank is no rank.
        """
        reply, _ = self._ask(commands.stand(key, room, rank, next_rank, number))
        return Taken() if isinstance(reply, int) else _conflict(reply)

    def leave(self, key: str, room: Token) -> bool:
        """Let a room leave the line of `key`; where the key is kept for the room, it is offered to the next one.

        Returns:
            Whether the key was kept for the room.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        return bool(self._ask(commands.leave(key, room))[0])

    def look(self, key: str) -> Conflict | None:
        """Who holds `key`, as `acquire` would answer to anybody but the holder; None where the key is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        reply, _ = self._ask(commands.inspect(key))
        return None if reply is None else _conflict(reply)

    def undo(self, key: str, token: Token) -> None:
        """Release a key that a failed acquire may have been granted. One try: if it fails, the lease ends the lock.

        The release is by the whole token: where it arrives late, the key may have been granted to the same owner with
        another token, and must keep that.
        """
        self._undo(commands.release(key, token.value))

    def undo_reserve(self, key: str, token: Token) -> None:
        """Give up what a publish has reserved that has failed. One try: if it fails, the reservation ends by itself."""
        self._undo(commands.give_up(key, token.nonce, None))

    def _undo(self, command: Command) -> None:
        try:
            self._send(command)
        except RedisError:
            logger.debug("could not undo what failed; %s ends with its lease, if it was granted", command.keys[0])

    def _take(self, command: Command, token: Token) -> Granted | Conflict | Finished:
        reply, sent_at = self._grant(command, commands.release(command.keys[0], token.value))
        if isinstance(reply, int):
            return _granted(command, sent_at, reply) if reply else Finished()
        return _conflict(reply)

    def _grant(self, command: Command, undo: Command) -> tuple[Any, float]:
        """The reply to a command that may grant something, and when it was sent; without a reply it is undone.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        key = command.keys[0]
        if self.outage_of(key).unreachable is not None:
            self._look_again(key)
        try:
            reply, sent_at, _ = self._call(command)
        except BaseException as error:
            self._undo(undo)
            if isinstance(error, RedisError):
                raise LockUnavailable(key, describe(error)) from error
            raise
        return reply, sent_at


def _granted(command: Command, sent_at: float, reply: int) -> Granted:
    """What `command` was granted: `reply` is the number of a permit, or a fence, or 1."""
    if command.script is ACQUIRE_PERMIT:
        return Granted(sent_at, None, reply)
    return Granted(sent_at, reply if reply > 1 else None)


def _conflict(reply: Sequence[Any]) -> Conflict:
    value, ttl, *rest = reply
    holder, left = Token.of(value), ttl / 1000 if ttl >= 0 else None
    if len(rest) < 3:
        return Conflict(holder, left, *rest)
    now, waiting, others, *twin = rest
    # First those who hold the lock, and then those for whom it is kept.
    holders = sorted((holder, *map(Token.of, others)), key=lambda one: one.state == "offered")
    return Conflict(holders[0], left, now, waiting, tuple(holders[1:]), bool(twin))
