"""What the state machine of the locks is made of: how a command is sent and watched, and what holds after each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from celery_redislock.connection.connect import disconnect
from celery_redislock.errors import LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Granted
from celery_redislock.protocol.scripts import RELEASE
from celery_redislock.protocol.tokens import Attempt, Token

from .clients import Client, Late, Message, Stage
from .view import SLACK, Act, View, check_change, look, owner_of

KEY = "redislock:{shop.bill:7}"
CLIENTS = 4


class Unanswered:
    """Instead of an answer: the server may have done what it was asked, or not."""


class Watched(RuleBasedStateMachine):
    """Sends commands by the clients, and compares what an onlooker sees before and after each."""

    stage: ClassVar[Stage]

    @initialize(limit=st.sampled_from([1, 1, 2, 3]))
    def set_up(self, limit: int) -> None:
        self.stage.server.client.flushall()
        self.stage.server.client.script_flush()  # each beginning is the same
        self.stage.server.client.script_load(RELEASE.text)
        self.limit = limit
        self.demand = Demand(KEY, limit)
        self.clients = [Client(self.stage.proxy, self.demand) for _ in range(CLIENTS)]
        self.messages: list[Message] = []
        self.late: list[Late] = []
        self.attempts = 0
        self.fence = 0
        self.before = self.view = look(self.stage.server.client, KEY)

    def teardown(self) -> None:
        for client in getattr(self, "clients", ()):
            client.store.read_late(0.0, 0.0)
            disconnect(client.client)
        for late in getattr(self, "late", ()):
            late.check(at_the_end=True)

    def without_a_lock(self, number: int) -> Client | None:
        those = [client for client in self.clients if client.held is None]
        return those[number % len(those)] if those else None

    def message(self, number: int) -> Message | None:
        return self.messages[number % len(self.messages)] if self.messages else None

    def new_attempt(self) -> Attempt:
        self.attempts += 1
        return Attempt(f"a{self.attempts}", 0, 0)

    def see(self, act: Act) -> View:
        """Look at the server after an act, and return what was there before."""
        before, self.view = self.view, look(self.stage.server.client, KEY)
        check_change(before, self.view, act)
        return before

    def do(self, client: Client, act: Act, fault: str, call: Callable[[], Any], *, twice: bool = False) -> Any:
        """Let `client` send a command, see what becomes of it, and if `twice` let the server hear it once more."""
        self.see(Act())
        self.before = self.view
        client.connections.sends, client.connections.last = 0, None
        with self.stage.struck_by(fault):
            try:
                answer = call()
            except LockUnavailable:
                answer = Unanswered()
                client.store.outage_of(
                    KEY
                ).look_at = 0.0  # the next command looks at once whether the server is there again
        command = client.connections.last
        self.see(act)
        if fault in {"cut", "refused", "late command lost"}:
            for other in self.clients:
                if other is not client:
                    other.store.look(self.demand)  # its connection was cut, too: it notices by what changes nothing
        if command is not None:
            self.stage.commands += 1
            client.sent = command, act
        if twice and command is not None and not isinstance(answer, Unanswered):
            self.stage.repeat(command)
            before = self.see(act)
            if all(kept.ends > self.view.now + SLACK for kept in before.kept.values()):
                assert self.view.contents() == before.contents(), f"{command} was sent twice"
        return answer

    def take(self, client: Client, token: Token, lease: float, answer: Any) -> None:
        """Note what `client` was answered to an acquire of `token`."""
        client.call = None
        if not isinstance(answer, Granted):
            return
        held = HeldLock(client.store, Hold(self.demand, token), lease)
        held.granted(answer)
        client.held, client.is_robbed = held, False
        kept = self.view.kept.get(held.permit)
        assert kept is not None, "granted, and the key is free"
        assert kept.owner == owner_of(token), "granted, and the key is another's"
        if self.limit == 1:
            assert answer.fence is not None, "a grant without a fence"
            assert answer.fence > self.fence, "a fence that is not greater than the one before"
            self.fence = answer.fence

    @invariant()
    def holders_hold(self) -> None:
        """Who takes itself for the holder is the holder; so whoever has lost the key by expiry knows."""
        self.see(Act())
        seen = time.monotonic()
        believers = [client for client in self.clients if client.believes]  # after the look: time passes meanwhile
        for client in believers:
            assert client.held
            kept = self.view.kept.get(client.held.permit)
            assert kept is not None, "one who takes itself for the holder has no key"
            assert kept.owner == client.owner, "one who takes itself for the holder has another's key"
            left = (kept.ends - self.view.now) / 1000
            assert client.held.deadline <= seen + left + SLACK / 1000, "its own deadline is later than the key's end"
        assert len({client.held.permit for client in believers if client.held}) == len(believers), "two have one permit"
        assert len(believers) <= self.limit, "more hold the lock than may"

    @invariant()
    def late_answers_are_told_to_who_has_asked(self) -> None:
        for late in self.late:
            late.check(at_the_end=False)

    @invariant()
    def who_is_past_its_deadline_knows(self) -> None:
        for client in self.clients:
            if client.held and client.held.deadline <= time.monotonic():
                assert client.held.state == "lost"
                assert client.held.remaining == 0
