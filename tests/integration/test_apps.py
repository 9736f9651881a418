"""Several apps of one process, each with settings and a lock server of its own."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict, LockedTask, locked
from celery_redislock.testing import busy


@pytest.fixture
def apps(locks, broker_server):
    """The first skips duplicates, on the lock server; the second refuses them, on the broker's."""
    broker_server.client.flushall()
    made = []
    for name, url, policy, lease in (("one", locks.url(), "skip", 10.0), ("two", broker_server.url(), "raise", 20.0)):
        app = Celery(name, broker="memory://", set_as_current=False)
        app.conf.update(redislock_url=url, redislock_prefix=name, redislock_on_conflict=policy, redislock_lease=lease)
        made.append(app)
    yield made
    for app in made:
        app.close()


@pytest.fixture
def sync(apps):
    """The same task, as each of the apps has it."""

    def sync(self, account, inner=None):
        return inner() if inner else (self.lock.key, self.lock.lease)

    options = {"base": LockedTask, "bind": True, "name": "shop.sync", "lock_key": "{account}", "shared": False}
    return [app.task(**options)(sync) for app in apps]


def test_each_has_its_own_settings_on_its_own_server(sync, locks, broker_server):
    assert [task.apply((7,)).get() for task in sync] == [("one:{7}", 10.0), ("two:{7}", 20.0)]
    with sync[0].lock_for(7):
        assert (locks.client.keys(), broker_server.client.keys()) == ([b"one:{7}"], [])
    with locked("7", app=sync[1].app):
        assert (locks.client.keys(), broker_server.client.keys()) == ([], [b"two:{7}"])


def test_each_ends_its_duplicates_by_its_own_policy(sync):
    for task, error in zip(sync, (TaskRevokedError, LockConflict), strict=True):
        with busy(task.lock_for(7)), pytest.raises(error):
            task.apply((7,)).get()


def test_a_run_of_one_does_not_hold_the_key_of_the_other(sync, broker_server):
    def inner():
        assert broker_server.client.keys() == []
        return sync[1].apply((7,), {"inner": broker_server.client.keys}).get()

    assert sync[0].apply((7,), {"inner": inner}).get() == [b"two:{7}"]


def test_one_is_switched_off_and_the_other_is_not(sync):
    sync[1].app.conf.redislock_enabled = False
    with busy(sync[0].lock_for(7)), busy(sync[1].lock_for(7)):
        with pytest.raises(TaskRevokedError):
            sync[0].apply((7,)).get()
        assert sync[1].apply((7,), {"inner": lambda: sync[1].lock.state}).get() == "none"
