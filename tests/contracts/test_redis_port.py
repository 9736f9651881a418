"""What `celery_redislock.connection.redis_port` needs of redis-py."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from celery_redislock.connection import redis_port
from tests.lab.servers import wait_until
from tests.lab.topologies import cluster


@pytest.fixture
def client(locks):
    """One that has its connection to itself."""
    pool = redis.BlockingConnectionPool.from_url(
        locks.url(), max_connections=2, protocol=2, retry=Retry(NoBackoff(), 0)
    )
    client = redis.Redis(connection_pool=pool).client()
    yield client
    client.close()
    pool.disconnect()


def test_a_command_is_sent_and_its_answer_is_read_later(client):
    connection = redis_port.connection_of(client)
    assert not redis_port.is_answered(connection)
    script = "return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))"
    redis_port.send(connection, "EVAL", script, ("k",), ("SET", b"1", "PX", "10000"), checks_health=True)
    sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    redis_port.send(connection, "EVALSHA", sha, ("k",), ("GET",), checks_health=False)
    wait_until(lambda: redis_port.is_answered(connection), "it is answered")
    assert [redis_port.answer_on(connection) for _ in range(2)] == [b"OK", b"1"]


def test_what_the_server_refuses_is_raised_and_the_next_answer_is_that_of_the_next_command(client):
    connection = redis_port.connection_of(client)
    for script in ("return redis.call('NONSENSE')", "return ARGV[1]"):
        redis_port.send(connection, "EVAL", script, (), ("word",), checks_health=False)
    with pytest.raises(ResponseError):
        redis_port.answer_on(connection)
    assert redis_port.answer_on(connection) == b"word"


def test_the_options_of_a_pool_are_those_that_were_given_and_a_connection_takes_them():
    given = {"host": "example.invalid", "port": 7, "db": 2, "username": "u", "socket_timeout": 3}
    pool = redis.Redis(**given).connection_pool
    options = redis_port.options_of(pool)
    assert given.items() <= options.items()
    pool.connection_class(**options)


def test_an_option_that_redis_py_does_not_know_is_refused_when_a_connection_is_made():
    pool = redis.BlockingConnectionPool(no_such_option=1)
    with pytest.raises(TypeError):
        redis_port.try_to_connect(pool)


def test_the_connections_of_a_pool_are_known_also_those_in_use(client):
    pool = client.connection_pool
    client.ping()
    unused = [one for one in redis_port.connections_of(pool, unused_only=True) if one is not None]
    both = [one for one in redis_port.connections_of(pool, unused_only=False) if one is not None]
    assert redis_port.connection_of(client) not in unused
    assert redis_port.connection_of(client) in both


def test_a_client_behind_sentinels_tells_of_them():
    sentinels = Sentinel([("one.invalid", 1), ("two.invalid", 2)])
    client = sentinels.master_for("shop")
    assert redis_port.is_behind_sentinels(client)
    hosts = [redis_port.options_of(one.connection_pool)["host"] for one in redis_port.sentinels_of(client)]
    assert hosts == ["one.invalid", "two.invalid"]
    options = redis_port.sentinel_options_of(client.connection_pool)
    assert options == {"service_name": "shop", "is_master": True, "sentinel_manager": sentinels}


def test_a_client_of_one_server_has_no_sentinels():
    client = redis.Redis()
    assert not redis_port.is_behind_sentinels(client)
    assert redis_port.sentinels_of(client) == []


def test_a_client_of_a_cluster_tells_of_its_nodes_and_of_what_its_user_has_set(tmp_path):
    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return address

    def called(connection: object) -> None:
        connection.on_connect()

    with cluster(tmp_path) as port:
        client = RedisCluster("127.0.0.1", port, address_remap=remap, redis_connect_func=called)
        nodes = redis_port.nodes_of(client)
        assert [(node.port, node.redis_connection.ping()) for node in nodes] == [(port, True)]
        assert redis_port.remap_of(client) is remap
        assert redis_port.called_at_connect(client) is called
        client.close()


KINDS = [
    (redis.asyncio.Connection, redis.Connection),
    (redis.asyncio.SSLConnection, redis.SSLConnection),
    (redis.asyncio.UnixDomainSocketConnection, redis.UnixDomainSocketConnection),
    (redis.asyncio.sentinel.SentinelManagedConnection, SentinelManagedConnection),
    (redis.asyncio.sentinel.SentinelManagedSSLConnection, SentinelManagedSSLConnection),
]


@pytest.mark.parametrize(("of_asyncio", "blocking"), KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_connection_has_one_that_blocks(of_asyncio, blocking):
    assert redis_port.blocking_kind(of_asyncio) is blocking
    assert redis_port.blocking_kind(blocking) is blocking
    assert redis_port.blocking_kind(type("Users", (of_asyncio,), {})) is blocking


def test_a_command_is_sent_in_a_loop_and_its_answer_read(locks):
    async def main():
        client = redis.Redis(unix_socket_path=str(locks.socket), protocol=2)
        pool = redis_port.pool_for_asyncio(client)
        connection = pool.make_connection()
        assert await redis_port.answer_in_loop(connection, ("ECHO", "word")) == b"word"
        with pytest.raises(ResponseError):
            await redis_port.answer_in_loop(connection, ("NONSENSE",))
        assert await redis_port.answer_in_loop(connection, ("ECHO", b"\xff")) == b"\xff"
        await connection.disconnect(nowait=True)

    asyncio.run(main())


def test_an_option_that_connections_of_asyncio_do_not_have_is_refused_if_it_is_set(tmp_path):
    client = redis.Redis(ssl=True, ssl_ca_certs=str(tmp_path))
    redis_port.pool_for_asyncio(client).make_connection()
    client.connection_pool.connection_kwargs["ssl_validate_ocsp"] = True
    with pytest.raises(TypeError):
        redis_port.pool_for_asyncio(client).make_connection()


def test_a_client_of_asyncio_behind_sentinels_is_known(locks):
    sentinels = redis.asyncio.sentinel.Sentinel([("one.invalid", 1)])
    client = sentinels.master_for("shop")
    assert redis_port.is_behind_sentinels(client)
    assert redis_port.sentinel_options_of(client.connection_pool)["service_name"] == "shop"


def test_the_nodes_that_a_cluster_client_of_asyncio_was_given_are_known_and_their_options():
    client = redis.asyncio.RedisCluster(host="one.invalid", port=7, client_name="shop")
    addresses, of_node = redis_port.known_nodes_of(client)
    assert addresses == [("one.invalid", 7)]
    assert redis_port.options_of(of_node.connection_pool)["client_name"] == "shop"
    of_node.connection_pool.make_connection()
