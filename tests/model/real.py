"""The real scripts beside the model's commands: a state of the model is put onto a real server, and read back.

Each pair of a state and a command is sent as `protocol.commands` builds it. The reply's tag, the permits, their marks,
their leases, the line and the notes must be the model's. So the model and the code cannot drift apart.
"""

from __future__ import annotations

import itertools
import math

import redis

from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict, Granted, Outstanding
from celery_redislock.protocol.scripts import Claim as ClaimOfMessage
from celery_redislock.protocol.scripts import Command as SentCommand
from celery_redislock.protocol.scripts import Note, Passed, Tag
from celery_redislock.protocol.scripts import Reply as ReplyOfScript
from celery_redislock.protocol.tokens import RESERVED, RUNS, SEEN, SENDING, Attempt, Token, known_by

from .commands import (
    Acquire,
    Command,
    Effect,
    Enter,
    GiveUp,
    HandOver,
    Leave,
    Release,
    Renew,
    Reserve,
    Stand,
)
from .effects import apply
from .server import NOBODY, Key, Server, limit_of, member_of, room_of

KEY = "redislock:{shop.bill:7}"
#: The time to live that a key is set up with, and the one that a command gives it, in seconds: the time that is left
#: tells which one a key has.
OLD_LEASE, NEW_LEASE = 50.0, 100.0
#: How long an offer lives, and then a call, in seconds.
OFFER, CALL = 1.0, 5.0
LINE, QUEUED, WINDOW = keys_of(KEY).line, keys_of(KEY).queued, keys_of(KEY).window("shop.bill")


def small_lines() -> list[tuple[Server, Command]]:
    """Every command that has to do with the line, in every state of the key, on lines of up to two rooms.

    The explorations do not meet all of them. For one, they meet no room that stands in line with a rank which is not
    its own any more, because the first who waited in it has left.
    """
    copy = Attempt("copy", 0, 0)
    offers = [Key(nonce, NOBODY) for nonce in ("?r1", "?r2")]
    calls = [Key(f"!{room}", NOBODY, rank=rank) for room, rank in (("r1", 10), ("r1", 20), ("r2", 15))]
    calls.append(Key("!r1", NOBODY, rank=10, number=1))
    owned = [Key(nonce, Attempt(nonce, 0, 0)) for nonce in ("n1", "n2", "h1")]
    r1_first, r1_last, r2 = (10, "r1"), (20, "r1"), (15, "r2")
    asked = [("", 1, 0), ("r1", 1, 10), ("r1", 1, 10, 1)]
    lines = [(), (r1_first,), (r1_last,), (r2,), (r1_first, r2), (r2, r1_last), ((15, "r1"), r2)]
    commands: list[Command] = [
        *(Stand("r1", rank, next_rank) for rank in (10, 15, 20) for next_rank in (None, 25)),
        *(Stand("r1", 10, next_rank, 1, number=1) for next_rank in (None, 10)),
        *(Enter("r1", rank) for rank in (10, 15, 20)),
        Leave("r1"),
        *(Acquire("n1", Attempt("n1", 0, 0), reads_note, *call) for reads_note in (False, True) for call in asked),
        *(Acquire("n1", copy, True, *call) for call in asked),
        Acquire("n1", Attempt("n1", 0, 0), False, "r1", 1, 10, claim="h1"),
        *(Release("n1", None, unseen_copy=False), Release("!r1", None, False, 1, 10)),
        HandOver("n1", None, False, "h1", Attempt("n1", 1, 0)),
        GiveUp("h1", is_to_come=False),
    ]
    states = [Server((key,), frozenset({copy}), line=line) for key in (None, *offers, *calls, *owned) for line in lines]
    return [(server, command) for server in states for command in commands]


