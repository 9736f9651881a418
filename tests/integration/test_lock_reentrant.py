"""Code that takes a key which its context or its request holds, holds it already."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context

import pytest
import redis
from celery import Task
from pydantic import BaseModel, Field
from redis.exceptions import LockError

from celery_redislock import Lock, LockConflict, LockedTask, LockLost, locked
from celery_redislock.testing import busy
from tests.lab.app import make_app

NAME = "stock"


class Order(BaseModel):
    """An argument that is sent under another name than it has here."""

    sku: int = Field(alias="SKU")


@pytest.fixture
def make(locks):
    """Makes reentrant locks that do not wait."""
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield lambda name=NAME, **options: Lock(
            client, name, **{"timeout": 10, "blocking": False, "reentrant": True, **options}
        )


@pytest.fixture
def client(locks):
    return locks.client


class TestContext:
    def test_the_last_one_out_releases(self, make, client):
        with make() as outer:
            with make() as inner:
                assert inner.token == outer.token
                assert inner.owned()
            assert outer.owned()
            outer.check()
        assert client.keys() == []

    def test_one_object_may_be_taken_again_and_again(self, make, client):
        lock = make()
        with lock, lock:
            with lock:
                pass
            assert lock.owned()
        assert client.keys() == []
        with pytest.raises(LockError):
            lock.release()

    def test_the_outer_one_may_leave_first(self, make, client):
        outer, inner = make(), make()
        outer.acquire()
        inner.acquire()
        outer.release()
        assert inner.owned()
        inner.release()
        assert client.keys() == []

    def test_entering_again_asks_nobody(self, make, locks):
        with make():
            locks.calls()
            with make():
                pass
            assert locks.calls() == {}

    def test_who_did_not_ask_for_it_is_refused(self, make):
        with make(), pytest.raises(LockConflict):
            make(reentrant=False).__enter__()

    def test_a_lock_that_was_not_taken_cannot_be_released_although_its_context_holds_the_key(self, make):
        with make() as lock:
            with pytest.raises(LockError):
                make().release()
            lock.check()

    def test_a_lost_lock_is_not_held_already(self, make, client):
        outer = make(timeout=0.2)
        outer.acquire()
        client.set(NAME, "thief")
        outer.timeout = 10
        with pytest.raises(LockLost):
            outer.extend()
        assert not make().acquire()
        client.delete(NAME)
        with make() as inner:
            assert inner.token != outer.token
            with pytest.raises(LockLost):
                outer.release()
            assert inner.owned()

    @pytest.mark.parametrize("extend", [lambda lock: lock.extend(), lambda lock: lock.extend(5), Lock.reacquire])
    def test_a_lock_without_a_timeout_has_none_inside_either(self, make, client, extend):
        with make(timeout=None) as outer:
            with make(timeout=10) as inner, pytest.raises(LockError, match="a lock with no timeout"):
                extend(inner)
            outer.check()
            assert client.pttl(NAME) == -1

    @pytest.mark.parametrize("timeout", [None, 1])
    def test_the_inner_object_extends_the_lock_as_it_was_acquired(self, make, client, timeout):
        with make(timeout=60) as outer, make(timeout=timeout) as inner:
            assert inner.extend()
            assert outer.remaining > 50
            assert client.pttl(NAME) > 50_000

    def test_another_key_is_another_lock(self, make, client):
        with make(), make("other"):
            assert len(client.keys()) == 2
        assert client.keys() == []

    def test_locks_of_another_server_are_other_locks(self, make, locks):
        with redis.Redis(unix_socket_path=str(locks.socket), db=1) as other, make():
            assert Lock(other, NAME, reentrant=True).acquire()
            other.flushdb()

    def test_a_hold_that_ended_is_not_found_by_a_later_block(self, make, locks):
        with make():
            pass
        with busy(make()):
            assert not make().acquire()


class TestOwners:
    """Never by thread alone, and never by a context alone: it is copied for others."""

    def test_another_thread_is_refused(self, make):
        with make(), ThreadPoolExecutor() as pool:
            assert not pool.submit(make().acquire).result()

    def test_a_thread_with_a_copy_of_the_context_is_refused(self, make):
        with make(), ThreadPoolExecutor() as pool:
            assert not pool.submit(copy_context().run, make().acquire).result()

    def test_a_call_in_a_copy_of_the_context_holds_it_already(self, make):
        """In the same thread, and inside the block: as asgiref's sync_to_async does it."""
        with make():
            lock = make()
            assert copy_context().run(lock.acquire)
            lock.release()

    def test_another_context_of_the_thread_is_refused(self, make):
        with make():
            assert not Context().run(make().acquire)

    def test_two_coroutines_exclude_each_other(self, make):
        entered = []

        async def work(number):
            lock = make()
            while not lock.acquire():
                await asyncio.sleep(0)
            entered.append(number)
            await asyncio.sleep(0.01)
            assert entered[-1] == number
            with make():  # each holds its own already
                entered.append(number)
            lock.release()

        async def both():
            await asyncio.gather(work(1), work(2))

        asyncio.run(both())
        assert entered == [1, 1, 2, 2]

    def test_a_coroutine_that_was_started_inside_the_block_is_refused(self, make):
        """Its context is a copy of the holder's, but it runs beside it."""

        async def holder():
            with make():
                return await asyncio.gather(*[asyncio.to_thread(make().acquire), asyncio.create_task(child())])

        async def child():
            return make().acquire()

        assert asyncio.run(holder()) == [False, False]

    def test_one_object_in_two_coroutines_belongs_to_who_took_it(self, make, client):
        lock = make()

        async def take():
            return lock.acquire()

        async def give():
            with pytest.raises(LockError):
                lock.release()

        async def both():
            assert await asyncio.create_task(take())
            assert not await asyncio.create_task(take())
            await asyncio.create_task(give())

        asyncio.run(both())
        assert client.exists(NAME)


