"""Clients take, renew, hand over and release a lock on a real server, while connections and keys are lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from celery_redislock.errors import LockLost
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Finished, Granted
from celery_redislock.protocol.scripts import Command
from celery_redislock.protocol.tokens import Attempt
from tests.lab.asking import acquire

from .clients import FAULTS, Client, Late, Message
from .machine import CLIENTS, KEY, Unanswered, Watched
from .steps import COMMANDS, PARTS, TIME_LIMIT, play
from .view import SLACK, Act, act, attempt_of, owner_of

WHO = st.integers(0, CLIENTS - 1)
SENT = {"fault": st.sampled_from(FAULTS), "twice": st.booleans()}
LEASES = st.sampled_from([10.0, 60.0])
RANKS = st.integers(1, 9)
#: Some of them end offers and calls, some leases, some everything.
SPANS = st.sampled_from([0.5, 1.1, 5.1, 9.5, 30.0, 61.0, 200.0])
#: By the last three nobody waits for the answer; each is followed by what befalls it.
LATE = {"late": "none", "late, reply lost": "reply lost", "late, command lost": "late command lost"}
ENDINGS = ["over", "not over", "cool down", "hand over", "hand over", *LATE]
THEFTS = [*["delete", "overwrite"] * 5, *["forever", "fence"] * 2, "restart"]
STRANGER = "5f3a-a-stranger"


class Locks(Watched):
    """See `Watched`; each rule is something that a client, a stranger, the network or time does."""

    def holder(self, number: int) -> Client | None:
        """A client that has a lock; where none has, one takes it first, if it can."""
        if not any(client.held for client in self.clients):
            self.acquire_by(self.clients[number], self.new_attempt(), 60.0)
        those = [client for client in self.clients if client.held is not None]
        return those[number % len(those)] if those else None

    @rule(who=WHO, lease=LEASES, copy=st.none() | WHO, of=st.none() | WHO, hint=st.none() | RANKS, **SENT)
    def acquire(
        self, who: int, lease: float, copy: int | None, of: int | None, hint: int | None, fault: str, twice: bool
    ) -> None:
        """Ask for the key: as a stranger, as one who was called, as a copy of another's message, or with a claim.

        A hint that is taken for a call, as a wake-up that nobody has sent, grants nothing that is kept for anybody.
        """
        client = self.without_a_lock(who)
        message = None if of is None else self.message(of)
        copied = None if copy is None else self.clients[copy].attempt
        if client:
            client.call = client.call or (client.call_at(hint) if hint else None)
            attempt = message.attempt if message else copied or self.new_attempt()
            self.acquire_by(client, attempt, lease, message, fault, twice=twice)

    def acquire_by(
        self,
        client: Client,
        attempt: Attempt,
        lease: float,
        message: Message | None = None,
        fault: str = "none",
        *,
        twice: bool = False,
    ) -> None:
        token, call, store, fence = client.mint(attempt), client.call, client.store, self.limit == 1
        note, mine = client.note.key, owner_of(token)
        owns = {mine} | ({owner_of(call.decode())} if call else set()) | ({message.owner} if message else set())

        def ask() -> object:
            claim = message.claim if message else None
            return acquire(store, self.demand, token, lease, note, fence=fence, call=call, claim=claim)

        has_note = self.stage.server.client.exists(note)  # it may be over by the end
        answer = self.do(client, Act(frozenset(owns), frozenset({mine})), fault, ask, twice=twice)
        if isinstance(answer, Finished):
            values = [kept.value for view in (self.before, self.view) for kept in view.kept.values()]
            is_cooling = any(value[0] == "=" and attempt_of(value) == str(attempt) for value in values)
            assert is_cooling or has_note or self.stage.server.client.exists(note), "finished, and nobody has said so"
        self.take(client, token, lease, answer)

    @rule(who=WHO, ttl=st.sampled_from([None, 5.0, 120.0]), **SENT)
    def extend(self, who: int, ttl: float | None, fault: str, twice: bool) -> None:
        client = self.holder(who)
        if client is None:
            return
        held = client.held
        assert held
        try:
            answer = self.do(client, act(client.owner), fault, lambda: held.extend(ttl), twice=twice)
        except LockLost:
            self.see(act(client.owner))  # the key may have ended on the way
            assert not held.was_lost or not self.view.kept_of(client.owner), "told that it lost a key which it has"
            client.held = None
            return
        kept = self.view.kept_of(client.owner)
        if not isinstance(answer, Unanswered):
            assert kept, "renewed what is not there"
            longest = (held.lease if ttl is None else ttl) * 1000
            assert kept.ends <= self.view.now + longest, "extended by more than was asked for"

    @rule(who=WHO, how=st.sampled_from(ENDINGS), **SENT)
    def release(self, who: int, how: str, fault: str, twice: bool) -> None:
        client = self.holder(who)
        if client is None:
            return
        token, store, owner = client.token, client.store, client.owner
        command, doing = commands.release(self.demand, token.owner, client.note), act(owner)
        if how == "cool down":
            command = commands.cool_down(self.demand, token, 20.0, client.note)
            doing = act(owner, makes="=" + owner[1:])
        elif how == "hand over":
            message = Message(client.attempt)
            self.messages.append(message)
            command = commands.hand_over(self.demand, token, message.token, 30.0, client.note)
            doing = act(owner, makes=message.owner)
        client.held = None
        if how in LATE:
            self.release_late(client, owner, command, LATE[how])
            return
        before = self.view.kept_of(owner)
        not_over = how == "not over"
        release = (lambda: store.release(self.demand, token)) if not_over else (lambda: store.send(command))
        answer = self.do(client, doing, fault, release, twice=twice)
        if not isinstance(answer, Unanswered):
            assert self.view.kept_of(owner) is None, "released, and still there"
            was_there = before is not None and before.ends > self.view.now
            assert answer or not was_there, "told that a key was lost which was there"
            assert before or not answer or client.connections.sends > 1, "told that a key was released which was lost"

    def release_late(self, client: Client, owner: str, command: Command, fault: str) -> None:
        """Nobody waits for the answer: it is read with the next one, or never comes."""
        late = Late()

        def send() -> None:
            client.store.send_late(command, late.replies.append, late.doubt)
            self.stage.struck.wait()  # the server has done it, or never hears of it
            if fault == "late command lost":
                self.stage.proxy.cut()  # else the next command would wait for a time-out

        answer = self.do(client, act(owner), fault, send)
        self.stage.commands += 1
        client.sent = command, act(owner)
        if not isinstance(answer, Unanswered):
            kept = self.before.kept_of(owner)
            late.expected = kept is not None
            may_have_ended = kept is not None and kept.ends <= self.view.now + SLACK
            late.is_ambiguous = may_have_ended or client.connections.sends > 1
            self.late.append(late)

    @rule(who=WHO, in_queue=st.booleans(), **SENT)
    def reserve(self, who: int, in_queue: bool, fault: str, twice: bool) -> None:
        """A publisher takes the key, or the place in the queue, for the message that it is about to send."""
        client = self.clients[who]
        demand = Demand(keys_of(KEY).queued if in_queue or self.limit > 1 else KEY)
        message = Message(self.new_attempt())
        doing = act(message.owner)
        answer = self.do(client, doing, fault, lambda: acquire(client.store, demand, message.token, 30.0), twice=twice)
        if isinstance(answer, Granted):
            assert self.view.kept[demand.key].owner == message.owner
            self.messages.append(message)

    @rule(who=WHO, of=WHO, to_come=st.booleans(), **SENT)
    def give_up(self, who: int, of: int, to_come: bool, fault: str, twice: bool) -> None:
        """A message will not run."""
        message, client = self.message(of), self.clients[who]
        if message is None:
            return
        call = lambda: client.store.give_up(self.demand, message.claim.nonce, is_to_come=to_come)  # noqa: E731
        self.do(client, act(message.owner), fault, call, twice=twice)
        self.messages.remove(message)

    @rule(who=WHO, rank=RANKS, later=st.none() | RANKS, **SENT)
    def stand(self, who: int, rank: int, later: int | None, fault: str, twice: bool) -> None:
        """A room stands in line. If its first waiter is called, that one is to acquire the key."""
        client = self.clients[who]
        call = client.call_at(rank)
        offer, called = owner_of(client.room), owner_of(call.decode())
        following = None if later is None else rank + later
        answer = self.do(
            client,
            Act(frozenset({offer, called}), frozenset({called})),
            fault,
            lambda: client.store.stand(self.demand, client.room, rank, following),
            twice=twice,
        )
        if answer is None:  # called
            assert self.view.kept_of(called) or self.before.kept_of(called), "called, and no key is kept"
            client.call = call

    @rule(who=WHO, rank=RANKS, how=st.sampled_from(["over", "late"]))
    def offer(self, who: int, rank: int, how: str) -> None:
        """Somebody waits, and then the holder releases."""
        if self.holder(who):
            self.stand(who, rank, None, "none", twice=False)
            self.release(who, how, "none", twice=False)

    @rule(who=WHO, **SENT)
    def leave(self, who: int, fault: str, twice: bool) -> None:
        client = self.clients[who]
        offer = owner_of(client.room)
        answer = self.do(client, act(offer), fault, lambda: client.store.leave(self.demand, client.room), twice=twice)
        if not isinstance(answer, Unanswered):
            assert self.view.kept_of(offer) is None
            assert offer not in self.view.line

    @rule(who=WHO)
    def come_late(self, who: int) -> None:
        """A copy of what a client has sent arrives now."""
        if sent := self.clients[who].sent:
            self.see(Act())
            self.stage.repeat(sent[0])
            self.see(sent[1])

    @rule(seconds=SPANS)
    def age(self, seconds: float) -> None:
        """Time passes."""
        self.see(Act())
        before = self.view
        self.stage.age(seconds)
        for client in self.clients:
            client.age(seconds)
        kept = {name: one._replace(ends=one.ends - seconds * 1000) for name, one in before.kept.items()}
        self.view = before._replace(kept=kept)
        self.see(Act())

    @rule(number=st.integers(1, 3), how=st.sampled_from(THEFTS), then_extends=st.booleans())
    def steal(self, number: int, how: str, then_extends: bool) -> None:
        """A stranger deletes or overwrites a key, as no client of ours does; or the server restarts empty."""
        name = keys_of(KEY).permit(1 + (number - 1) % self.limit)
        self.see(Act())
        gone = {"fence": set(), "restart": self.view.kept.keys()}.get(how, {name})
        stolen = [kept.owner for key, kept in self.view.kept.items() if key in gone]
        for client in self.clients:
            client.is_robbed = client.is_robbed or (client.held is not None and client.owner in stolen)
        match how:
            case "restart":
                self.stage.server.restart()
                for client in self.clients:
                    client.store.look(self.demand)  # its connection was cut: a late release would be lost in it
            case "fence":
                self.stage.server.client.delete(keys_of(KEY).fence)
            case "delete":
                self.stage.server.client.delete(name)
            case _:
                self.stage.server.client.set(name, STRANGER, px=20_000 if how == "overwrite" else 300_000)
        self.see(Act(frozenset(stolen), frozenset({STRANGER})))
        if then_extends:
            self.extend(number, None, "none", twice=False)


@pytest.mark.timeout(TIME_LIMIT)
@pytest.mark.parametrize("part", PARTS)
def test_clients_keep_the_promises_of_a_lock_in_random_steps(stage, part, record_property):
    Locks.stage = stage
    number = play(Locks, part)
    record_property(COMMANDS, (stage.commands, number))
