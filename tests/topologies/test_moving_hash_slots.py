"""A hash slot of a Cluster moves to another node while its locks are held, renewed and waited for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_redislock import Lock
from celery_redislock.connection.cluster_client import LOOK_EVERY
from celery_redislock.connection.connect import connect
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict
from tests.lab.asking import answer_of
from tests.lab.renewals import renew
from tests.lab.servers import wait_until


@pytest.fixture
def move(nodes):
    """A key, the node that has its hash slot, and the node to which the hash slot moves."""
    key = nodes.key_of(nodes.primaries[0])
    return key, nodes.primaries[0], nodes.primaries[1]


def renew_at(node, lock, key):
    """Have `lock` renewed, and hold that its key lives longer at this node then."""
    assert node.client.pexpire(key, 15_000)
    renew(lock)
    assert node.client.pttl(key) > 15_000


def test_a_lock_is_renewed_and_released_where_its_hash_slot_has_gone(nodes, client, move):
    key, _, new = move
    with Lock(client, key, timeout=30, renew=True) as lock:
        nodes.move(key, new)
        renew_at(new, lock, key)
        lock.check()
    assert not new.client.exists(key)
    with Lock(client, key, timeout=10, fence=True):  # a script that the new node may not know
        assert new.client.exists(key)


def test_locks_are_renewed_in_a_hash_slot_that_stays_open(nodes, client, move):
    key, old, new = move
    tagged = [f"{{{key}}}:{number}" for number in range(3)]
    locks = [Lock(client, name, timeout=30, renew=True) for name in tagged]
    for lock in locks:
        lock.acquire()
    with nodes.moving(key, new):
        old.client.execute_command("MIGRATE", "127.0.0.1", new.port, tagged[1], 0, 5000)
        for lock, name, node in zip(locks, tagged, (old, new, old), strict=True):
            renew_at(node, lock, name) if node is old else renew(lock)  # an open one is asked for in a way of its own
            lock.check()
    for lock in locks:
        lock.release()


def test_who_asks_for_a_lock_while_its_hash_slot_is_open_gets_it_when_the_hash_slot_is_closed(nodes, client, move):
    key, _, new = move
    with ThreadPoolExecutor() as threads:
        with nodes.moving(key, new):
            taken = threads.submit(Lock(client, key, timeout=10, thread_local=False).acquire, blocking_timeout=10)
            time.sleep(0.2)
        assert taken.result(5)
    assert new.client.exists(key)


def test_who_waits_gets_the_lock_at_its_release_although_the_hash_slot_has_moved(nodes, client, move):
    key, old, new = move
    holder = Lock(client, key, timeout=30)
    holder.acquire()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(Lock(client, key, timeout=10, thread_local=False).acquire, blocking_timeout=20)
        wait_until(lambda: old.client.exists(keys_of(key).line), "it waits")
        nodes.move(key, new)
        holder.release()
        assert waiting.result(10)  # who is not told looks when the lease ends


def test_each_permit_of_a_limit_moves_with_its_lock(nodes, client, move):
    key, old, new = move
    first, second = (Lock(client, key, timeout=30, renew=True, limit=2) for _ in range(2))
    assert first.acquire()
    assert second.acquire()
    with nodes.moving(key, new):
        old.client.execute_command("MIGRATE", "127.0.0.1", new.port, keys_of(key).permit(2), 0, 5000)
    renew_at(new, first, key)
    renew_at(new, second, keys_of(key).permit(2))
    assert not Lock(client, key, timeout=1, limit=2).acquire(blocking=False)
    second.release()
    assert Lock(client, key, timeout=1, limit=2).acquire(blocking=False)
    first.release()


def test_a_lock_is_renewed_where_its_hash_slot_moves_to_a_node_that_is_new(nodes, client, tmp_path):
    key = nodes.key_of(nodes.primaries[2])
    with nodes.one_more(tmp_path / "new") as new:
        with Lock(client, key, timeout=30, renew=True) as lock:
            with nodes.moving(key, new) as source:  # nobody tells of the node before it has a hash slot
                nodes.move_keys(key, source, new)
                renew(lock)
                lock.check()
            renew_at(new, lock, key)
        nodes.move(key, source)


def test_a_lock_is_released_although_the_node_that_had_it_has_left_the_cluster(nodes, client, tmp_path):
    key = nodes.key_of(nodes.primaries[2])
    with nodes.one_more(tmp_path / "new") as new:
        with Lock(client, key, timeout=30):
            nodes.move(key, new)
        lock = Lock(client, key, timeout=30)
        lock.acquire()
        nodes.move(key, nodes.primaries[2])
        nodes.dismiss(new)
        time.sleep(LOOK_EVERY)  # the client, which was just made, has just looked up the hash slots
        store = LockServer.behind(client).store
        with ThreadPoolExecutor(8) as threads:  # one of them looks them up again; the others wait for it
            found = threads.map(lambda _: answer_of(lambda: store.look(Demand(key))), range(8))
            assert [type(one) for one in found] == [Conflict] * 8
        lock.release()


def test_a_lock_is_taken_although_one_of_the_nodes_in_the_url_has_left_the_cluster(nodes, tmp_path):
    with nodes.one_more(tmp_path / "new") as new:
        nodes.dismiss(new)
        for number in range(12):  # the nodes are asked in any order
            client = connect(f"redis+cluster://127.0.0.1:{new.port},127.0.0.1:{nodes.primaries[0].port}", {})
            lock = Lock(client, f"stock-{number}", timeout=30)
            assert answer_of(lock.acquire) is True
            lock.release()
            LockServer.behind(client).stop()
            client.close()


def test_a_lock_stays_held_and_waited_for_while_a_whole_hash_slot_moves_at_once(nodes, client, move):
    key, old, new = move
    with ThreadPoolExecutor() as threads:
        holder = Lock(client, key, timeout=30, renew=True, thread_local=False)
        holder.acquire()
        waiting = threads.submit(Lock(client, key, timeout=10, thread_local=False).acquire, blocking_timeout=20)
        wait_until(lambda: old.client.exists(keys_of(key).line), "it waits")
        nodes.move_at_once(key, new)
        renew_at(new, holder, key)
        holder.release()
        assert waiting.result(10)
