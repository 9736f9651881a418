"""The Lua scripts do what the model says, for every command on every state of a key that an exploration has met.

Each such pair is set up on a real server and run through `LockStore`. The reply, the key, its mark, its lease and the
notes must be the model's. So the model and the code cannot drift apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from celery_redislock.server import tokens
from celery_redislock.server.answers import Claim as ClaimOfMessage
from celery_redislock.server.answers import Conflict, Finished, Note
from celery_redislock.server.connect import connect
from celery_redislock.server.names import keys_of
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import RESERVED, RUNS, SEEN, Attempt, Token, known_by
from tests.lab.servers import Valkey

from .commands import Acquire, Claim, Command, GiveUp, HandOver, Key, Release, Renew, Reply, Server, apply

#: The exploration takes ten seconds of a CPU of its own, which a loaded machine does not have.
pytestmark = pytest.mark.timeout(900)

KEY = "redislock:{shop.bill:7}"
ORIGIN = tokens.origin("w@host", "shop.bill")
#: The time to live that a key is set up with, and the one that a command gives it, in seconds: the time that is left
#: tells which one a key has.
OLD_LEASE, NEW_LEASE = 50.0, 100.0


@pytest.fixture(scope="module")
def asked(explorations) -> set[tuple[Server, Command]]:
    """Every command that any exploration asked Redis, with the state that Redis was in."""
    return {pair for found in explorations.values() for pair in found.asked}


@pytest.fixture(scope="module")
def pairs(asked) -> list[tuple[Server, Command]]:
    return sorted(asked, key=repr)


@pytest.fixture
def keys(locks: Valkey) -> Iterator[Keys]:
    client = connect(locks.url(), {})
    yield Keys(client)
    client.close()


class Keys:
    """Puts the states of the model onto a real server, and reads them back."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.store = LockStore(client)
        self.tokens: dict[tuple[str, Attempt], Token] = {}

    def set_up(self, server: Server) -> None:
        self.client.flushdb()
        if server.key:
            self.client.set(KEY, self.value(server.key), px=int(OLD_LEASE * 1000))
        for attempt in server.notes:
            self.client.set(note(attempt), "", ex=60)
        for claim in server.gone:
            self.client.set(keys_of(KEY).gone(real(claim)), "", ex=60)

    def run(self, command: Command) -> Reply:
        match command:
            case Acquire(nonce, attempt, reads_note) | Claim(nonce, attempt, reads_note):
                token, read = self.token(nonce, attempt), note(attempt) if reads_note else None
                if isinstance(command, Claim):
                    claim = ClaimOfMessage(real(command.claim), NEW_LEASE)
                    answer = self.store.claim(KEY, token, NEW_LEASE, claim, read)
                else:
                    answer = self.store.acquire(KEY, token, NEW_LEASE, read)
                if isinstance(answer, Conflict):
                    return Reply.HELD
                return Reply.FINISHED if isinstance(answer, Finished) else Reply.GRANTED
            case Release(nonce, over, unseen_copy):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                released = self.store.release(KEY, owner(nonce), left)
                return Reply.RELEASED if released else Reply.NOT_MINE
            case HandOver(nonce, over, unseen_copy, claim, attempt):
                left = Note(note(over), in_any_case=unseen_copy) if over else None
                released = self.store.hand_over(KEY, owner(nonce), self.token(claim, attempt), NEW_LEASE, left)
                taken = Reply.HANDED_OVER if self.client.exists(KEY) else Reply.RELEASED
                return taken if released else Reply.NOT_MINE
            case GiveUp(claim, is_to_come):
                given_up = self.store.give_up(KEY, real(claim), is_to_come=is_to_come)
                return Reply.GIVEN_UP if given_up else Reply.NOT_MINE
            case Renew(nonce):
                return Reply.RENEWED if self.store.renew([(KEY, owner(nonce), NEW_LEASE)]) == [True] else Reply.NOT_MINE

    def read(self) -> tuple[str | None, set[str], bool]:
        """The key's value, the notes, and whether the key has a new lease. All of them must have a time to live."""
        value = self.client.get(KEY)
        names = {name.decode() for name in self.client.scan_iter()}
        left = {name: self.client.pttl(name) for name in names}
        assert all(milliseconds > 0 for milliseconds in left.values()), left
        if value is None:
            return None, names, False
        lease = left[KEY] / 1000
        assert OLD_LEASE - 10 < lease <= OLD_LEASE or NEW_LEASE - 10 < lease <= NEW_LEASE, lease
        return value.decode(), names - {KEY}, lease > OLD_LEASE

    def value(self, key: Key) -> str:
        token = self.token(key.nonce, key.attempt)
        return SEEN + token[1:] if key.marked else token

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


def test_every_command_answers_and_leaves_what_the_model_says(pairs, keys):
    for server, command in pairs:
        effect = apply(server, command)
        keys.set_up(server)
        reply = keys.run(command)
        value, notes, leased = keys.read()
        after = effect.server
        story = f"{command} on {server}"
        assert reply is effect.reply, story
        assert value == (keys.value(after.key) if after.key else None), story
        claims = {keys_of(KEY).gone(real(claim)) for claim in after.gone}
        assert notes == {note(attempt) for attempt in after.notes} | claims, story
        assert leased is effect.leased, story


def test_the_pairs_are_many_and_every_script_and_reply_is_among_them(pairs):
    assert len(pairs) > 400
    commands = Counter(type(command) for _, command in pairs)
    replies = Counter((type(command), apply(server, command).reply) for server, command in pairs)
    assert all(commands[kind] > 20 for kind in (Acquire, Claim, HandOver, Release, Renew)), commands
    assert commands[GiveUp] > 5
    assert set(replies) == {
        (Acquire, Reply.GRANTED),
        (Acquire, Reply.HELD),
        (Acquire, Reply.FINISHED),
        (Claim, Reply.GRANTED),
        (Claim, Reply.HELD),
        (Claim, Reply.FINISHED),
        (HandOver, Reply.HANDED_OVER),
        (HandOver, Reply.RELEASED),
        (GiveUp, Reply.GIVEN_UP),
        (GiveUp, Reply.NOT_MINE),
        (HandOver, Reply.NOT_MINE),
        (Release, Reply.RELEASED),
        (Release, Reply.NOT_MINE),
        (Renew, Reply.RENEWED),
        (Renew, Reply.NOT_MINE),
    }
