"""Locks of coroutines where the lock server is a Cluster, behind Sentinels, or speaks TLS."""

from __future__ import annotations

import asyncio
import gc

import pytest
import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.sentinel import Sentinel

from celery_redislock import LockUnavailable
from celery_redislock.asyncio import Lock, locked
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import keys_of
from tests.lab.app import make_app
from tests.lab.renewals import renew
from tests.lab.servers import free_port, wait_until
from tests.lab.tls import Certificates, tls_server
from tests.lab.topologies import WATCHED, pair, sentinel


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Of a Sentinel."""
    with sentinel(tmp_path_factory.mktemp("sentinel"), WATCHED) as port:
        yield port


SHORT = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}


async def until(condition, what):
    await asyncio.to_thread(wait_until, condition, what)


async def take_turns(client, key):
    """Hold a lock, have it renewed, and let another one wait for it."""
    one, two = (Lock(client, key, timeout=30, renew=True, fence=True) for _ in range(2))
    async with one:
        assert (await one.owned(), await two.locked()) == (True, True)
        waiting = asyncio.create_task(two.acquire(blocking_timeout=30))
        await until(lambda: len(LockServer.behind(client).room), "it waits")
        renew(one)
        await one.extend()
        first = one.fence
    assert await waiting
    assert two.fence > first
    await two.release()


def of_cluster(nodes, **options):
    port = nodes.primaries[0].port
    return RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port)], **SHORT, **options)


class TestOnACluster:
    @pytest.mark.parametrize("decode_responses", [False, True])
    def test_it_is_held_renewed_and_waited_for_on_each_node(self, nodes, decode_responses):
        async def main():
            client = of_cluster(nodes, decode_responses=decode_responses)
            await asyncio.gather(*[take_turns(client, nodes.key_of(node)) for node in nodes.primaries])
            await client.aclose()

        asyncio.run(main())

    def test_a_hash_slot_may_move_meanwhile(self, nodes):
        key, _, new = nodes.key_of(nodes.primaries[0]), *nodes.primaries[:2]

        async def main():
            client = of_cluster(nodes)
            lock, other = (Lock(client, key, timeout=30, renew=True, fence=True) for _ in range(2))
            async with lock:
                with nodes.moving(key, new):
                    await lock.extend()
                    refused = asyncio.create_task(other.acquire(blocking=False))
                    await asyncio.sleep(0.1)
                    assert not refused.done()
                    nodes.move_keys(key, nodes.primaries[0], new)
                assert not await refused
                nodes.move(key, nodes.primaries[2])
                await lock.extend()
                waiting = asyncio.create_task(other.acquire(blocking_timeout=30))
                await until(
                    lambda: nodes.owner(key).client.exists(keys_of(key).line), "it waits where the hash slot is now"
                )
            assert await waiting
            assert nodes.owner(key).client.exists(key)
            await other.release()
            assert not nodes.owner(key).client.exists(key)

        asyncio.run(main())

    def test_a_node_that_is_silent_delays_only_its_own_keys(self, nodes):
        silent, other = nodes.primaries[:2]

        async def main():
            client = of_cluster(nodes)
            ours, theirs = (Lock(client, nodes.key_of(node), timeout=30) for node in (other, silent))
            for lock in (ours, theirs):
                async with lock:
                    pass
            silent.pause()
            try:
                failing = asyncio.create_task(theirs.acquire())
                for _ in range(10):
                    async with ours:
                        assert not failing.done()
                with pytest.raises(LockUnavailable):
                    await failing
            finally:
                silent.resume()
            nodes_are_up = nodes.is_up
            await until(nodes_are_up, "the Cluster is up")

        asyncio.run(main())


class TestBehindSentinels:
    def test_it_is_held_renewed_and_waited_for(self, port):
        async def main():
            sentinels = Sentinel([("127.0.0.1", free_port()), ("127.0.0.1", port)], **SHORT)
            await take_turns(sentinels.master_for(WATCHED, **SHORT), "stock")

        asyncio.run(main())

    def test_a_block_uses_the_sentinels_of_the_app(self, port, config):
        app = make_app(config)
        app.conf.redislock_url = f"sentinel://127.0.0.1:{port}/0"
        app.conf.redislock_client_options = {"master_name": WATCHED}

        async def main():
            async with locked("stock", app=app) as lock:
                assert await lock.owned()

        asyncio.run(main())

    def test_after_a_failover_the_new_primary_is_asked(self, tmp_path):
        with pair(tmp_path) as servers:

            async def main():
                sentinels = Sentinel([("127.0.0.1", port) for port in servers.ports], **SHORT)
                client = sentinels.master_for(WATCHED, **SHORT)
                async with Lock(client, "stock", timeout=30):
                    pass
                servers.primary.kill()
                await until(lambda: servers.is_primary(servers.replica), "the replica is promoted")
                lock = Lock(client, "stock", timeout=30)
                await until_acquired(lock)
                assert servers.replica.client.exists("stock")
                await lock.release()

            async def until_acquired(lock):
                while True:
                    try:
                        assert await lock.acquire(blocking=False)
                    except LockUnavailable:
                        await asyncio.sleep(0.1)
                    else:
                        return

            asyncio.run(main())


class TestOverTls:
    def test_it_is_held_renewed_and_waited_for(self, tmp_path):
        certificates = Certificates.for_server(tmp_path / "certificates")
        (tmp_path / "server").mkdir()
        with tls_server(tmp_path / "server", certificates) as port:

            async def main():
                client = redis.asyncio.Redis(host="localhost", port=port, ssl=True, **certificates.of_client)
                await take_turns(client, "stock")
                await client.aclose()

            asyncio.run(main())

    # A socket whose handshake has failed is left to the garbage collector, by redis-py as by asyncio.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_wrong_certificate_is_refused(self, tmp_path):
        certificates = Certificates.for_server(tmp_path / "certificates", "other.example")
        (tmp_path / "server").mkdir()
        with tls_server(tmp_path / "server", certificates) as port:
            client = redis.asyncio.Redis(host="localhost", port=port, ssl=True, **certificates.of_client)
            with pytest.raises(LockUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                asyncio.run(Lock(client, "stock", timeout=30).acquire())
            LockServer.behind(client).stop()
        gc.collect()
