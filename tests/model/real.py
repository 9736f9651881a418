"""The real scripts beside the model's commands: a state of the model is put onto a real server, and read back.

Each pair of a state and a command is run through `LockStore`. The reply, the key, its mark, its lease, the line and the
notes must be the model's. So the model and the code cannot drift apart.
"""

from __future__ import annotations

import redis

from celery_redislock.server import tokens
from celery_redislock.server.answers import Claim as ClaimOfMessage
from celery_redislock.server.answers import Conflict, Finished, Note, Taken
from celery_redislock.server.names import keys_of
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import CALLED, RESERVED, RUNS, SEEN, Attempt, Token, known_by

from .commands import (
    NOBODY,
    Acquire,
    Claim,
    Command,
    Effect,
    GiveUp,
    HandOver,
    Key,
    Leave,
    Release,
    Renew,
    Reply,
    Server,
    Stand,
    apply,
)

KEY = "redislock:{shop.bill:7}"
ORIGIN = tokens.origin("w@host", "shop.bill")
#: The time to live that a key is set up with, and the one that a command gives it, in seconds: the time that is left
#: tells which one a key has.
OLD_LEASE, NEW_LEASE = 50.0, 100.0
#: How long an offer lives, and then a call, in seconds.
OFFER, CALL = 1.0, 5.0
LINE = keys_of(KEY).line


def small_lines() -> list[tuple[Server, Command]]:
    """Every command that has to do with the line, in every state of the key, on lines of up to two rooms.

    The explorations do not meet all of them. For one, they meet no room that stands in line with a place which is not
    its own any more, because the first who waited in it has left.
    """
    copy = Attempt("copy", 0, 0)
    offers = [Key(nonce, NOBODY) for nonce in ("?r1", "?r2")]
    calls = [Key(f"!{room}", NOBODY, place=place) for room, place in (("r1", 10), ("r1", 20), ("r2", 15))]
    owned = [Key(nonce, Attempt(nonce, 0, 0)) for nonce in ("n1", "n2", "h1")]
    r1_first, r1_last, r2 = (10, "r1"), (20, "r1"), (15, "r2")
    lines = [(), (r1_first,), (r1_last,), (r2,), (r1_first, r2), (r2, r1_last), ((15, "r1"), r2)]
    commands: list[Command] = [
        *(Stand("r1", place, next_place) for place in (10, 15, 20) for next_place in (None, 25)),
        Leave("r1"),
        *(Acquire("n1", Attempt("n1", 0, 0), reads_note, room) for reads_note in (False, True) for room in ("", "r1")),
        *(Acquire("n1", copy, reads_note=True, room=room) for room in ("", "r1")),
        Claim("n1", Attempt("n1", 0, 0), False, "h1", "r1"),
        *(Release(nonce, None, unseen_copy=False) for nonce in ("n1", "?r1")),
        HandOver("n1", None, False, "h1", Attempt("n1", 1, 0)),
        GiveUp("h1", is_to_come=False),
    ]
    states = [Server(key, frozenset({copy}), line=line) for key in (None, *offers, *calls, *owned) for line in lines]
    return [(server, command) for server in states for command in commands]