def small_permits() -> list[tuple[Server, Command]]:
    """Every command on two permits, in every state of both, on lines of up to two rooms, with the limits 1 and 2."""
    mine, copy, over = Attempt("n1", 0, 0), Attempt("n1", 0, 0), Attempt("over", 0, 0)
    values = [
        None,
        *(Key(nonce, NOBODY) for nonce in ("?r1 2", "?r2")),
        *(Key(nonce, NOBODY, rank=rank) for nonce, rank in (("!r1 2", 10), ("!r1 2", 20), ("!r2 2", 15))),
        *(Key("n1", mine), Key("n2", Attempt("n2", 0, 0)), Key("n8", copy), Key("h8", copy), Key("h1", mine)),
    ]
    lines = [(), ((15, "r2"), (20, "r1 2")), ((20, "r1 2"), (25, "r2 2"))]
    calls = [("", 2, 0), ("r1", 2, 10)]
    commands: list[Command] = [
        *(Stand("r1", rank, next_rank, 2) for rank, next_rank in ((10, None), (20, None), (20, 30))),
        *(Stand("r1", 10, None), Leave("r1", 2), Leave("r2"), Enter("r1", 10, 2)),
        *(Acquire("n1", mine, reads_note, *call) for reads_note in (False, True) for call in calls),
        *(Acquire("n1", over, True, *call) for call in calls),
        *(Acquire("n1", mine, False, *call, claim="h1") for call in calls),
        *(Acquire("n3", mine, True), Acquire("n3", mine, True, "r2", 1, 15), Acquire("n3", mine, False, claim="h1")),
        *(Release("n1", mine, False, limit) for limit in (1, 2)),
        *(Release("!r1 2", None, False, 2, 10), HandOver("n1", None, False, "h2", Attempt("n1", 1, 0), 2)),
        *(GiveUp("h1", True, limit) for limit in (1, 2)),
    ]
    pairs = [permits for permits in itertools.product(values, values) if permits[0] is None or permits[0] != permits[1]]
    states = [
        Server(permits, frozenset({over}), line=line)
        for permits in pairs
        for line in lines
        # A room never stands in line while it is offered a permit.
        if not {f"?{member}" for _, member in line} & {key.nonce for key in permits if key}
    ]
    return [(server, command) for server in states for command in commands]


