"""Threads wait for a `Lock` in their rooms, while hints lie, connections are cut and keys are stolen.

Here rooms, listeners and keepers run in threads of their own. So the same steps may end otherwise the next time, and a
failure tells more by its message than by its steps.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from redis.exceptions import LockError

from celery_redislock import Lock, LockUnavailable
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import channel_of
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE
from tests.lab.renewals import held_by

from .clients import Stage
from .steps import CHOSEN, TIME_LIMIT
from .view import look, owner_of

NAME = "stock"
WHO = st.integers(0, 3)
LEASE = 10.0
TIME_OUT = 1.0


class User:
    """One who takes the lock, or waits for it in a thread."""

    def __init__(self, url: str, limit: int, *, renew: bool) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=TIME_OUT)
        self.lock = Lock(self.client, NAME, timeout=LEASE, thread_local=False, renew=renew, limit=limit)
        self.asked: Future[bool] | None = None

    @property
    def server(self) -> LockServer:
        return LockServer.behind(self.client)

    def holds(self) -> str | None:
        """Whose the key is if this one has it, as far as it knows."""
        if self.asked is None or not self.asked.done() or self.lock.state not in {"held", "at_risk"}:
            return None
        return owner_of(str(self.lock.token))

    def acquire(self, timeout: float) -> bool:
        try:
            return self.lock.acquire(blocking_timeout=timeout)
        except LockUnavailable:
            return False


class Waiters(RuleBasedStateMachine):
    """Each rule is something that a user, a stranger or the network does."""

    stage: ClassVar[Stage]

    @initialize(limit=st.sampled_from([1, 2]))
    def set_up(self, limit: int) -> None:
        self.stage.server.client.flushall()
        self.limit = limit
        self.users = [User(self.stage.proxy.url, limit, renew=number % 2 == 0) for number in range(4)]
        self.threads = ThreadPoolExecutor(len(self.users))
        self.stolen: set[str] = set()

    def teardown(self) -> None:
        """Whoever waits comes to an end."""
        for user in getattr(self, "users", ()):
            if user.asked:
                user.asked.result(20)
            user.server.stop()
            user.client.close()

    @rule(who=WHO, timeout=st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    def acquire(self, who: int, timeout: float) -> None:
        user = self.users[who]
        if user.asked is None or (user.asked.done() and user.lock.token is None):
            user.asked = self.threads.submit(user.acquire, timeout)

    @rule(who=WHO)
    def release(self, who: int) -> None:
        user = self.users[who]
        if user.asked is None or not user.asked.done() or user.lock.token is None:
            return
        was_stolen, deadline = owner_of(user.lock.token) in self.stolen, held_by(user.lock).deadline
        try:
            user.lock.release()
        except LockUnavailable:
            return
        except LockError:
            # A step may last longer than a lease, and half of the users renew nothing.
            assert was_stolen or time.monotonic() >= deadline, "told of a loss that nobody has caused"
        waiting = [one.asked for one in self.users if one.asked and not one.asked.done()]
        wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)  # so that often somebody is called

    @rule(who=WHO, what=st.sampled_from(["offer", "soon", "look"]))
    def lie(self, who: int, what: str) -> None:
        """A hint comes that nobody of ours has sent: a wake-up grants nothing."""
        room = self.users[who].server.room
        channel = channel_of(room.token.nonce)
        self.stage.server.client.publish(channel, f"{what} {self.users[who].lock.demand.line}")

    @rule(fault=st.sampled_from(["cut", "refused", "acquire", "release", "any"]))
    def strike(self, fault: str) -> None:
        """Connections are cut, or the next reply of a kind is lost."""
        scripts = {"acquire": ACQUIRE.sha, "release": RELEASE.sha, "any": ""}
        if fault in scripts:
            self.stage.proxy.drop_reply(where=scripts[fault].encode())
        else:
            with self.stage.struck_by(fault):
                pass

    @rule(how=st.sampled_from(["delete", "overwrite"]))
    def steal(self, how: str) -> None:
        client = self.stage.server.client
        old = client.getdel(NAME) if how == "delete" else client.set(NAME, "a-stranger", px=100, get=True)
        if old is not None:
            self.stolen.add(owner_of(old.decode()))

    @invariant()
    def holders_hold(self) -> None:
        believed = [user.holds() for user in self.users]
        there = look(self.stage.server.client, self.users[0].lock.key)
        holders = [one for one, user in zip(believed, self.users, strict=True) if one and user.holds() == one]
        honest = [one for one in holders if one not in self.stolen]
        owners = {kept.owner for kept in there.kept.values()}
        assert set(honest) <= owners, "one who takes itself for the holder has no key"
        assert len(honest) <= self.limit, "more hold the lock than may"


@pytest.fixture(autouse=True)
def on(stage: Stage) -> None:
    Waiters.stage = stage


Waiters.TestCase.settings = settings(CHOSEN, max_examples=CHOSEN.max_examples // 4)
TestWaiters = pytest.mark.timeout(TIME_LIMIT)(Waiters.TestCase)