class Keys:
    """Puts the states of the model onto a real server, and reads them back."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.store = LockStore(client)
        self.tokens: dict[tuple[str, Attempt], Token] = {}
        self.rooms: dict[str, Token] = {}

    def set_up(self, server: Server) -> None:
        self.client.flushdb()
        if server.key:
            self.client.set(KEY, self.value(server.key), px=int(OLD_LEASE * 1000))
        for attempt in server.notes:
            self.client.set(note(attempt), "", ex=60)
        for claim in server.gone:
            self.client.set(keys_of(KEY).gone(real(claim)), "", ex=60)
        if server.line:
            self.client.zadd(LINE, {self.room(room): place for place, room in server.line})
            self.client.expire(LINE, 60)

    def run(self, command: Command) -> Reply:
        match command:
            case Acquire(nonce, attempt, reads_note) | Claim(nonce, attempt, reads_note):
                token, read = self.token(nonce, attempt), note(attempt) if reads_note else None
                room = self.room(command.room).owner if command.room else None
                if isinstance(command, Claim):
                    claim = ClaimOfMessage(real(command.claim), NEW_LEASE)
                    answer = self.store.claim(KEY, token, NEW_LEASE, claim, read, room=room)
                else:
                    answer = self.store.acquire(KEY, token, NEW_LEASE, read, room=room)
                if isinstance(answer, Conflict):
                    return Reply.HELD
                return Reply.FINISHED if isinstance(answer, Finished) else Reply.GRANTED
            case Release(nonce, over, unseen_copy):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                who = self.room(nonce[1:]) if nonce[0] == "?" else owner(nonce)
                released = self.store.release(KEY, who, left)
                return Reply.RELEASED if released else Reply.NOT_MINE
            case HandOver(nonce, over, unseen_copy, claim, attempt):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                released = self.store.hand_over(KEY, owner(nonce), self.token(claim, attempt), NEW_LEASE, left)
                value = self.client.get(KEY) or b""
                taken = Reply.HANDED_OVER if value.startswith(RESERVED.encode()) else Reply.RELEASED
                return taken if released else Reply.NOT_MINE
            case GiveUp(claim, is_to_come):
                given_up = self.store.give_up(KEY, real(claim), is_to_come=is_to_come)
                return Reply.GIVEN_UP if given_up else Reply.NOT_MINE
            case Renew(nonce):
                return Reply.RENEWED if self.store.renew([(KEY, owner(nonce), NEW_LEASE)]) == [True] else Reply.NOT_MINE

            case Stand(room, place, next_place):
                stood = self.store.stand(KEY, self.room(room), place, next_place)
                return Reply.TAKEN if isinstance(stood, Taken) else Reply.HELD
            case Leave(room):
                return Reply.PASSED_ON if self.store.leave(KEY, self.room(room)) else Reply.LEFT

    def read(self) -> tuple[str | None, set[str], list[tuple[int, str]], float]:
        """The key's value, the notes, the line, and how long the key lives. All of them must have a time to live."""
        value = self.client.get(KEY)
        names = {name.decode() for name in self.client.scan_iter()}
        left = {name: self.client.pttl(name) for name in names}
        assert all(milliseconds > 0 for milliseconds in left.values()), left
        line = [(int(place), room.decode()) for room, place in self.client.zrange(LINE, 0, -1, withscores=True)]
        return value and value.decode(), names - {KEY, LINE}, line, left.get(KEY, 0) / 1000

    def value(self, key: Key) -> str:
        if key.room:
            room = self.room(key.room)
            return f"{CALLED}{room[1:]} {key.place}" if key.nonce[0] == "!" else room
        token = self.token(key.nonce, key.attempt)
        return SEEN + token[1:] if key.marked else token

    def room(self, room: str) -> Token:
        return self.rooms.setdefault(room, tokens.offer(real(room), ORIGIN))

    def token(self, nonce: str, attempt: Attempt) -> Token:
        return self.tokens.setdefault((nonce, attempt), tokens.mint(real(nonce), attempt, ORIGIN, state(nonce)))


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
    """The pair with plain names and places, and without the notes of others: many pairs differ in nothing else."""
    names: dict[str, str] = {}

    def name(old: str) -> str:
        kind = "r" if old[0] in "rwx" else old[0]
        return names.setdefault(old, f"{kind}{len(names) + 1}")

    given = command._asdict()
    given |= {field: name(given[field]) for field in ("claim", "room") if given.get(field)}
    if nonce := given.get("nonce"):
        given["nonce"] = f"?{name(nonce[1:])}" if nonce[0] == "?" else name(nonce)
    key = server.key
    places = {given.get("place"), given.get("next_place"), key and key.place, *(place for place, _ in server.line)}
    ranks = {place: rank for rank, place in enumerate(sorted(place for place in places if place is not None), 10)}
    given |= {field: ranks.get(given[field]) for field in ("place", "next_place") if field in given}
    if key:
        nonce = key.nonce[0] + name(key.room) if key.room else name(key.nonce)
        key = key._replace(nonce=nonce, place=ranks[key.place] if key.nonce[0] == "!" else 0)
    notes = server.notes & {getattr(command, "attempt", None), getattr(command, "note", None)}
    gone = frozenset(names[claim] for claim in server.gone & set(names))
    line = tuple(sorted((ranks[place], name(room)) for place, room in server.line))
    return Server(key, notes, gone, line), type(command)(**given)


def follow(keys: Keys, server: Server, command: Command) -> None:
    effect = apply(server, command)
    keys.set_up(server)
    reply = keys.run(command)
    value, notes, line, lease = keys.read()
    after = effect.server
    story = f"{command} on {server}"
    assert reply is effect.reply, story
    assert value == (keys.value(after.key) if after.key else None), story
    claims = {keys_of(KEY).gone(real(claim)) for claim in after.gone}
    assert notes == {note(attempt) for attempt in after.notes} | claims, story
    assert line == [(place, keys.room(room)) for place, room in after.line], story
    longest = longest_lease(server, effect)
    assert longest / 2 < lease <= longest or lease == longest == 0, story


def longest_lease(server: Server, effect: Effect) -> float:
    """How long the key may live at most after a command, in seconds."""
    key = effect.server.key
    if key is None:
        return 0.0
    is_offered_again = effect.reply in {Reply.FINISHED, Reply.RELEASED} and effect.server.line != server.line
    if key.room and (key != server.key or effect.reply is Reply.TAKEN or is_offered_again):
        return CALL if key.nonce[0] == "!" else OFFER
    return NEW_LEASE if effect.leased else OLD_LEASE
