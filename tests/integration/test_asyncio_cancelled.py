"""A coroutine that is cancelled, at whichever await, leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
import redis
import redis.asyncio

from celery_redislock import Lock as BlockingLock
from celery_redislock.asyncio import Lock, locked
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import keys_of
from tests.lab.app import make_app
from tests.lab.cancelling import CancelledAt
from tests.lab.servers import Valkey, wait_until

NAME = "stock"
#: No test takes so long: what is free before that was given back.
LEASE = 90
#: More awaits than any scenario has.
ENOUGH = 60
OURS = "of-the-loop"


@pytest.fixture
def client(private_locks, locks: Valkey):
    """Of asyncio. Its connections have a name on the server."""
    return redis.asyncio.Redis(unix_socket_path=str(locks.socket), client_name=OURS, socket_timeout=30)


@pytest.fixture
def connections(client, locks: Valkey):
    """Counts the connections of the process. Without an event loop the keeper, the room and its listener have one."""

    def count() -> Counter[str]:
        return Counter(one["name"] for one in locks.client.client_list() if one["name"] == OURS)

    async def wait() -> None:
        async with Lock(client, NAME, timeout=LEASE, renew=True):
            assert not await Lock(client, NAME, timeout=LEASE).acquire(blocking_timeout=0.3)

    asyncio.run(wait())
    server = LockServer.behind(client)
    server.keeper.later(NAME, time.monotonic() + 60, lambda store: store.look(Lock(client, NAME).demand))
    wait_until(lambda: count()[OURS] >= 3, "the keeper, the room and its listener are there")
    return count


async def take(client, reached):
    outer, inner = (Lock(client, NAME, timeout=LEASE, reentrant=True, fence=True) for _ in range(2))
    async with outer as lock, inner:
        reached.append("held")
        await lock.extend()
    reached.append("over")


async def wait(client, reached):
    """Another one holds the key, and releases it as soon as this one stands in line."""
    path = client.connection_pool.connection_kwargs["path"]
    holder = BlockingLock(redis.Redis(unix_socket_path=path), NAME, timeout=LEASE, thread_local=False)
    assert holder.acquire(blocking=False)
    room = LockServer.behind(client).room

    def release() -> None:
        try:
            wait_until(lambda: len(room) or "over" in reached, "it waits, or was cancelled")
        finally:
            holder.release()

    releasing = asyncio.get_running_loop().run_in_executor(None, release)
    try:
        async with Lock(client, NAME, timeout=LEASE) as lock:
            reached.append("held")
            lock.check()
    finally:
        reached.append("over")
        await releasing


async def several(client, reached):
    """A permit, and the questions about it."""
    lock = Lock(client, NAME, timeout=LEASE, limit=2)
    assert await lock.acquire(blocking=False)
    try:
        reached.append("held")
        assert await lock.owned()
        assert not await lock.locked()
        await lock.extend(10)
    finally:
        await lock.release()
    reached.append("over")


async def release_after_a_cut(client, reached):
    """The release finds its connection dead, and is sent again over a new one."""
    lock = Lock(client, NAME, timeout=LEASE)
    assert await lock.acquire(blocking=False)
    try:
        reached.append("held")
        with redis.Redis(unix_socket_path=client.connection_pool.connection_kwargs["path"]) as other:
            for one in other.client_list():
                if one["name"] == OURS:
                    other.client_kill_filter(_id=one["id"])
    finally:
        await lock.release()
    reached.append("over")


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when the answer is there"])
@pytest.mark.parametrize("scenario", [take, wait, several, release_after_a_cut])
@pytest.mark.usefixtures("long_offers")
def test_no_key_is_held_no_connection_is_left_and_no_task_is_pending(client, locks, connections, scenario, late):
    before, seen = connections(), set()

    def cancel_at_each_await() -> None:
        whole = 0
        for nth in range(1, ENOUGH):
            reached: list[str] = []
            has_struck, ended = asyncio.run(cancelled(scenario(client, reached), nth, late=late))
            seen.add((ended, "held" in reached))
            wait_until(lambda: connections() <= before, f"no connection is left, cancelled at await {nth}")
            wait_until(lambda: not locks.client.exists(NAME), f"no key is held, cancelled at await {nth}")
            wait_until(lambda: not locks.client.exists(keys_of(NAME).line), "no room is in line")
            assert not len(LockServer.behind(client).room)
            whole = 0 if has_struck else whole + 1
            if whole == 3:  # it does not always suspend as often: a reply may be there at once
                return
        pytest.fail("it suspends without end")

    for _ in range(3):  # so it may also have been struck only before it was held
        cancel_at_each_await()
        if len(seen) == 3:
            break
    assert seen == {("cancelled", False), ("cancelled", True), ("done", True)}


async def cancelled(coroutine, nth, *, late):
    awaited = CancelledAt(coroutine, nth, late=late)

    async def run():
        return await awaited

    task = asyncio.create_task(run())
    await asyncio.wait([task], timeout=60)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    if not task.cancelled():
        task.result()
    return awaited.has_struck, "cancelled" if task.cancelled() else "done"


def test_what_is_asked_next_gets_its_own_reply(client):
    """On the connections that are left when others are cancelled at any await."""

    async def ask(number):
        async with Lock(client, f"{NAME}:{number}", timeout=LEASE, fence=True) as lock:
            assert (await lock.owned(), await lock.locked()) == (True, True)
            assert lock.fence
            return number

    async def main():
        for nth in range(1, 20):
            tasks = [asyncio.create_task(ask(number)) for number in range(10)]
            others = [asyncio.create_task(cancelled_in_vain(ask(10 + number), nth)) for number in range(10)]
            assert await asyncio.gather(*tasks) == list(range(10))
            await asyncio.gather(*others)

    async def cancelled_in_vain(coroutine, nth):
        try:
            return await CancelledAt(coroutine, nth, late=bool(nth % 2))
        except asyncio.CancelledError:
            return None

    asyncio.run(main())


def test_a_block_that_is_cancelled_with_its_loop_releases_its_key(config, locks):
    app = make_app(config)

    async def main():
        async def hold():
            async with locked(NAME, app=app, lease=LEASE):
                inside.set()
                await asyncio.sleep(60)

        inside = asyncio.Event()
        task = asyncio.create_task(hold())
        await inside.wait()
        return task

    assert asyncio.run(main()).cancelled()
    assert locks.held() == []


def test_a_lock_ends_with_its_lease_once_its_loop_is_closed(client, locks, caplog):
    loop = asyncio.new_event_loop()
    lock = Lock(client, NAME, timeout=1.0, renew=True, thread_local=False)
    assert loop.run_until_complete(lock.acquire())
    held = lock.local.entries[-1].held
    began = held.deadline
    wait_until(lambda: held.deadline > began, "it is renewed")
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    wait_until(lambda: not locks.client.exists(NAME), "its lease has ended")
    wait_until(lambda: lock.state == "lost", "its holder is told")
