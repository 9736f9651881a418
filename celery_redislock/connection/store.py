"""LockStore: the verbs of the protocol, one method each. tests/model uses the same words.

Every script is safe to send twice, so the store resends a command after a lost connection. It also knows when a reply
is ambiguous. This module knows nothing about Celery.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.info import LockInfo
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand, keys_of
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

#: A held lock, as `renew` needs it: its key, its token, and its lease in seconds.
Lease = tuple[str, Token, float]


class LockStore(Sender):
    """The locks of one server. Each method sends one command."""

    def acquire(
        self,
        demand: Demand,
        token: Token,
        lease: float,
        note: str | None = None,
        *,
        fence: bool = False,
        call: bytes | None = None,
        claim: Claim | None = None,
    ) -> Granted | Conflict | Finished:
        """Acquire the key for `lease` seconds.

        Args:
            demand: The lock.
            token: The token to store.
            lease: How long the key holds the token, in seconds; infinite for a key that never expires.
            note: The key of the attempt's note, if this message may be a copy.
            fence: Whether to ask for a fencing number.
            call: What the key has held since the caller was called, from `Room.call_of`; None if the caller was not
                called.
            claim: The message's claim, if the key or the place in its queue is reserved for the message. A key reserved
                for this claim is granted.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. If the key may have been granted, the store
                has tried to release it. While Redis is known to be unreachable, most callers get this error at
                once, and nothing is sent.
        """
        how = commands.acquire(demand, token.owner, token, lease, note=note, fence=fence, call=call, claim=claim)
        return self._take(how, demand, token)

    def reserve(
        self, key: str, token: Token, ttl: float, passed: Passed, *, in_queue: bool = False
    ) -> Reserved | Outstanding:
        """Reserve `key`, or the place in its queue, for a message about to be sent, unless a job is outstanding.

        Args:
            key: The key in Redis.
            token: The token of the message's reservation.
            ttl: How long the reservation lasts, in seconds.
            passed: The jobs to pass over: this publisher already knows about them.
            in_queue: Whether to reserve the place in the queue even if the key is free.

        Raises:
            LockUnavailable: As for `acquire`.
        """
        command = commands.reserve(key, token, ttl, passed, in_queue=in_queue)
        reply, _ = self._grant(command, commands.give_up(Demand(key), token.nonce, None))
        if isinstance(reply, int):
            return Reserved(key if reply == 1 else keys_of(key).queued)
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return Outstanding(tuple((Token.of(value), ttl / 1000 if ttl >= 0 else None) for value, ttl in pairs))

    def rename(
        self, demand: Demand, token: Token, new: Token, lease: float, *, fence: bool
    ) -> Granted | Conflict | Finished:
        """Like `acquire` by the owner of `token`, but store `new`, which the caller of a `Lock` has chosen.

        Raises:
            LockUnavailable: As for `acquire`, but the store releases the key only if it holds `token`, not `new`.
        """
        return self._take(commands.acquire(demand, token.owner, new, lease, fence=fence), demand, token)

    def release(self, demand: Demand, token: Token, note: Note | None = None, *, exactly: bool = False) -> bool:
        """Release the key if `token` owns it.

        Args:
            demand: The lock.
            token: The owner's token.
            note: The note for copies of the owner's message; None if the attempt is not over.
            exactly: Release the key only if it holds exactly this token, not another token of the same owner.

        Returns:
            Whether `token` still owned the key; also True if a lost reply leaves that open.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. The key expires with its lease.
        """
        return self.send(commands.release(demand, token.value if exactly else token.owner, note))

    def send(self, command: Command) -> bool:
        """Send a command that releases a key, hands it over or lets it cool down, and return what `release` returns.

        Raises:
            LockUnavailable: As for `release`.
        """
        reply, resent = self._ask(command)
        return resent or bool(reply)

    def give_up(self, demand: Demand, claim: str, *, is_to_come: bool) -> bool:
        """Give up the reservations of a message that will not run: the key, and the place in the queue.

        Args:
            demand: The lock.
            claim: The message's claim.
            is_to_come: Whether a run that has not ended may still hand the key over to the message. If so, a note
                tells that run's release not to.

        Returns:
            Whether the key was reserved for the message.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return bool(self._ask(commands.give_up(demand, claim, NOTE_TTL if is_to_come else None))[0])

    def pass_on(self, demand: Demand, call: bytes) -> bool:
        """Release a key kept for a waiter that was called but will not acquire it. The next waiter gets its turn.

        Args:
            demand: The lock.
            call: What the key holds for that waiter, from `Room.call_of`.

        Returns:
            Whether the key was still kept for that waiter.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. The key will be free in a few seconds.
        """
        return self.send(commands.release(demand, call))

    def renew(self, locks: Sequence[Lease]) -> list[bool | RedisError]:
        """Renew each key that its token still owns. This command is not sent again after a lost connection.

        Args:
            locks: Triples of key, token and lease in seconds.

        Returns:
            For each lock, whether its token still owns the key. In a Cluster, if only some nodes answered, an error for
            each lock whose node did not answer, or refused the command.

        Raises:
            RedisError: Redis did not answer, or refused the command.
        """
        return [bool(renewed) for renewed in self._send(commands.renew(locks))]

    def lengthen(self, key: str, token: Token, ttl: float) -> None:
        """Set the time to live of `key` to `ttl` seconds, if `token` owns the key.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        self._ask(commands.lengthen(key, token, ttl))

    def expect_copy(self, demand: Demand, token: Token) -> bool:
        """Mark the key: a copy of the holder's message will arrive, so the release must write a note for the copy.

        Args:
            demand: The lock.
            token: The owner's token.

        Returns:
            Whether `token` still owned the key.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return bool(self._ask(commands.expect(demand, token))[0])

    def inspect(self, demand: Demand) -> LockInfo | None:
        """Return the holder of the key as a `LockInfo`; None if the key is free.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        found = self.look(demand)
        return found and found.info(demand.key)

    def enter(self, demand: Demand, room: Token, rank: int) -> None:
        """Put a room in the line of the key even though its first waiter has no slot to run in yet.

        Args:
            demand: The lock.
            room: The room's token.
            rank: The rank of the room's first waiter for this key, in microseconds since the epoch.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
            ValueError: `rank` is not a rank.
        """
        self._ask(commands.enter(demand, room, rank))

    def stand(self, demand: Demand, room: Token, rank: int, next_rank: int | None, number: int = 0) -> Taken | Conflict:
        """Put a room in the line of the key, and take the key for the room's first waiter if it is that waiter's turn.

        Args:
            demand: The lock.
            room: The room's token.
            rank: The rank of the room's first waiter for this key, in microseconds since the epoch.
            next_rank: The rank of the room's next waiter for this key; None if there is none.
            number: Distinguishes waiters of the room with the same rank, as in `tokens.call`.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
            ValueError: `rank` or `next_rank` is not a rank.
        """
        reply, _ = self._ask(commands.stand(demand, room, rank, next_rank, number))
        return Taken() if isinstance(reply, int) else _conflict(reply)

    def leave(self, demand: Demand, room: Token) -> bool:
        """Take a room out of the line of the key. If the key was offered to the room, the next room gets the offer.

        Returns:
            Whether the key was offered to the room.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return bool(self._ask(commands.leave(demand, room))[0])

    def look(self, demand: Demand) -> Conflict | None:
        """Return the conflict that an acquire by anyone but the holder would get; None if the key is free.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        reply, _ = self._ask(commands.inspect(demand))
        return None if reply is None else _conflict(reply)

    def undo(self, demand: Demand, token: Token) -> None:
        """Release a key that a failed acquire may have been granted. Tried only once: if that fails, the key expires.

        The release matches the whole token. By the time it arrives, the same owner may have been granted the key again
        with another token, and must keep it.
        """
        self._undo(commands.release(demand, token.value))

    def undo_reserve(self, key: str, token: Token) -> None:
        """Give up what a failed publish has reserved. Tried only once: if that fails, the reservation expires."""
        self._undo(commands.give_up(Demand(key), token.nonce, None))

    def _undo(self, command: Command) -> None:
        try:
            self._send(command)
        except RedisError:
            logger.debug("could not undo what failed; %s ends with its lease, if it was granted", command.keys[0])

    def _take(self, command: Command, demand: Demand, token: Token) -> Granted | Conflict | Finished:
        reply, sent_at = self._grant(command, commands.release(demand, token.value))
        if isinstance(reply, int):
            return _granted(command, sent_at, reply) if reply else Finished()
        return _conflict(reply)

    def _grant(self, command: Command, undo: Command) -> tuple[Any, float]:
        """Return the reply to a command that may grant something, and the time it was sent. If none comes, send `undo`.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
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
    """Return what `command` was granted: `reply` is a permit's number, a fence, or 1."""
    if command.script is ACQUIRE_PERMIT:
        return Granted(sent_at, None, reply)
    return Granted(sent_at, reply if reply > 1 else None)


def _conflict(reply: Sequence[Any]) -> Conflict:
    value, ttl, *rest = reply
    holder, left = Token.of(value), ttl / 1000 if ttl >= 0 else None
    if len(rest) < 3:
        return Conflict(holder, left, *rest)
    now, waiting, others, *twin = rest
    # Actual holders first, then the tokens of rooms and waiters that the key is kept for.
    holders = sorted((holder, *map(Token.of, others)), key=lambda one: one.state == "offered")
    return Conflict(holders[0], left, now, waiting, tuple(holders[1:]), bool(twin))
