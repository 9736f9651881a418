"""LockStore: the verbs of the protocol, one method each. tests/model uses the same words.

Every script is safe to send twice, so a store resends a command after a lost connection. This module knows
nothing about Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import redis
from redis.exceptions import RedisError

from celery_redislock.errors import LockInfo, LockUnavailable
from celery_redislock.protocol import commands
from celery_redislock.protocol.hold import Hold, Owner
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Answer, Called, Conflict, Merged, Outstanding, Renewed, Reserved, meaning
from celery_redislock.protocol.scripts import GRANTED, Call, Command, Note, Numbered, Passed, Reply, Tag
from celery_redislock.protocol.tokens import Token

from .connections import Connections
from .outage import Outage
from .sender import Sender

#: A held lock, as `renew` needs it: its key, its token, and its lease in seconds.
Lease = tuple[str, Token, float]


class LockStore(Sender):
    """The locks of one server. Each method sends one command, or one for each of several keys."""

    @classmethod
    def of(cls, client: redis.Redis, outage: Outage | None = None) -> Self:
        """Return the store for the server of a client that does not retry, and whose replies are bytes.

        Args:
            client: The client.
            outage: The server's `Outage`, shared by all its stores in this process.
        """
        outage = outage or Outage()
        return cls(Connections(client), lambda key: outage)

    def acquire(
        self,
        owner: Owner,
        lease: float,
        note: str | None = None,
        *,
        fence: bool = False,
        numbered: Numbered | None = None,
    ) -> Answer:
        """Acquire the key that `owner` demands, for `lease` seconds.

        Args:
            owner: Its hold is asked for, and follows what happens.
            lease: How long the key holds the token, in seconds; infinite for a key that never expires.
            note: The key of the attempt's note, if this message may be a copy.
            fence: Whether to ask for a fencing number.
            numbered: The message's call, if others can be merged into the message.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command. If the key may have been granted, the store
                has tried to release it. While Redis is known to be unreachable, most callers get this error at
                once, and nothing is sent.
        """
        owner.hold = hold = owner.hold.asked()
        try:
            reply, sent_at, _ = self.ask(hold.acquire(lease, note, fence=fence, numbered=numbered), hold.undo)
        except LockUnavailable:  # after any other error, the owner ends the hold
            owner.hold = owner.hold.doubted(hold.asks)
            raise
        owner.hold = owner.hold.answered(hold.asks, reply[0])
        return meaning(reply, sent_at)

    def acquire_all(
        self, owners: Sequence[Owner], lease: float, note: str | None, fenced: Owner | None
    ) -> list[Answer]:
        """Do for all `owners` what `acquire` does for one, in one round trip if one server has all keys.

        The note is of the first one's key. One of them may be `fenced`.

        Raises:
            LockUnavailable: As for `acquire`. No key is granted then, or its grant is taken back.
        """
        for owner in owners:
            owner.hold = owner.hold.asked()
        asked = [owner.hold for owner in owners]
        sent = [one.hold.acquire(lease, note if one is owners[0] else None, fence=one is fenced) for one in owners]
        try:
            replies, sent_at = self.ask_all(sent, lambda: [hold.undo() for hold in asked])
        except LockUnavailable:
            for owner, hold in zip(owners, asked, strict=True):
                owner.hold = owner.hold.doubted(hold.asks)
            raise
        for owner, hold, reply in zip(owners, asked, replies, strict=True):
            owner.hold = owner.hold.answered(hold.asks, reply[0])
        return [meaning(one, sent_at) for one in replies]

    def reserve(
        self, owner: Owner, ttl: float, passed: Passed, *, in_queue: bool = False, window: float | None = None
    ) -> Reserved | Outstanding:
        """Reserve the key that `owner` demands, or the place in its queue, unless a job is outstanding.

        Args:
            owner: Publishes a message. Its hold is asked for, and follows what happens.
            ttl: How long the reservation lasts, in seconds.
            passed: The jobs to pass over: this publisher already knows about them.
            in_queue: Whether to reserve the place in the queue even if the key is free.
            window: How long to open a window for the job, in seconds; None if the task has no windows.

        Raises:
            LockUnavailable: As for `acquire`.
        """
        reply = self._publishes(owner, lambda hold: hold.reserve(ttl, passed, in_queue=in_queue, window=window))
        if reply[0] in {Tag.OUTSTANDING, Tag.WINDOW}:
            return Outstanding.of(reply)
        key = owner.hold.demand.key
        return Reserved(key if reply[0] == GRANTED else keys_of(key).queued)

    def merge(
        self, owner: Owner, ttl: float, queued_ttl: float, passed: Passed, call: Call
    ) -> Reserved | Merged | Outstanding:
        """Reserve the place in the queue of the key that `owner` demands, or merge `call` into the message that has it.

        Args:
            owner: Publishes a message. Its hold is asked for, and follows what happens.
            ttl: How long the place is reserved, in seconds.
            queued_ttl: How long it is reserved once the message is sent and due, in seconds.
            passed: As for `reserve`.
            call: The call.

        Raises:
            LockUnavailable: As for `acquire`.
        """
        reply = self._publishes(owner, lambda hold: hold.merge(ttl, queued_ttl, passed, call))
        match reply[0]:
            case Tag.OUTSTANDING:
                return Outstanding.of(reply)
            case Tag.MERGED:
                return Merged.of(reply)
        _, number, due_in = reply
        return Reserved(keys_of(owner.hold.demand.key).queued, number, due_in / 1000)

    def _publishes(self, owner: Owner, command: Callable[[Hold], Command]) -> Reply:
        """Send a command of a publish, which may reserve something for its message."""
        owner.hold = hold = owner.hold.asked()
        try:
            reply, _, _ = self.ask(command(hold), hold.undo)
        except LockUnavailable:
            owner.hold = owner.hold.doubted(hold.asks)
            raise
        owner.hold = owner.hold.answered(hold.asks, reply[0])
        return reply

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

    def give_up(self, demand: Demand, claim: str, *, is_to_come: bool, closes: tuple[str, ...] = ()) -> bool:
        """Give up the reservations of a message that will not run: the key, and the place in the queue.

        Args:
            demand: The lock.
            claim: The message's claim.
            is_to_come: Whether a run that has not ended may still hand the key over to the message. If so, a note
                tells that run's release not to.
            closes: If its job never runs: the key of the window that it has opened, and of the calls kept for it.

        Returns:
            Whether the key was reserved for the message.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        reply, _, _ = self.ask(commands.give_up(demand, claim, is_to_come=is_to_come, closes=closes))
        return bool(reply[0] == Tag.RELEASED)

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

    def renew(self, locks: Sequence[Lease]) -> list[Renewed | RedisError | None]:
        """Renew each key that its token still owns. This command is not sent again after a lost connection.

        Args:
            locks: Triples of key, token and lease in seconds.

        Returns:
            For each lock, None if its token no longer owns the key. In a Cluster, an error for each lock whose node did
            not answer, or refused the command.

        Raises:
            RedisError: Redis did not answer, or refused the command. A Cluster's store raises none.
        """
        return [*map(Renewed.of, self.ask_once(commands.renew(locks)))]

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
        self.ask(commands.enter(demand, room, rank))

    def stand(
        self, demand: Demand, room: Token, rank: int, next_rank: int | None, number: int = 0
    ) -> Conflict | Called:
        """Put a room in the line of the key, and take the key for the room's first waiter if it is that waiter's turn.

        Args:
            demand: The lock.
            room: The room's token.
            rank: The rank of the room's first waiter for this key, in microseconds since the epoch.
            next_rank: The rank of the room's next waiter for this key; None if there is none.
            number: Distinguishes waiters of the room with the same rank, as in `tokens.call`.

        Returns:
            Whether the first waiter is called: it must acquire the key now. Otherwise, who has the key.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
            ValueError: `rank` or `next_rank` is not a rank.
        """
        reply, _, _ = self.ask(commands.stand(demand, room, rank, next_rank, number))
        if reply[0] != Tag.CALLED:
            return Conflict.of(reply)
        return Called(reply[1], reply[2] / 1000 if len(reply) > 2 else None)

    def leave(self, demand: Demand, room: Token) -> bool:
        """Take a room out of the line of the key. If the key was offered to the room, the next room gets the offer.

        Returns:
            Whether the key was offered to the room.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        return bool(self.ask(commands.leave(demand, room))[0][0] == Tag.RELEASED)

    def look(self, demand: Demand) -> Conflict | None:
        """Return the conflict that an acquire by anyone but the holder would get; None if the key is free.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        reply, _, _ = self.ask(commands.inspect(demand))
        return None if reply[0] == Tag.FREE else Conflict.of(reply)