class TestRequest:
    """What runs in a task's run holds the task's key."""

    @pytest.fixture
    def app(self, config):
        return make_app(config)

    def test_lock_for_inside_the_task(self, app, locks):
        @app.task(bind=True, base=LockedTask, shared=False)
        def task(self):
            locks.calls()
            with self.lock_for() as lock, self.lock_for() as again:
                seen = (lock.token, again.token, self.lock.token, lock.owned(), lock.state)
            self.lock.check()
            assert self.lock_info() is not None
            return seen

        one, two, own, owned, state = task.apply().get()
        assert one == two == own
        assert owned
        assert state == "held"
        assert locks.client.keys() == []

    def test_one_object_may_be_entered_again_and_again(self, app, locks):
        guard = locked("twice", app=app)

        @app.task(bind=True, base=LockedTask, lock_key="twice", shared=False)
        def task(self):
            lock = self.lock_for()
            with guard, guard, lock, lock:
                inside = (lock.token, self.lock.state)
            self.lock.check()
            return inside == (self.lock.token, "held") and not lock.token

        assert task.apply().get() is True
        assert locks.client.keys() == []

    def test_coroutines_of_a_run_may_share_one_object(self, app):
        guard = locked("shared", app=app)

        @app.task(bind=True, base=LockedTask, lock_key="shared", shared=False)
        def task(self):
            return in_two_coroutines(lambda: guard)

        assert task.apply().get() == [True, True]

    def test_it_extends_the_tasks_lock(self, app, locks):
        @app.task(bind=True, base=LockedTask, shared=False)
        def task(self):
            with self.lock_for() as lock:
                lock.extend(60)
            return locks.client.pttl(lock.name) / 1000, self.lock.remaining

        ttl, remaining = task.apply().get()
        assert 85 < remaining < ttl <= 90

    def test_a_task_that_it_applies_with_the_same_key(self, app, locks):
        @app.task(bind=True, base=LockedTask, lock_args=["key"], shared=False)
        def task(self, key, depth):
            inner = task.apply((key, depth - 1)).get(disable_sync_subtasks=False) if depth else []
            self.lock.check()
            assert locks.client.exists(self.lock.key)
            return [*inner, self.lock.token]

        tokens = task.apply(("k", 2)).get()
        assert len(tokens) == 3
        assert len(set(tokens)) == 1
        assert locks.client.keys() == []

    def test_a_task_that_shares_its_key_by_a_template(self, app, locks):
        keyed = app.tasks["lab.keyed"]

        @app.task(base=LockedTask, lock_key="stock:{sku}", shared=False)
        def task(sku):
            return keyed.apply((sku, "item")).get(disable_sync_subtasks=False)

        assert task.apply((7,)).get() == "item"
        assert locks.client.keys() == []

    def test_a_task_that_is_applied_inside_a_block(self, tasks, locks):
        with tasks.work.lock_for("k") as lock:
            assert tasks.work.apply(("k", "item")).get() == "item"
            lock.check()
            assert lock.owned()
        assert locks.client.keys() == []

    @pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="before Celery 5.7 callers dump models")
    def test_a_task_that_is_applied_to_a_model_inside_a_block(self, app, locks):
        @app.task(
            base=LockedTask, pydantic=True, pydantic_dump_kwargs={"by_alias": True}, lock_block_for=0.1, shared=False
        )
        def task(order: Order):
            return [key.decode() for key in locks.client.scan_iter()]

        with task.lock_for(Order(SKU=7)) as lock:
            assert task.apply((Order(SKU=7),)).get() == [lock.name]

    def test_the_tasks_lock_is_not_held_by_a_thread_that_it_starts(self, app):
        @app.task(bind=True, base=LockedTask, shared=False)
        def task(self):
            with ThreadPoolExecutor() as pool:
                return pool.submit(self.lock_for().acquire, blocking=False).result()

        assert task.apply().get() is False

    def test_coroutines_of_a_run_hold_what_their_run_holds(self, app):
        @app.task(bind=True, base=LockedTask, shared=False)
        def task(self):
            return in_two_coroutines(self.lock_for)

        assert task.apply().get() == [True, True]

    def test_a_lost_lock_is_not_held_already(self, app, locks):
        @app.task(bind=True, base=LockedTask, shared=False)
        def task(self):
            locks.client.set(self.lock.key, "thief")
            with pytest.raises(LockLost):
                self.lock.extend()
            return self.lock_for().acquire(blocking=False)

        assert task.apply().get() is False

    def test_a_lock_that_was_made_before_a_fork_is_one_of_the_childs_own(self, app, locks):
        """Made when its module was imported, in a prefork worker's main process; used in a run, in a child."""

        @app.task(bind=True, base=LockedTask, shared=False, lock_block_for=0.1)
        def task(self):
            with made, self.lock_for() as again:
                return made.token == again.token == self.lock.token

        made = task.lock_for()
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.write(write, str(task.apply().get()).encode())
            except LockConflict as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.wait()
        assert os.read(read, 1000) == b"True"
        os.close(read)
        os.close(write)
        assert locks.client.keys() == []

    def test_after_its_end_nothing_of_a_run_is_held(self, tasks, locks):
        tasks.work.apply(("k",)).get()
        with busy(tasks.work.lock_for("k")):
            assert not tasks.work.lock_for("k").acquire(blocking=False)


def test_threads_that_share_an_object_each_have_their_own_turn(make):
    lock = make(blocking=True, blocking_timeout=20)
    inside = threading.Semaphore(1)

    def work():
        for _ in range(10):
            with lock, lock:
                assert inside.acquire(blocking=False)
                inside.release()

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work) for _ in range(6)]:
            done.result()


def in_two_coroutines(lock):
    """Enter what `lock` returns in each of them, while the other has it."""

    async def part():
        with lock():
            await asyncio.sleep(0)
            return True

    async def parts():
        return await asyncio.gather(part(), part())

    return asyncio.run(parts())
