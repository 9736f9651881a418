"""`celery_redislock.asyncio`: the same locks as everywhere, for coroutines."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import redis
import redis.asyncio
from celery.signals import before_task_publish
from redis.exceptions import LockError

import celery_redislock
from celery_redislock import Also, LockConfigError, LockConflict, LockedTask, LockKeyError, LockLost, LockUnavailable
from celery_redislock.asyncio import Lock, locked
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import channel_of, keys_of
from celery_redislock.testing import busy
from tests.lab.app import make_app
from tests.lab.renewals import renew
from tests.lab.servers import Valkey, wait_until

NAME = "stock"
LINE = keys_of(NAME).line


@pytest.fixture
def client(locks):
    return redis.asyncio.Redis(unix_socket_path=str(locks.socket))


@pytest.fixture
def make(client):
    return lambda **options: Lock(client, NAME, **{"timeout": 30, "blocking_timeout": 20, **options})


@pytest.fixture
def blocking(locks):
    """A lock for threads on the same key."""
    return lambda **options: celery_redislock.Lock(locks.client, NAME, **{"timeout": 30, **options})


async def until(condition, what):
    """Wait in the event loop."""
    await asyncio.to_thread(wait_until, condition, what)


async def in_another_task(coroutine):
    return await asyncio.create_task(coroutine)


def extend_in_a_thread(app):
    with locked("a", app=app) as lock:
        lock.extend(600, replace_ttl=True)


def extend_in_a_loop(app):
    async def extend():
        async with locked("a", app=app) as lock:
            await lock.extend(600, replace_ttl=True)

    asyncio.run(extend())


class TestALock:
    def test_keeps_no_undo_of_an_acquire_that_redis_has_refused(self, make, locks):
        """The keeper would send it again until the lease is over: without a timeout, for a day."""
        locks.client.rpush(NAME, "a list")
        before = set(threading.enumerate())

        async def main():
            with pytest.raises(LockUnavailable, match="WRONGTYPE"):
                await make(timeout=None).acquire()

        asyncio.run(main())
        assert set(threading.enumerate()) <= before, "no keeper has anything to send"

    def test_is_granted_by_the_new_primary_to_a_caller_still_connected_to_the_former_one(
        self, private_locks, lock_proxy, tmp_path
    ):
        """Both have one name, whose address has changed; no connection was closed."""
        client, folder = redis.asyncio.from_url(lock_proxy.url, socket_timeout=15.0), tmp_path / "new"
        folder.mkdir()

        async def main():
            private_locks.client.client_pause(300, all=False)  # scripts count as writes: each has its own connection
            await asyncio.gather(*[Lock(client, name, timeout=30).locked() for name in "abc"])
            private_locks.client.replicaof("127.0.0.1", "1")
            lock_proxy.lead_to(new.url())
            async with Lock(client, NAME, timeout=30) as lock:
                assert new.client.get(NAME).decode() == lock.token

        with Valkey(folder).serve() as new:
            asyncio.run(main())

    def test_excludes_tasks_and_threads_and_redis_py_on_the_same_key(self, make, blocking, locks):
        async def main():
            async with make() as lock:
                assert (lock.state, await lock.owned(), await lock.locked()) == ("held", True, True)
                assert locks.client.get(NAME).decode() == lock.token
                assert not await in_another_task(make().acquire(blocking=False))
                assert not blocking().acquire(blocking=False)
                assert not locks.client.lock(NAME, timeout=30).acquire(blocking=False)
            assert not locks.client.exists(NAME)
            with busy(blocking(thread_local=False)):
                with pytest.raises(LockConflict) as conflict:
                    async with make(blocking=False):
                        pytest.fail("two hold the lock")
                assert conflict.value.holder.task_id is None
            assert lock.state is None

        asyncio.run(main())

    def test_is_one_for_redis_py_too(self, client, locks):
        async def main():
            lock = client.lock(NAME, timeout=30, blocking_timeout=1, lock_class=Lock)
            assert await lock.acquire()
            assert lock.local.token == locks.client.get(NAME)
            with pytest.raises(LockConflict):
                async with client.lock(NAME, timeout=30, blocking_timeout=0.1, lock_class=Lock):
                    pytest.fail("two hold the lock")
            await lock.release()
            with pytest.raises(LockError):
                await lock.release()

        asyncio.run(main())

    @pytest.mark.parametrize("kind", [redis.asyncio.lock.Lock, Lock], ids=["redis-py", "ours"])
    @pytest.mark.parametrize("arguments", [(False,), (True, 0.1)])
    def test_takes_the_arguments_of_redis_py_in_its_order(self, client, locks, kind, arguments):
        locks.client.set(NAME, "of another")

        async def main():
            lock = client.lock(NAME, timeout=30, lock_class=kind)
            try:
                return await asyncio.wait_for(lock.acquire(*arguments), 10)
            finally:
                await client.aclose()

        assert asyncio.run(main()) is False

    def test_keeps_no_task_that_has_ended_without_a_release(self, make, locks):
        """Who uses a timeout as a pause never releases."""

        async def main():
            lock, tasks = make(timeout=0.02), weakref.WeakSet()
            for _ in range(10):
                task = asyncio.ensure_future(lock.acquire())
                tasks.add(task)
                assert await task
            del task
            gc.collect()
            return len(tasks)

        assert asyncio.run(main()) == 1

    def test_is_extended_although_its_holder_is_asked_to_stop(self, make, locks):
        """The key is that of a run around it, which a newer call replaces."""

        async def main():
            async with make() as lock:
                locks.client.append(NAME, " <the-id-of-the-newer-call")  # as lua/prelude.lua does for a run
                assert await lock.extend(20, replace_ttl=True)
                assert await lock.reacquire()
                assert lock.state == "held"

        asyncio.run(main())

    def test_is_extended_and_reacquired(self, make, locks):
        async def main():
            async with make() as lock:
                assert await lock.extend(30)
                assert 50_000 < locks.client.pttl(NAME) <= 60_000
                assert await lock.extend(5, replace_ttl=True)
                assert locks.client.pttl(NAME) <= 5000
                assert lock.remaining <= 5
                assert await lock.reacquire()
                assert 20 < lock.remaining <= 30
            for lock in (make(), make(timeout=None)):
                with pytest.raises(LockError):
                    await lock.extend(5)

        asyncio.run(main())

    def test_that_a_task_of_this_loop_has_acquired_is_not_taken_over_in_another_loop(self, make):
        lock = make()

        async def look():
            return lock.state, await lock.owned()

        async def main():
            await in_another_task(lock.acquire())
            assert await asyncio.to_thread(asyncio.run, look()) == (None, False)
            assert (lock.state, await lock.owned()) == ("held", True)
            await lock.release()

        asyncio.run(main())

    def test_that_a_closed_loop_has_left_is_taken_over_once(self, make):
        """By one of the loops that release it at the same moment; the others find nothing."""
        lock, at_once = make(), threading.Barrier(8)

        async def release():
            at_once.wait(30)
            try:
                await lock.release()
            except LockError as error:
                return type(error)
            finally:
                at_once.wait(30)  # its task runs until all have tried

        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(8) as threads:
                for _ in range(50):
                    asyncio.run(lock.acquire())
                    releases = [threads.submit(asyncio.run, release()) for _ in range(8)]
                    done = [one.exception() or one.result() for one in releases]
                    assert sorted(done, key=repr) == 7 * [LockError] + [None]
        finally:
            sys.setswitchinterval(usual)

    def test_hands_out_fences_with_those_of_threads(self, make, blocking):
        async def main():
            async with make(fence=True) as lock:
                first = lock.fence
            with blocking(fence=True) as lock:
                second = lock.fence
            async with make(fence=True) as lock:
                assert first < second < lock.fence

        asyncio.run(main())

    def test_with_a_limit_has_several_holders_also_by_one_object(self, make):
        most, inside = [0], [0]

        async def main():
            lock = make(limit=3)

            async def hold():
                async with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    await asyncio.sleep(0.01)
                    inside[0] -= 1

            await asyncio.gather(*[hold() for _ in range(12)])

        asyncio.run(main())
        assert most == [3]

    def test_that_is_lost_says_so(self, make, locks):
        async def main():
            async def lose():
                async with make() as lock:
                    locks.client.delete(NAME)
                    with pytest.raises(LockLost):
                        await lock.extend()
                    lock.check()

            with pytest.raises(LockLost):
                await lose()
            async with make(raise_on_release_error=False):
                locks.client.delete(NAME)
            lock = make()
            assert await lock.acquire()
            locks.client.delete(NAME)
            with pytest.raises(LockLost):
                await lock.release()

        asyncio.run(main())

    def test_is_renewed_while_the_loop_is_busy(self, make, locks):
        async def main():
            async with make(renew=True, timeout=30) as lock:
                locks.client.pexpire(NAME, 15_000)
                renew(lock)  # waits without the loop
                assert locks.client.pttl(NAME) > 15_000

        asyncio.run(main())

    def test_needs_a_timeout_to_be_renewed(self, client):
        with pytest.raises(LockConfigError, match="needs a timeout"):
            Lock(client, NAME, renew=True)

    def test_tells_an_outage(self, locks):
        nobody = redis.asyncio.Redis(port=1)
        lock = Lock(nobody, NAME, timeout=30)

        async def main():
            for _ in range(2):
                with pytest.raises(LockUnavailable):
                    await lock.acquire()
            began = time.monotonic()
            with pytest.raises(LockUnavailable):  # it is known by now
                await lock.acquire()
            return time.monotonic() - began

        assert asyncio.run(main()) < 0.5

    def test_works_in_one_loop_after_the_other(self, make):
        async def take():
            async with make() as lock:
                return lock.state

        assert [asyncio.run(take()) for _ in range(3)] == 3 * ["held"]

    def test_works_in_the_loops_of_several_threads(self, make):
        inside = []

        async def take(number):
            async with make():
                inside.append(number)
                assert inside == [number]
                await asyncio.sleep(0.005)
                inside.remove(number)
            return number

        async def all_of(numbers):
            return await asyncio.gather(*map(take, numbers))

        with ThreadPoolExecutor(3) as threads:
            taken = [threads.submit(asyncio.run, all_of(range(10 * one, 10 * one + 5))) for one in range(3)]
            assert [len(one.result(30)) for one in taken] == [5, 5, 5]

    def test_belongs_to_its_task_and_after_that_to_the_next_one(self, make, locks):
        """`asyncio.wait_for` acquires in a task of its own, and so does pytest for a fixture."""

        async def main():
            for options in ({}, {"reentrant": True}, {"thread_local": False}):
                lock = make(**options)
                assert await in_another_task(lock.acquire())
                assert lock.state == "held"
                await lock.release()
                assert not locks.client.exists(NAME)
                async with lock:
                    if lock.thread_local:
                        with pytest.raises(LockError):
                            await in_another_task(lock.release())
                    lock.check()

        asyncio.run(main())

    @pytest.mark.parametrize("options", [{}, {"reentrant": True}], ids=["plain", "reentrant"])
    def test_is_not_taken_from_the_task_that_is_to_release_it_by_one_that_looks(self, make, locks, options):
        """Such as one that logs the lock. It has neither acquired it nor may it enter it again."""

        async def look(lock, seen):
            seen.append((repr(lock), lock.state, lock.token, lock.remaining > 0, lock.local.token))
            with pytest.raises(LockLost) if lock.state is None else nullcontext():
                lock.check()
            assert not await lock.acquire(blocking=False)
            await asyncio.sleep(30)

        async def main():
            lock, seen = make(**options), []
            assert await in_another_task(lock.acquire())
            looks = asyncio.create_task(look(lock, seen))
            while not seen:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            held = lock.state
            try:
                assert held == "held"
                await lock.release()
                assert not locks.client.exists(NAME)
            finally:
                looks.cancel()
                error = (await asyncio.gather(looks, return_exceptions=True))[0]
            assert isinstance(error, asyncio.CancelledError), error

        asyncio.run(main())

    def test_with_a_limit_is_released_by_each_task_that_shares_it(self, make, locks):
        """Each has acquired it in a task of its own, which has ended when the next one acquires it."""

        async def hold(lock, both, over):
            assert await in_another_task(lock.acquire())
            await both.wait()
            await lock.release()
            await over.wait()  # no other task inherits what this one still has

        async def main():
            lock, both, over = make(limit=2), asyncio.Barrier(2), asyncio.Event()
            first = asyncio.create_task(hold(lock, both, over))
            await until(lambda: locks.client.exists(NAME), "the first permit is held")
            second = asyncio.create_task(hold(lock, both, over))
            try:
                await until(lambda: not locks.held(), "both permits are released")
            finally:
                over.set()
                errors = await asyncio.gather(first, second, return_exceptions=True)
            assert errors == [None, None]

        asyncio.run(main())

    def test_whose_options_only_threads_know_is_refused(self, locks):
        blocking = redis.Redis(unix_socket_path=str(locks.socket))
        blocking.connection_pool.connection_kwargs["redis_connect_func"] = lambda connection: connection.on_connect()
        with pytest.raises(LockConfigError, match="redis_connect_func"):
            asyncio.run(Lock(blocking, NAME).acquire())


class TestReEntry:
    def test_is_by_task(self, make, locks):
        async def main():
            async with make(reentrant=True) as outer:
                async with make(reentrant=True) as inner:
                    assert inner.token == outer.token
                assert locks.client.exists(NAME)
                assert not await in_another_task(make(reentrant=True).acquire(blocking=False))
            assert not locks.client.exists(NAME)

        asyncio.run(main())

    def test_includes_blocks_for_threads(self, config, locks):
        app = make_app(config)

        async def main():
            async with locked(NAME, app=app) as outer:
                with celery_redislock.locked(NAME, app=app) as inner:
                    assert inner.token == outer.token
                outer.check()
            assert locks.held() == []

        asyncio.run(main())

    def test_includes_the_run_of_a_task(self, config):
        app = make_app(config)
        app.conf.task_always_eager = True

        @app.task(base=LockedTask, shared=False, lock_key="stock", bind=True)
        def task(self):
            async def main():
                async with locked(NAME, app=app, block_for=0) as lock:
                    return lock.token == self.lock.token

            return asyncio.run(main())

        assert task.delay().get()


class TestWaiting:
    def test_coroutines_and_threads_stand_in_one_line(self, make, blocking, locks):
        turns = []

        async def main():
            async def wait(number):
                async with make():
                    turns.append(number)

            def wait_in_a_thread(number):
                with blocking(blocking_timeout=20):
                    turns.append(number)

            holder, waiting = blocking(), []
            assert holder.acquire()
            rooms = [LockServer.behind(one).room for one in (locks.client, make().redis)]
            for number in range(8):
                before = sum(map(len, rooms))
                way = asyncio.to_thread(wait_in_a_thread, number) if number % 2 else wait(number)
                waiting.append(asyncio.create_task(way))
                await until(lambda before=before: sum(map(len, rooms)) > before, "it waits")
            holder.release()
            await asyncio.gather(*waiting)

        asyncio.run(main())
        assert turns == list(range(8))
        assert locks.client.keys() == []

    def test_ends_with_its_time(self, make, blocking, locks):
        async def main():
            began = time.monotonic()
            assert not await make().acquire(blocking_timeout=0.2)
            return time.monotonic() - began

        with busy(blocking()):
            assert 0.2 <= asyncio.run(main()) < 5
            wait_until(lambda: not locks.client.exists(LINE), "the line is left")

    def test_the_loop_goes_on_meanwhile(self, make):
        async def main():
            async with make():
                waiting = asyncio.create_task(make().acquire())
                for _ in range(10):
                    await asyncio.sleep(0.001)
                assert not waiting.done()
            assert await waiting

        asyncio.run(main())

    def test_a_thousand_use_one_connection_for_their_wake_ups(self, private_locks, make, locks):
        """And as many keys: one subscription, in one connection, and never more than fifty for commands."""
        most = [0]

        async def main():
            client = make().redis

            async def wait(number):
                async with Lock(client, f"{NAME}:{number}", timeout=90, blocking_timeout=60):
                    return number

            holders = [Lock(client, f"{NAME}:{number}", timeout=90) for number in range(1000)]
            assert all(await asyncio.gather(*[one.acquire() for one in holders]))
            waiting = [asyncio.create_task(wait(number)) for number in range(1000)]
            room = LockServer.behind(client).room
            await until(lambda: len(room) == 1000, "they wait")
            channel = channel_of(room.token.nonce)
            await until(lambda: locks.client.pubsub_numsub(channel)[0][1] == 1, "their room hears")
            clients = locks.client.client_list()
            most[0] = len(clients)
            assert sum(one["sub"] != "0" for one in clients) == 1
            await asyncio.gather(*[one.release() for one in holders])
            assert await asyncio.gather(*waiting) == list(range(1000))

        asyncio.run(main())
        assert most[0] <= 50 + 5

    def test_an_outage_ends_it(self, make, blocking, locks, private_locks):
        async def main():
            waiting = asyncio.create_task(make().acquire())
            await until(lambda: locks.client.exists(LINE), "it waits")
            locks.kill()
            with pytest.raises(LockUnavailable):
                await waiting

        assert blocking().acquire()
        asyncio.run(main())


class TestLocked:
    @pytest.fixture
    def app(self, config):
        return make_app(config)

    def test_a_block_has_the_key_of_tasks(self, app, locks):
        async def main():
            async with locked("stock:{sku}", values={"sku": 7}, app=app) as lock:
                assert (lock.key, lock.state) == ("redislock:{stock:7}", "held")
                assert locks.client.exists(lock.key)

        asyncio.run(main())
        assert locks.held() == []

    def test_a_function_holds_it_until_its_coroutine_has_ended(self, app):
        inside, most = [], []

        @locked("stock:{sku}", app=app)
        async def count(sku: int, item: str) -> str:
            inside.append(item)
            most.append(len(inside))
            await asyncio.sleep(0.01)
            inside.remove(item)
            return item

        async def main():
            return await asyncio.gather(*[count(7, str(number)) for number in range(5)])

        assert asyncio.run(main()) == list("01234")
        assert most == 5 * [1]
        assert count.__name__ == "count"

    def test_one_object_serves_many_tasks_and_threads(self, app):
        block, inside = locked(NAME, app=app), []

        async def enter():
            async with block:
                inside.append(1)
                assert inside == [1]
                await asyncio.sleep(0.001)
                inside.pop()

        def enter_in_a_thread():
            with block:
                inside.append(1)
                assert inside == [1]
                time.sleep(0.001)
                inside.pop()

        async def main():
            threads = [asyncio.to_thread(enter_in_a_thread) for _ in range(4)]
            await asyncio.gather(*[enter() for _ in range(10)], *threads)

        asyncio.run(main())

    def test_its_errors_are_those_of_a_block_for_threads(self, app):
        async def enter(*args, **options):
            async with locked(*args, app=app, **options):
                pytest.fail("entered")

        async def main():
            async with locked(NAME, app=app):
                with pytest.raises(LockConflict):
                    await in_another_task(enter(NAME, block_for=0))
            with pytest.raises(LockKeyError):
                await enter("stock:{sku}", values={"sku": object()})
            with pytest.raises(LockConfigError, match="needs a template"):
                await enter()

        asyncio.run(main())

    def test_switched_off_it_asks_nothing(self, app):
        app.conf.redislock_enabled = False
        app.conf.redislock_url = "redis://127.0.0.1:1"

        @locked(app=app)
        async def count(sku: int) -> int:
            return sku

        async def main():
            async with locked(NAME, app=app) as lock:
                assert lock.state == "none"
                assert await lock.acquire()
                assert await lock.extend(5)
                assert (await lock.owned(), await lock.locked()) == (True, False)
                await lock.release()
            return await count(7)

        assert asyncio.run(main()) == 7

    def test_a_generator_is_refused(self, app):
        async def pages():
            yield 1

        with pytest.raises(LockConfigError, match="generator"):
            locked("stock", app=app)(pages)


class TestTheLockOfATask:
    @pytest.fixture
    def app(self, config):
        return make_app(config)

    @pytest.fixture
    def reserve(self, app):
        @app.task(base=LockedTask, shared=False, bind=True, lock_key="stock:{sku}", lock_block_for=20)
        def reserve(self, sku, quantity):
            async def main():
                async with self.alock_for(sku) as lock:
                    return lock.token == self.lock.token

            return asyncio.run(main())

        return reserve

    def test_is_that_of_its_runs_and_of_lock_for(self, reserve, locks):
        async def main():
            async with reserve.alock_for(7) as lock:
                assert (lock.key, lock.state) == ("redislock:{stock:7}", "held")
                waiting = asyncio.create_task(asyncio.to_thread(enter))
                await until(lambda: locks.client.exists(keys_of(lock.key).line), "it waits")
                assert not waiting.done()
            await waiting

        def enter():
            with reserve.lock_for(7, 1):
                pass

        asyncio.run(main())
        assert locks.held() == []

    def test_is_that_of_the_run_around_it(self, reserve):
        assert reserve.apply((7, 1)).get()

    @pytest.mark.parametrize("extends", [extend_in_a_thread, extend_in_a_loop])
    def test_extends_all_keys_of_the_run_around_it(self, app, locks, extends):
        @app.task(
            base=LockedTask, shared=False, bind=True, lock_key="a", lock_also=[Also("b")], lock_on_conflict="wait"
        )
        def both(self):
            extends(app)
            return [locks.client.pttl(part.key) > 500_000 for part in self.lock.parts], self.lock.remaining > 500

        assert both.apply().get() == ([True, True], True)

    def test_waits_as_long_as_the_task_says(self, app):
        @app.task(base=LockedTask, shared=False, lock_key="stock:{sku}", lock_block_for=0.0)
        def count(sku): ...

        async def main():
            with pytest.raises(LockConflict):
                async with count.alock_for(7):
                    pytest.fail("two hold the lock")

        with busy(locked("stock:7", app=app)):
            asyncio.run(main())

    def test_may_be_released_by_another_coroutine(self, reserve, locks):
        async def main():
            lock = reserve.alock_for(7)
            await in_another_task(lock.acquire())
            await lock.release()
            return locks.held()

        assert asyncio.run(main()) == []

    def test_has_a_holder_that_coroutines_can_ask_for(self, reserve):
        async def main():
            assert await reserve.alock_info(7) is None
            async with reserve.alock_for(7):
                found = await reserve.alock_info(sku=7)
                assert (found.key, found.state) == ("redislock:{stock:7}", "held")
                blocking = await asyncio.to_thread(reserve.lock_info, 7)
                assert (found.since, found.hostname) == (blocking.since, blocking.hostname)
            assert await reserve.alock_info(7) is None

        asyncio.run(main())

    def test_is_asked_for_with_the_errors_of_lock_for(self, app, reserve, locks, private_locks):
        @app.task(base=LockedTask, shared=False, lock_rate="10/m")
        def with_a_rate(): ...

        async def main():
            with pytest.raises(TypeError):
                await reserve.alock_info()
            with pytest.raises(LockKeyError):
                reserve.alock_for(object())
            with pytest.raises(LockConfigError, match="lock_rate"):
                with_a_rate.alock_for()
            locks.kill()
            with pytest.raises(LockUnavailable):
                await reserve.alock_info(7)

        asyncio.run(main())

    def test_switched_off_asks_nothing(self, app, reserve):
        app.conf.redislock_enabled = False
        app.conf.redislock_url = "redis://127.0.0.1:1"

        async def main():
            async with reserve.alock_for(7) as lock:
                return lock.state, await reserve.alock_info(7)

        assert asyncio.run(main()) == ("none", None)


def test_a_lock_for_threads_names_this_module_where_it_would_stop_the_loop(config, locks, client):
    app = make_app(config)

    async def enter():
        with celery_redislock.locked(NAME, app=app):
            pytest.fail("entered")

    key = celery_redislock.Lock(locks.client, "redislock:{stock}")
    with busy(key), pytest.raises(LockConfigError, match=r"use celery_redislock\.asyncio"):
        asyncio.run(enter())
    with pytest.raises(LockConfigError, match=r"celery_redislock\.asyncio\.Lock"):
        celery_redislock.Lock(client, NAME)


def test_no_thread_is_left_for_a_coroutine_that_waits(make, blocking, locks):
    """Beside the keeper's, the room's and its listener's."""

    async def main():
        waiting = [asyncio.create_task(make().acquire()) for _ in range(20)]
        room = LockServer.behind(make().redis).room
        while len(room) < 20:
            await asyncio.sleep(0.01)
        more = threading.active_count() - before
        holder.release()
        for one in waiting:
            one.cancel()
        return more

    holder = blocking()
    assert holder.acquire()
    before = threading.active_count()
    assert asyncio.run(main()) <= 3


