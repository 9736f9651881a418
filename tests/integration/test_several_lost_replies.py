"""A run asks for several keys at once; the reply and the first undo are lost, and the undo is sent again later."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from celery import states

from celery_redislock import LockedTask
from celery_redislock.app import server_of
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE
from tests.lab.servers import wait_until

A, B = "redislock:{a}", "redislock:{b}"


def test_the_late_undo_frees_nothing_that_the_run_was_granted_since(app, lock_proxy, locks, deliver, monkeypatch):
    """The clock that tokens tell stands still, as in a test that freezes it; on a fast network, for a millisecond."""
    for script in (ACQUIRE, RELEASE):
        locks.client.script_load(script.text)
    server_of(app).store.look(Demand(A))  # it has answered once
    undo_of_a = RELEASE.sha.encode() + b"\r\n$1\r\n2\r\n$%d\r\n%s\r\n" % (len(A), A.encode())
    lock_proxy.drop_reply(to=b"EVALSHA", where=ACQUIRE.sha.encode(), nth=2)
    first = lock_proxy.drop_reply(to=b"EVALSHA", where=undo_of_a, nth=1)
    later = lock_proxy.hold(to=b"EVALSHA", where=undo_of_a, nth=2, before=True)
    looks = itertools.count(1)
    monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: 1.7e9 if next(looks) < 1000 else None))

    @app.task(base=LockedTask, shared=False, ignore_result=True, lock_key=["a", "b"], lock_lease=600)
    def both():
        later.wait()
        assert first.struck
        assert locks.client.exists(A)
        before = locks.client.info("commandstats")["cmdstat_evalsha"]["calls"]
        later.let_go()
        wait_until(lambda: locks.client.info("commandstats")["cmdstat_evalsha"]["calls"] > before, "the undo arrives")
        return locks.client.exists(A)

    assert deliver(app, both.name) == (states.SUCCESS, 1)


def test_a_key_that_it_was_granted_while_another_was_refused_is_taken_back_later_if_the_undo_is_lost(
    app, lock_proxy, locks, deliver
):
    for script in (ACQUIRE, RELEASE):
        locks.client.script_load(script.text)
    server_of(app).store.look(Demand(B))  # it has answered once
    locks.client.rpush(A, "a list")
    undo = lock_proxy.drop_command(
        b"EVALSHA", RELEASE.sha.encode() + b"\r\n$1\r\n2\r\n$%d\r\n%s\r\n" % (len(B), B.encode())
    )

    @app.task(
        base=LockedTask, shared=False, ignore_result=True, lock_key=["a", "b"], lock_lease=600, lock_on_outage="raise"
    )
    def both(): ...

    assert deliver(app, both.name)[0] == states.FAILURE
    assert undo.struck
    wait_until(lambda: not locks.client.exists(B), "the key is free")


def test_what_it_was_granted_is_taken_back_later_also_if_all_that_was_answered_before_was_a_refusal(
    app, lock_proxy, locks, deliver
):
    for script in (ACQUIRE, RELEASE):
        locks.client.script_load(script.text)

    @app.task(
        base=LockedTask,
        shared=False,
        ignore_result=True,
        lock_key=["a", "b"],
        lock_lease=600,
        lock_on_conflict="raise",
        lock_on_outage="raise",
    )
    def both(): ...

    for key in (A, B):
        locks.client.set(key, "another's")
    assert deliver(app, both.name)[0] == states.FAILURE
    locks.client.delete(A, B)
    lost = lock_proxy.drop_reply(to=b"EVALSHA", where=ACQUIRE.sha.encode(), hang=True)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(deliver, app, both.name)
        lost.wait()
        lock_proxy.refuse()
        assert second.result()[0] == states.FAILURE
    assert locks.client.exists(A, B)
    lock_proxy.mend()
    wait_until(lambda: not locks.client.exists(A, B), "the keys are free")
