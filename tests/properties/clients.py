"""Clients of the lock server behind the proxy: stores and held locks of the package, with what they sent last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_redislock.connection.connect import connect
from celery_redislock.connection.connections import Connections
from celery_redislock.connection.outage import Outage
from celery_redislock.connection.store import LockStore
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import RELEASE, Claim, Command, Note, Reply
from celery_redislock.protocol.tokens import RESERVED, Attempt, Token
from tests.lab.proxy import Fault, Proxy
from tests.lab.servers import Valkey

from .impatient import impatient
from .view import Act, owner_of

ORIGIN = tokens.origin("w@host", "shop.bill")
#: A connection that is opened sends other commands first.
EVALSHA = b"EVALSHA"
#: Longer than a busy machine takes for any command: else a command could arrive after its step. Where nothing can come
#: any more the clients do not wait for it.
TIME_OUT = 60.0
#: What befalls a command.
FAULTS = [*["none"] * 8, *["reply lost"] * 4, *["replies lost", "cut", "refused"] * 2, "silent", "command lost"]


class Recorded(Connections):
    """Connections that remember the command that was sent last."""

    last: Command | None = None
    sends = 0
    """How often it has sent a command since this was set to 0. What was sent twice has an ambiguous answer."""

    def ask(self, command: Command, *, asking: bool = False) -> Reply:
        self.last = command
        self.sends += 1
        return super().ask(command, asking=asking)


class Message:
    """A message for which the key, or the place in the queue, is reserved."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.token = tokens.mint(tokens.mint_nonce(), self.attempt, ORIGIN, RESERVED)
        self.claim = Claim(self.token.nonce, 30.0)
        self.owner = owner_of(self.token)


class Late:
    """A release whose answer is read later."""

    def __init__(self) -> None:
        self.expected = self.is_ambiguous = False
        self.replies: list[Any] = []
        self.doubts = 0

    def doubt(self) -> None:
        self.doubts += 1

    def check(self, *, at_the_end: bool) -> None:
        verdicts = len(self.replies) + self.doubts
        assert verdicts <= 1, "one release has two verdicts"
        assert verdicts or not at_the_end, "a release has no verdict"
        if self.replies and not self.is_ambiguous:
            assert bool(self.replies[0]) is self.expected, "a release was told the answer to another"


class Client:
    """One who takes the lock and waits for it, with a store and at most one held lock."""

    def __init__(self, proxy: Proxy, demand: Demand) -> None:
        self.demand = demand
        time_outs = {"socket_timeout": TIME_OUT, "socket_connect_timeout": TIME_OUT}
        self.client = connect(proxy.url, {**time_outs, "connection_class": impatient(proxy)})
        self.connections, outage = Recorded(self.client), Outage()
        self.store = LockStore(self.connections, lambda _: outage)
        self.store.known.add(RELEASE)  # else the first release that is sent late would wait for its answer
        self.room = tokens.of_room(tokens.mint_nonce(), "host")
        self.held: HeldLock | None = None
        self.is_robbed = False
        """Somebody has deleted or overwritten the key behind everybody's back, and the holder cannot know it yet."""
        self.attempt: Attempt | None = None
        self.call: bytes | None = None
        self.sent: tuple[Command, Act] | None = None
        """What it sent last, and whose keys that may touch."""

    @property
    def owner(self) -> str:
        return owner_of(self.token)

    @property
    def token(self) -> Token:
        assert self.held
        return self.held.token

    @property
    def believes(self) -> bool:
        """Whether it takes itself for the holder, and nobody has robbed it."""
        return self.held is not None and self.held.remaining > 0 and not self.is_robbed

    @property
    def note(self) -> Note:
        return Note(keys_of(self.demand.key).note(self.attempt))

    def mint(self, attempt: Attempt) -> Token:
        self.attempt = attempt
        return tokens.mint(tokens.mint_nonce(), attempt, ORIGIN)

    def call_at(self, rank: int) -> bytes:
        return tokens.call(tokens.for_capacity(self.room, self.demand.capacity), rank).value

    def age(self, seconds: float) -> None:
        """Let all that it waits for come nearer by so many seconds."""
        self.store.outage_of(self.demand.key).look_at -= seconds
        if self.held is not None:
            self.held.deadline -= seconds
            self.held.renew_at -= seconds


#: Lets all keys of the server come nearer to their end by so many milliseconds.
AGE = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left >= 0 then
    redis.call('PEXPIRE', key, left - ARGV[1])
  end
end
"""


class Stage:
    """The server, the proxy before it, and what they do to the clients."""

    def __init__(self, server: Valkey, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.struck: Fault
        """What befalls the present command, where it befalls one command alone."""
        self.commands = 0
        """How many commands the clients have sent to the proxy, but for those that are sent once more."""

    def age(self, seconds: float) -> None:
        """Let so much time pass for the server, without waiting for it."""
        self.server.client.eval(AGE, 0, int(seconds * 1000))

    @contextmanager
    def struck_by(self, fault: str) -> Iterator[None]:
        match fault:
            case "none":
                self.struck = self.proxy.delay(0, EVALSHA)
            case "reply lost":
                self.struck = self.proxy.drop_reply(EVALSHA)
            case "replies lost":  # also that of the release by which the store would undo an acquire
                for nth in (1, 2, 3):
                    self.proxy.drop_reply(EVALSHA, nth=nth)
            case "cut":
                self.proxy.cut()
            case "refused":
                self.proxy.refuse()
            case "silent":
                self.struck = self.proxy.drop_reply(EVALSHA, hang=True)
            case "command lost" | "late command lost":
                self.struck = self.proxy.drop_command(EVALSHA)
        try:
            yield
        finally:
            self.proxy.mend()

    def repeat(self, command: Command) -> Any:
        """Let the server hear `command` once more."""
        return self.server.client.eval(command.script.text, len(command.keys), *command.keys, *command.values)