class TestPublishing:
    @pytest.fixture
    def publishing(self):
        """Holds a publish back, its key reserved and its message unsent, until ``go_on`` is set."""
        began, go_on = threading.Event(), threading.Event()

        def hold_back(**_):
            began.set()
            assert go_on.wait(30)

        before_task_publish.connect(hold_back)
        yield began, go_on
        before_task_publish.disconnect(hold_back)

    def test_that_is_cancelled_when_its_message_may_be_out_leaves_its_reservation(
        self, tasks, publishing, broker_server, config
    ):
        began, go_on = publishing

        async def main():
            sending = asyncio.create_task(tasks.job.adelay("k", "first"))
            await until(began.is_set, "it publishes")
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            go_on.set()
            await until(lambda: broker_server.client.llen(config.queue) == 1, "its message is sent")
            return await tasks.job.adelay("k", "second")

        second = asyncio.run(main())
        assert second.duplicate
        assert broker_server.client.llen(config.queue) == 1
        assert tasks.job.lock_info("k").state == "queued"

    def test_does_not_stop_the_loop_while_another_publisher_is_at_it(self, tasks, publishing):
        """The second call waits for the first one's message for up to a second."""
        began, go_on = publishing

        async def main():
            first = asyncio.create_task(tasks.job.adelay("k", "first"))
            await until(began.is_set, "it publishes")
            second = asyncio.create_task(tasks.job.adelay("k", "second"))
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not second.done()
            go_on.set()
            return [await one for one in (first, second)]

        first, second = asyncio.run(main())
        assert (first.id, first.duplicate, second.duplicate) == (second.id, False, True)

    def test_raises_what_a_call_without_a_loop_raises(self, tasks):
        with pytest.raises(TypeError):
            asyncio.run(tasks.job.adelay())
        with pytest.raises(LockConfigError, match="lock_scop"):
            asyncio.run(tasks.job.aapply_async(("k",), lock_scop="run"))