class Keys:
    """Puts the states of the model onto a real server, and reads them back."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.store = LockStore.of(client)
        self.tokens: dict[tuple[str, Attempt, int], Token] = {}
        self.rooms: dict[str, Token] = {}

    def set_up(self, server: Server) -> None:
        pipe = self.client.pipeline(transaction=False)
        pipe.flushdb()
        for permit, key in enumerate(server.permits, 1):
            if key:
                pipe.set(keys_of(KEY).permit(permit), self.value(key), px=int(OLD_LEASE * 1000))
        for attempt in server.notes:
            pipe.set(note(attempt), "", ex=60)
        for claim in server.gone:
            pipe.set(keys_of(KEY).gone(real(claim)), "", ex=60)
        if server.queued:
            pipe.set(QUEUED, self.value(server.queued), px=int(OLD_LEASE * 1000))
        if server.window:
            pipe.set(WINDOW, self.value(server.window), px=int(OLD_LEASE * 1000))
        if server.line:
            pipe.zadd(LINE, {self.member(member): rank for rank, member in server.line})
            pipe.expire(LINE, 60)
        pipe.execute()

    def run(self, command: Command) -> ReplyOfScript:
        """What the script of `command` replies."""
        return self.store.ask(self.sent(command))[0]

    def sent(self, command: Command) -> SentCommand:
        """What the code sends for `command`."""
        demand = Demand(KEY, getattr(command, "limit", 1))
        match command:
            case Acquire(nonce, attempt, reads_note):
                return commands.acquire(
                    *(demand, self.token(nonce, attempt, command.times), NEW_LEASE),
                    note=note(attempt) if reads_note else None,
                    call=self.call(command) if command.room else None,
                    claim=ClaimOfMessage(real(command.claim), NEW_LEASE) if command.claim else None,
                )
            case Reserve(claim, attempt, ended, preceding, unsent, opens_window):
                passed, window = Passed(ended, preceding, unsent), OLD_LEASE if opens_window else None
                token = self.sending(claim, attempt)
                return commands.reserve(KEY, token, NEW_LEASE, passed, in_queue=False, window=window)
            case Release(nonce, over, unseen_copy):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                if nonce[0] == "!":
                    call = tokens.call(self.member(nonce[1:]), command.rank, command.number)
                    return commands.release(demand, call.value)
                if command.exactly is not None:
                    return commands.release(demand, self.token(nonce, *command.exactly).value)
                return commands.release(demand, owner(nonce).owner, left)
            case HandOver(nonce, over, unseen_copy, claim, attempt):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                return commands.hand_over(demand, owner(nonce), self.token(claim, attempt), NEW_LEASE, left)
            case GiveUp(claim, exactly=Attempt() as attempt):
                places = (QUEUED, WINDOW) if command.closes_window else (QUEUED,)
                return commands.release(demand, self.sending(claim, attempt).value, places=places)
            case GiveUp(claim, is_to_come):
                given = keys_of(KEY).given((command.over or Attempt("nobody", 0, 0)).job)
                closes = (WINDOW, given) if command.closes_window else ()
                return commands.give_up(demand, real(claim), is_to_come=is_to_come, closes=closes)
            case Renew(nonce, permit):
                name = keys_of(KEY).permit(permit) if permit else QUEUED
                windows = [(WINDOW, owner(nonce), math.inf)] if command.has_window else []
                return commands.renew([(name, owner(nonce), NEW_LEASE), *windows])
            case Enter(room, rank):
                return commands.enter(demand, self.room(room), rank)
            case Stand(room, rank, next_rank):
                return commands.stand(demand, self.room(room), rank, next_rank, command.number)
            case Leave(room):
                return commands.leave(demand, self.room(room))

    def read(self, permits: int) -> tuple[list[str | None], set[str], list[tuple[int, str]], list[float]]:
        """What the permits and the place in the queue hold, the notes, the line, and how long the first live.

        All must have a time to live.
        """
        names = [*(keys_of(KEY).permit(permit) for permit in range(1, permits + 1)), QUEUED, WINDOW]
        pipe = self.client.pipeline(transaction=False)
        values, found, line = pipe.mget(names).keys("*").zrange(LINE, 0, -1, withscores=True).execute()
        others = [name.decode() for name in found]
        for name in others:
            pipe.pttl(name)
        left = dict(zip(others, pipe.execute(), strict=True))
        assert all(milliseconds > 0 for milliseconds in left.values()), left
        members = [(int(rank), member.decode()) for member, rank in line]
        decoded = [value and value.decode() for value in values]
        return decoded, set(others) - {*names, LINE}, members, [left.get(name, 0) / 1000 for name in names]

    def value(self, key: Key) -> str:
        if key.member:
            member = self.member(key.member)
            return tokens.call(member, key.rank, key.number) if key.nonce[0] == "!" else member
        token = self.token(key.nonce, key.attempt, key.times)
        return f"{SEEN if key.marked else SENDING}{token[1:]}" if key.marked or key.sending else token

    def room(self, room: str) -> Token:
        return self.rooms.setdefault(room, tokens.of_room(real(room), "host"))

    def member(self, member: str) -> Token:
        return tokens.for_capacity(self.room(room_of(member)), limit_of(member))

    def call(self, command: Acquire) -> bytes:
        """What a run that was called knows of the permit that is kept for it."""
        return tokens.call(self.member(member_of(command.room, command.limit)), command.rank, command.number).value

    def token(self, nonce: str, attempt: Attempt, times: int = 0) -> Token:
        minted = tokens.mint(real(nonce), attempt, tokens.origin(f"w{times}@host", "shop.bill"), state(nonce))
        return self.tokens.setdefault((nonce, attempt, times), minted)

    def sending(self, claim: str, attempt: Attempt) -> Token:
        """The token of a publisher that has not sent its message."""
        return Token.of(SENDING + self.token(claim, attempt)[1:])


def real(nonce: str) -> str:
    """A nonce as long as a real one. All are alike but for their end, so a script must compare the whole of it."""
    return nonce.rjust(22, "-")


def state(nonce: str) -> str:
    return RESERVED if nonce[0] == "h" else RUNS


def owner(nonce: str) -> Token:
    return known_by(real(nonce), state(nonce))


def note(attempt: Attempt) -> str:
    """The note of `attempt`, as the code names it."""
    return keys_of(KEY).note(attempt)


def plain(server: Server, command: Command) -> tuple[Server, Command]:
    """The pair with plain names and ranks, and without the notes of others: many pairs differ in nothing else."""
    names: dict[str, str] = {}

    def name(old: str) -> str:
        kind = "r" if old[0] in "rwx" else old[0]
        return names.setdefault(old, f"{kind}{len(names) + 1}")

    def member(old: str) -> str:
        return member_of(name(room_of(old)), limit_of(old))

    def owner(old: str) -> str:
        return old[0] + member(old[1:]) if old[0] in "?!" else name(old)

    given = command._asdict()
    given |= {field: name(given[field]) for field in ("claim", "room") if given.get(field)}
    if given.get("nonce"):
        given["nonce"] = owner(given["nonce"])
    ranks = {given.get("rank"), given.get("next_rank"), *(rank for rank, _ in server.line)}
    ranks |= {key.rank for key in server.keys}
    small = {rank: number for number, rank in enumerate(sorted(rank for rank in ranks if rank), 10)}
    given |= {field: small[given[field]] for field in ("rank", "next_rank") if given.get(field)}
    permits = tuple(
        key and key._replace(nonce=owner(key.nonce), rank=small.get(key.rank, 0) if key.nonce[0] == "!" else 0)
        for key in (*server.permits, server.queued, server.window)
    )
    notes = server.notes & {getattr(command, "attempt", None), getattr(command, "note", None)}
    gone = frozenset(names[claim] for claim in server.gone & set(names))
    line = tuple(sorted((small.get(rank, 0), member(old)) for rank, old in server.line))
    return Server(permits[:-2], notes, gone, line, *permits[-2:]), type(command)(**given)


def follow(keys: Keys, server: Server, command: Command) -> None:
    effect = apply(server, command)
    keys.set_up(server)
    reply = keys.run(command)
    values, notes, line, leases = keys.read(len(server.permits))
    after = effect.server
    story = f"{command} on {server}"
    assert reply[0] == effect.reply, story
    if isinstance(command, Acquire) and effect.reply is Tag.GRANTED:
        assert Granted.of(reply, 0.0).permit == effect.permit, story
    if effect.reply in {Tag.CONFLICT, Tag.COPY}:
        assert [*map(str, Conflict.of(reply).holders)] == [keys.value(key) for key in effect.holders], story
    if effect.reply is Tag.OUTSTANDING:
        taken = [str(token) for token, _ in Outstanding.of(reply).taken]
        assert taken == [keys.value(key) for key in effect.holders], story
    assert values == [keys.value(key) if key else None for key in (*after.permits, after.queued, after.window)], story
    claims = {keys_of(KEY).gone(real(claim)) for claim in after.gone}
    assert notes == {note(attempt) for attempt in after.notes} | claims, story
    assert line == [(rank, keys.member(member)) for rank, member in after.line], story
    longests = [longest_lease(server, command, effect, permit) for permit in range(1, len(server.permits) + 1)]
    longests += [longest_place(server, command, effect), OLD_LEASE if after.window else 0.0]
    for lease, longest in zip(leases, longests, strict=True):
        assert longest / 2 < lease <= longest or lease == longest == 0, story


def longest_lease(server: Server, command: Command, effect: Effect, permit: int) -> float:
    """How long a permit may live at most after a command, in seconds."""
    before, key = server.permits[permit - 1], effect.server.permits[permit - 1]
    if key is None:
        return 0.0
    is_called = isinstance(command, Stand) and key == Key(
        f"!{command.member}", NOBODY, rank=command.rank, number=command.number
    )
    stood, stands = ({member for _, member in one.line} for one in (server, effect.server))
    is_offered_again = key.is_offered and key.member in stood - stands
    if key.member and (key != before or (is_called and effect.reply is Tag.CALLED) or is_offered_again):
        return OFFER if key.is_offered else CALL
    return NEW_LEASE if permit == effect.permit else OLD_LEASE


def longest_place(server: Server, command: Command, effect: Effect) -> float:
    """How long the place in the queue may live at most after a command, in seconds."""
    queued = effect.server.queued
    if queued is None:
        return 0.0
    is_mine = isinstance(command, Acquire | Reserve) and queued.nonce == command.claim
    if isinstance(command, Renew):
        return NEW_LEASE if command.permit == 0 and effect.reply is Tag.KEPT else OLD_LEASE
    is_new = queued != server.queued or (isinstance(command, Acquire) and effect.reply is Tag.CONFLICT)
    return NEW_LEASE if is_mine and is_new else OLD_LEASE


def small_places() -> list[tuple[Server, Command]]:
    """Every command that has to do with the place in the queue, in every state of it and of the key."""
    others = [Key("?r1", NOBODY), Key("!r1", NOBODY, rank=10)]
    jobs = [Key(nonce, Attempt(nonce, 0, 0)) for nonce in ("n1", "n2", "h1", "h2")]
    jobs += [job._replace(sending=True) for job in jobs if job.is_reserved]
    again = Key("n8", Attempt("h2", 0, 0))  # the job that was queued with the claim h2, and runs by now
    commands: list[Command] = [
        *(
            Reserve(claim, Attempt(claim, 0, 0), frozenset(ended), frozenset(preceding))
            for claim in ("h1", "h9")
            for ended in ((), ("h2",), ("n2",), ("n2", "h2"))
            for preceding in ((), ("n1",))
        ),
        *(
            Reserve("h9", Attempt("h9", 0, 0), frozenset(), frozenset(preceding), frozenset({"h2"}), opens_window)
            for preceding in ((), ("h2",))
            for opens_window in (False, True)
        ),
        *(Renew("h1", permit, has_window) for permit in (0, 1) for has_window in (False, True)),
        Reserve("h9", Attempt("h9", 0, 0), frozenset({"h2"}), opens_window=True),
        GiveUp("h1", is_to_come=False, closes_window=True),
        *(Acquire("n1", Attempt("n1", 0, 0), reads_note, claim="h1") for reads_note in (False, True)),
        *(GiveUp("h1", is_to_come) for is_to_come in (False, True)),
        HandOver("n1", None, False, "h7", Attempt("n1", 1, 0)),
    ]
    states = [
        Server((key,), line=line, queued=queued, window=window)
        for key in (None, *others, *jobs, again)
        for queued in (None, *(job for job in jobs if job.is_reserved and job != key))
        for line in ((), ((10, "r1"),))
        for window in ((None, jobs[2], jobs[3], jobs[-1]) if key is None or queued is None else (None,))
    ]
    return [(server, command) for server in states for command in commands]
