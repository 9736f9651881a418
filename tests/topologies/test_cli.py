"""The command line on a Cluster of three nodes, and where a prefix of the broker's precedes all keys."""

from __future__ import annotations

import pytest
from redis.cluster import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_redislock import Lock
from celery_redislock.app import server_of
from celery_redislock.cli.locks import Locks
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import mint_nonce, of_room
from celery_redislock.testing import pass_time
from tests.lab.app import make_app
from tests.lab.nodes import url_of
from tests.lab.servers import wait_until


@pytest.fixture
def app(config, nodes):
    config.locks = url_of(nodes)
    app = make_app(config)
    yield app
    server_of(app).stop()
    app.close()


def test_the_locks_of_all_nodes_are_listed_shown_and_released(app):
    names = [f"redislock:{{{number}}}" for number in range(20)]
    held = [Lock(server_of(app).client, name, timeout=10) for name in names]
    assert all(lock.acquire(blocking=False) for lock in held)
    room = of_room(mint_nonce(), "host")
    server_of(app).store.enter(Demand(names[0]), room, 1)
    locks = Locks(app)
    rows = {row.part.key: row for row in locks.all()}
    assert sorted(rows) == sorted(names)
    assert locks.of(names[0]) == [rows[names[0]]._replace(ttl=pytest.approx(10, abs=5))]
    assert rows[names[0]].waiting == 1
    server_of(app).store.leave(Demand(names[0]), room)
    assert all(locks.release(row) for row in rows.values())
    assert list(locks.all()) == []


def test_a_lock_whose_hash_slot_moves_just_now_is_listed_once(app, nodes):
    name = f"redislock:{{{nodes.key_of(nodes.primaries[0])}}}"
    lock = Lock(server_of(app).client, name, timeout=10)
    assert lock.acquire(blocking=False)
    server_of(app).store.enter(Demand(name), of_room(mint_nonce(), "host"), 1)
    with nodes.moving(name, nodes.primaries[1]) as source:
        assert [row.part.key for row in Locks(app).all(match="redislock:*")] == [name]
        nodes.move_keys(name, source, nodes.primaries[1])
        assert [row.part.key for row in Locks(app).all(match="redislock:*")] == [name]
    assert [row.part.key for row in Locks(app).all(match="redislock:*")] == [name]
    lock.release()


def test_a_lock_is_shown_and_released_although_another_node_is_dead(app, nodes):
    names = {node.port: f"redislock:{{{nodes.key_of(node)}}}" for node in nodes.primaries}
    for name in names.values():
        assert Lock(server_of(app).client, name, timeout=30).acquire(blocking=False)
    for dead in nodes.primaries:
        dead.kill()
        try:
            for name in (names[node.port] for node in nodes.primaries if node is not dead):
                (row,) = Locks(app).of(name)
                assert Locks(app).release(row)
                assert Lock(server_of(app).client, name, timeout=30).acquire(blocking=False)
            with pytest.raises(RedisConnectionError):
                Locks(app).of(names[dead.port])
        finally:
            dead.restart()
            wait_until(nodes.is_up, "it is back")
        assert Lock(server_of(app).client, names[dead.port], timeout=30).acquire(blocking_timeout=10)


def test_time_passes_on_every_node(app):
    keys = [f"redislock:{{{number}}}:pending" for number in range(20)]
    with RedisCluster(*server_of(app).client.nodes[0]) as client:
        for key in keys:
            client.set(key, "x", ex=3600)
        pass_time(3600, app=app)
        assert [key for key in keys if client.exists(key)] == []


@pytest.mark.parametrize("prefix", ["shop:", "{7}", "*shop:", "ü%41[x]"])
def test_keys_behind_a_prefix_of_the_broker_are_listed_and_no_others(config, private_locks, prefix):
    config.broker, config.locks = private_locks.celery_url(0), None
    config.settings["broker_transport_options"] = {"global_keyprefix": prefix}
    app = make_app(config)
    with app.tasks["lab.keyed"].lock_for("A1") as lock:
        private_locks.client.set("another-redislock:{stock:A1}", "a value")
        (row,) = Locks(app).all()
        assert row.part.key == lock.name
        assert [one.token for one in Locks(app).of(lock.name)] == [row.token]
    app.close()
