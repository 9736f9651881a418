"""The lab's own faults: each does what it says, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from kombu import Connection

from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, wait_until


@pytest.fixture
def connect(lock_proxy):
    """Makes clients behind the proxy, each with one connection and no retries.

    Some must time out. What is answered must be so in time on a busy machine too.
    """
    clients = []

    def make(**options):
        options = {"socket_timeout": 2.0, "max_connections": 1, **options}
        clients.append(redis.Redis.from_url(lock_proxy.url, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class TestDroppedReply:
    @pytest.mark.parametrize("protocol", [2, 3])
    def test_the_server_has_run_the_command_and_only_its_reply_is_lost(self, connect, locks, lock_proxy, protocol):
        client, other = connect(protocol=protocol), connect(protocol=protocol)
        assert client.incr("mine") == other.incr("others") == 1
        fault = lock_proxy.drop_reply(to=b"INCRBY", where=b"mine")
        assert client.get("mine") == b"1"  # another command on the same connection
        assert client.incr("others") == 2  # the same command with another key
        with pytest.raises(redis.ConnectionError):
            client.incr("mine")
        assert fault.struck == 1
        assert locks.client.get("mine") == b"2"
        assert other.incr("others") == 3  # on a connection that was there before
        assert client.incr("mine") == 3  # on a new one

    def test_the_nth_is_dropped_and_no_other(self, connect, lock_proxy):
        client = connect()
        second, third = (lock_proxy.drop_reply(to=b"INCRBY", nth=nth) for nth in (2, 3))
        assert client.incr("key") == 1
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.incr("key")
        assert client.incr("key") == 4
        assert (second.struck, third.struck) == (1, 1)

    def test_one_of_a_pipeline_is_found_by_its_number(self, connect, locks, lock_proxy):
        """Many commands in one packet, replies of every form: the third is met by its own reply."""
        client = connect()
        fault = lock_proxy.drop_reply(to=b"GET", where=b"absent", hang=True)
        pipeline = client.pipeline(transaction=False)
        pipeline.rpush("list", "a", "", "b\r\n").lrange("list", 0, -1).get("absent").set("after", "x" * 100_000)
        with pytest.raises(redis.TimeoutError):
            pipeline.execute()
        assert fault.struck == 1
        assert locks.client.strlen("after") == 100_000
        assert client.pipeline().lrange("list", 0, -1).get("after").execute() == [[b"a", b"", b"b\r\n"], b"x" * 100_000]

    def test_a_hanging_connection_times_its_client_out(self, connect, locks, lock_proxy):
        client = connect()
        lock_proxy.drop_reply(to=b"INCRBY", hang=True)
        with pytest.raises(redis.TimeoutError):
            client.incr("key")
        assert locks.client.get("key") == b"1"
        assert client.incr("key") == 2

    def test_a_dropped_command_is_one_that_the_server_never_hears_of(self, connect, locks, lock_proxy):
        client = connect()
        fault = lock_proxy.drop_command(to=b"INCRBY", nth=2)
        assert client.incr("key") == 1
        with pytest.raises(redis.TimeoutError):
            client.incr("key")
        assert fault.struck == 1
        assert locks.client.get("key") == b"1"
        assert client.incr("key") == 2

    def test_a_command_that_waits_already_is_hit_too(self, connect, locks, lock_proxy):
        """A message that the server has taken from the list and nobody has got."""
        client = connect(socket_timeout=5)
        with ThreadPoolExecutor(1) as pool:
            popped = pool.submit(client.brpop, "queue")
            wait_until(lambda: locks.client.info("clients")["blocked_clients"] == 1, "it waits")
            fault = lock_proxy.drop_reply(to=b"BRPOP")
            locks.client.lpush("queue", "message")
            with pytest.raises(redis.ConnectionError):
                popped.result()
        assert fault.struck == 1
        assert not locks.client.exists("queue")

    def test_pushed_messages_are_nobodys_reply(self, connect, locks, lock_proxy):
        lock_proxy.drop_reply(to=b"PING")
        for protocol in (2, 3):
            pubsub = connect(protocol=protocol).pubsub()
            pubsub.subscribe("a", "b")
            wait_until(lambda: locks.client.pubsub_numsub("a", "b") == [(b"a", 1), (b"b", 1)], "it has subscribed")
            locks.client.publish("a", "news")
            kinds = [pubsub.get_message(timeout=15)["type"] for _ in range(3)]
            assert kinds == ["subscribe", "subscribe", "message"]
            pubsub.close()
            wait_until(lambda: locks.client.pubsub_numsub("a") == [(b"a", 0)], "it has gone")


def test_a_delay_holds_back_its_replies_only(connect, lock_proxy):
    client = connect(socket_timeout=30)
    fault = lock_proxy.delay(0.5, to=b"GET", where=b"slow")
    client.get("fast")
    assert fault.struck == 0
    started = time.monotonic()
    client.get("slow")
    assert time.monotonic() - started >= 0.5
    assert fault.struck == 1
    lock_proxy.mend()
    client.get("slow")
    assert fault.struck == 1


def test_cut_closes_what_is_there_and_takes_new_connections(connect, locks, lock_proxy):
    client = connect(socket_timeout=5)
    with ThreadPoolExecutor(1) as pool:
        popped = pool.submit(client.brpop, "queue")
        wait_until(lambda: locks.client.info("clients")["blocked_clients"] == 1, "it waits")
        lock_proxy.cut()
        with pytest.raises(redis.ConnectionError):
            popped.result()
    wait_until(lambda: locks.client.info("clients")["blocked_clients"] == 0, "the server knows")
    assert client.ping()


def test_refused_connections_are_accepted_again_after_mending(connect, lock_proxy):
    client = connect()
    assert client.ping()
    lock_proxy.refuse()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        client.ping()
    lock_proxy.mend()
    assert client.ping()


class TestBlackhole:
    def test_every_client_times_out_and_its_commands_are_lost(self, connect, locks, lock_proxy):
        old, new = connect(), connect()
        assert old.ping()
        lock_proxy.blackhole()
        for client in (old, new):  # a connection of before, and one that is accepted now
            with pytest.raises(redis.TimeoutError):
                client.incr("key")
        wait_until(lambda: lock_proxy.swallowed >= 2, "both commands are lost")
        lock_proxy.mend()
        assert old.incr("key") == new.incr("key") - 1 == 1
        assert locks.client.get("key") == b"2"

    def test_a_reply_on_its_way_is_lost_and_its_connection_closed_on_mending(self, connect, locks, lock_proxy):
        client = connect(socket_timeout=5)
        with ThreadPoolExecutor(1) as pool:
            popped = pool.submit(client.brpop, "queue")
            wait_until(lambda: locks.client.info("clients")["blocked_clients"] == 1, "it waits")
            lock_proxy.blackhole()
            locks.client.lpush("queue", "message")
            wait_until(lambda: lock_proxy.swallowed, "the reply is lost")
            assert not popped.done()
            lock_proxy.mend()
            with pytest.raises(redis.ConnectionError):
                popped.result()

    def test_the_server_does_not_learn_that_a_client_has_gone(self, connect, locks, lock_proxy):
        """So it gives the next message to a dead connection."""
        client = connect(socket_timeout=30, single_connection_client=True)
        with ThreadPoolExecutor(1) as pool:
            popped = pool.submit(client.brpop, "queue")
            wait_until(lambda: locks.client.info("clients")["blocked_clients"] == 1, "it waits")
            lock_proxy.blackhole()
            client.connection._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(redis.ConnectionError):
                popped.result()
        locks.client.lpush("queue", "message")
        wait_until(lambda: lock_proxy.swallowed, "the reply is lost")
        assert not locks.client.exists("queue")


def test_a_replica_is_in_step_behind_it_and_stands_still_behind_a_black_hole(locks, lock_proxy, tmp_path):
    """What a primary streams is not framed as replies are."""
    locks.client.config_set("repl-diskless-sync-delay", 0)
    with Valkey(tmp_path).serve() as replica:
        replica.client.replicaof("127.0.0.1", lock_proxy.port)
        wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up", "it replicates")
        locks.client.set("before", "x" * 100_000)
        wait_until(lambda: replica.client.strlen("before") == 100_000, "it has what was written")
        lock_proxy.blackhole()
        locks.client.set("after", "x")
        wait_until(lambda: lock_proxy.swallowed, "it is lost")
        assert not replica.client.exists("after")


class TestRabbitMQ:
    @pytest.fixture
    def amqp(self, rabbitmq_url):
        """A proxy in front of RabbitMQ."""
        with Proxy(rabbitmq_url).serve() as proxy:
            yield proxy

    def test_amqp_passes_untouched(self, amqp):
        body = "*3\r\n$4\r\n" * 50_000
        with Connection(amqp.url, connect_timeout=5) as connection:
            queue = connection.SimpleQueue("lab-proxy")
            queue.put(body)
            message = queue.get(timeout=15)
            message.ack()
            assert message.payload == body
            queue.close()
            connection.default_channel.queue_delete("lab-proxy")

    def test_amqp_can_be_cut_and_mended(self, amqp):
        with Connection(amqp.url, connect_timeout=5) as connection:
            connection.default_channel.basic_qos(0, 1, False)
            amqp.refuse()
            with pytest.raises(connection.recoverable_connection_errors):
                connection.default_channel.basic_qos(0, 1, False)
            with pytest.raises(ConnectionRefusedError):
                connection.transport.establish_connection()
            amqp.mend()
            connection.transport.establish_connection().close()

    def test_amqp_in_a_black_hole_times_out(self, amqp):
        amqp.blackhole()
        with Connection(amqp.url, connect_timeout=0.3) as connection, pytest.raises(TimeoutError):
            connection.transport.establish_connection()
        wait_until(lambda: amqp.swallowed, "what was sent is lost")

    def test_delayed_amqp_still_works(self, amqp):
        fault = amqp.delay(0.05)
        with Connection(amqp.url, connect_timeout=5) as connection:
            connection.default_channel.basic_qos(0, 1, False)
        assert fault.struck > 2


class TestServer:
    def test_a_paused_server_is_silent_and_does_later_what_was_sent(self, private_locks, connect):
        client = connect()
        assert client.incr("key") == 1
        private_locks.pause()
        with pytest.raises(redis.TimeoutError):
            client.incr("key")
        private_locks.resume()
        wait_until(lambda: private_locks.client.get("key") == b"2", "it is done after all")

    def test_a_full_server_loses_a_message_of_kombu_that_it_hands_over_and_keeps_the_next(self, private_locks):
        """It takes the message from the queue, and then refuses to note that it is unacked."""
        server = private_locks.client
        with Connection(private_locks.celery_url()) as connection, connection.SimpleQueue("shop") as queue:
            for number in range(2):
                queue.put(number)
            server.config_set("maxmemory", 1)
            with pytest.raises(redis.exceptions.OutOfMemoryError, match="ZADD"):
                queue.get(timeout=10)
            assert (server.llen("shop"), server.exists("unacked")) == (1, 0)
            server.config_set("maxmemory", 0)

    @pytest.mark.parametrize("end", ["kill", "stop"])
    def test_a_restarted_server_is_empty_and_at_the_same_address(self, private_locks, lock_proxy, connect, end):
        client = connect()
        client.set("key", "value")
        sha = client.script_load("return 1")
        getattr(private_locks, end)()
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.ping()
        private_locks.restart()
        assert client.get("key") is None
        assert client.script_exists(sha) == [False]
        assert private_locks.client.ping()


def test_a_proxy_leaves_no_thread(locks):
    before = set(threading.enumerate())
    with Proxy(locks.url()).serve() as proxy:
        client = redis.Redis.from_url(proxy.url)
        client.ping()
        proxy.delay(60)
        proxy.blackhole()
        with Proxy(proxy.url).serve():  # one behind the other, and it ends first
            pass
    client.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "all have ended")
