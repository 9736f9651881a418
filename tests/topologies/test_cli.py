"""The command line on a Cluster of three nodes, and where a prefix of the broker's precedes all keys."""

from __future__ import annotations

import pytest

from celery_redislock import Lock
from celery_redislock.app import server_of
from celery_redislock.cli.locks import Locks
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import mint_nonce, of_room
from tests.lab.app import make_app
from tests.lab.nodes import url_of


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
