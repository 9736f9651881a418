"""The server of the locks is shared: what precedes all of kombu's names there, `global_keyprefix`, precedes ours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from kombu import Connection, Consumer, Queue

from celery_redislock import LockedTask
from celery_redislock.app import server_of
from celery_redislock.connection.connect import disconnect
from celery_redislock.worker.requeue import put_back
from tests.lab.servers import wait_until
from tests.lab.workers import waiting_in


@pytest.fixture
def config(config, private_locks):
    """The broker is a server of the test's own, with a prefix, and has the locks."""
    config.broker, config.locks = private_locks.celery_url(0), None
    config.settings["broker_transport_options"] = {"global_keyprefix": "shop:"}
    return config


def names_of(server):
    """All keys and channels of the locks."""
    names = [*server.client.keys("*redislock*"), *server.client.pubsub_channels("*redislock*")]
    return [name.decode() for name in names]


def test_every_key_and_every_channel_of_the_locks_begins_with_it(
    config, private_locks, tasks, start_worker, ledger, gate
):
    worker = start_worker(2)
    assert "lock server" not in worker.output()
    results = [tasks.work.delay("k", number, gate) for number in range(3)]
    wait_until(lambda: waiting_in(worker), "one waits")
    wait_until(lambda: any("redislock:room:" in name for name in names_of(private_locks)), "its worker listens")
    names = names_of(private_locks)
    assert tasks.work.lock_for("k").name in names
    assert {name.split("redislock")[0] for name in names} == {"shop:"}
    gate.open()
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]
    assert ledger.overlaps() == []


@pytest.mark.parametrize("prefix", ["shop:", "7", "{7}", "*shop:", "ü%41[x]"])
def test_who_waits_is_woken_up_whatever_the_prefix_and_though_all_else_is_forbidden(private_locks, prefix):
    server = private_locks.client
    pattern = "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in prefix)
    rules = ["on", ">pw", "resetkeys", "resetchannels", f"~{pattern}*", f"&{pattern}*", "+@all"]
    server.execute_command("ACL", "SETUSER", "shop", *rules)
    with Celery(broker=f"redis+socket://shop:pw@{private_locks.socket}", set_as_current=False) as app:
        app.conf.broker_transport_options = {"global_keyprefix": prefix}

        @app.task(base=LockedTask, name="report", shared=False)
        def report(): ...

        with ThreadPoolExecutor(1) as threads, server.pubsub(ignore_subscribe_messages=True) as hears:
            hears.psubscribe("*redislock:room:*")
            with report.lock_for() as held:
                waiting = threads.submit(report.lock_for().acquire, blocking_timeout=10)
                wait_until(lambda: server.exists(f"{held.name}:line"), "it waits")
                assert held.name.startswith(f"{prefix}redislock:")
                wait_until(lambda: len(server.pubsub_channels()) == 2, "it listens to its own channel and that of all")
                channels = server.pubsub_channels()
                assert all(channel.startswith(f"{prefix}redislock:room:".encode()) for channel in channels)
            assert waiting.result()
            hint = hears.get_message(timeout=10) or hears.get_message(timeout=10)
            assert hint["channel"] in channels
        assert server.acl_log() == []
        server_of(app).stop()
        disconnect(server_of(app).client)


def test_a_message_that_a_broker_sends_to_a_worker_that_has_just_stopped_goes_back_to_its_queue(private_locks):
    """Kombu cannot take its BRPOP back."""
    options = {"global_keyprefix": "shop:"}
    with Connection(private_locks.celery_url(0), transport_options=options) as connection:
        takes = Consumer(connection, [Queue("orders")], callbacks=[lambda body, message: message.ack()])
        with takes, pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.1)
        with Connection(private_locks.celery_url(0), transport_options=options) as publishes:
            publishes.Producer().publish("an order", routing_key="orders")
        wait_until(lambda: not private_locks.client.exists("shop:orders"), "it is on its way to the consumer")
        put_back(connection.default_channel, 5.0)
    assert private_locks.client.llen("shop:orders") == 1
