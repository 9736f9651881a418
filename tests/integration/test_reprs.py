"""What a debugger, a log line and a failed assertion show of an object: its class, its key, its state; no secret."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

import celery_redislock
from celery_redislock import (
    Also,
    Lock,
    LockConfigError,
    LockConflict,
    LockedResult,
    LockedTask,
    LockInfo,
    LockKeyError,
    LockLost,
    LockReplaced,
    LockUnavailable,
    RedisLockError,
    locked,
    locked_task,
    signals,
)
from celery_redislock.app import source_of
from celery_redislock.lock.no_lock import NoLock
from celery_redislock.options import resolve_options, resolve_settings
from celery_redislock.testing import busy

SECRET = "hunter2hunter2"  # noqa: S105
URL = f"redis://:{SECRET}@localhost:6379/0"
KEY = "redislock:{stock:7}"

#: By name: what makes the object of a task, of its held lock and of a client.
OBJECTS = {
    "Also": lambda *_: Also("farm", limit=20),
    "Lock": lambda task, held, client: Lock(client, KEY, 10),
    "LockConfigError": lambda *_: LockConfigError("shop.reserve: lock_lease = 0 is not allowed"),
    "LockConflict": lambda *_: LockConflict(KEY, LockInfo(KEY, "id", "shop.reserve", "host", None, 9.5)),
    "LockInfo": lambda task, *_: task.lock_info(7),
    "LockKeyError": lambda *_: LockKeyError("shop.reserve: parameter 'sku' cannot be part of a lock key"),
    "LockLost": lambda *_: LockLost(KEY),
    "LockReplaced": lambda *_: LockReplaced(KEY, "id"),
    "LockUnavailable": lambda *_: LockUnavailable(KEY),
    "Locked": lambda *_: locked("stock:7"),
    "LockedResult": lambda *_: LockedResult("id"),
    "LockedTask": lambda *_: LockedTask,
    "RedisLockError": lambda *_: RedisLockError("why"),
    "locked": lambda *_: locked("stock:{sku}", values={"sku": SECRET}),
    "locked_task": lambda *_: locked_task,
    "locked for a function": lambda *_: locked(),
    "lock_for": lambda task, *_: task.lock_for(7, SECRET),
    "self.lock": lambda task, held, _: held,
    "its token": lambda task, held, _: held.token,
    "NoLock": lambda *_: NoLock(KEY),
    "a task": lambda task, *_: task,
    "busy": lambda task, *_: busy(task.lock_for(7)),
    "the options of a task": lambda task, *_: task.lock_plan.options,
    "options by default": lambda *_: resolve_options("shop.reserve", {}, {}),
    "the settings of an app": lambda *_: resolve_settings({"url": URL, "client_options": {"password": SECRET}}),
    "the source of a lock server": lambda task, *_: source_of(task.app.conf),
    **{name: lambda *_, name=name: getattr(signals, name) for name in signals.__all__},
}


@pytest.fixture
def reserve(app):
    @app.task(base=LockedTask, bind=True, name="shop.reserve", shared=False, lock_key="stock:{sku}")
    def reserve(self, sku, quantity=0, use=None):
        return use and use(self.lock)

    return reserve


def test_the_public_names_are_among_these():
    assert {*celery_redislock.__all__, *signals.__all__} <= set(OBJECTS)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_shown_shortly_and_without_secrets(reserve, client, name):
    def use(held):
        return repr(OBJECTS[name](reserve, held, client)), held.token.nonce

    shown, nonce = reserve.apply((7, SECRET, use)).get()
    assert not re.search(r"object at 0x", shown)
    assert len(shown) < 400
    assert SECRET not in shown
    assert nonce not in shown


def test_a_lock_shows_whether_it_is_held(reserve, client, locks):
    lock = reserve.lock_for(7)
    assert repr(lock) == f"<Lock {KEY} not held>"
    with lock:
        assert repr(lock) == f"<Lock {KEY} held>"
        locks.client.delete(KEY)
        with pytest.raises(LockLost):
            lock.extend()
        assert repr(lock) == f"<Lock {KEY} lost>"
        locks.client.flushall()
        lock.raise_on_release_error = False
    assert repr(lock) == f"<Lock {KEY} not held>"
    assert repr(Lock(client, b"any\nname", 10)) == r"<Lock any\nname not held>"


def test_a_lock_in_a_block_and_in_a_run_shows_whose_it_is(app, reserve):
    assert repr(locked("stock:7", app=app)) == "<locked 'stock:7'>"
    assert repr(busy(reserve.lock_for(7))) == f"<busy <Lock {KEY} not held>>"
    with busy(reserve.lock_for(7)) as held:
        assert repr(held).startswith("<Lock ")
    assert reserve.apply((7, 1, repr)).get() == f"<HeldLock {KEY} held>"
    assert re.fullmatch(r"<Token held [\w-]+/0/0>", reserve.apply((7, 1, lambda lock: repr(lock.token))).get())
    app.conf.redislock_enabled = False
    with ExitStack() as stack:
        assert repr(stack.enter_context(reserve.lock_for(7))) == "<NoLock>"
