"""A node of a Cluster dies, or another takes its place, while locks are held, renewed and waited for."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from statistics import median
from threading import Thread

import pytest
import redis
from redis.exceptions import ClusterDownError

from celery_redislock import Lock, LockUnavailable
from celery_redislock.connection.cluster_client import LOOK_EVERY
from celery_redislock.connection.connect import connect, disconnect
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand, keys_of
from tests.lab.asking import answer_of
from tests.lab.nodes import node_id, three_nodes, url_of
from tests.lab.renewals import begin_renewal, renew
from tests.lab.servers import free_port, wait_until


@pytest.fixture
def keys(nodes):
    """A key on each primary."""
    return [nodes.key_of(node) for node in nodes.primaries]


def test_the_locks_of_the_other_nodes_are_renewed_and_granted_while_a_node_is_dead(nodes, client, keys):
    locks = [Lock(client, key, timeout=5.0, renew=True) for key in keys]
    for lock in locks:
        lock.acquire()
    dead = nodes.primaries[0]
    dead.kill()
    try:
        wait_until(lambda: locks[0].state == "lost", "the dead node's lock is lost")
        # All were taken at one time: by now the others had been lost too, if nobody had renewed them.
        wait_until(lambda: [lock.state for lock in locks] == ["lost", "held", "held"], "the others are held")
        took = []
        for node in nodes.primaries[1:]:
            for number in range(20):
                key = nodes.key_of(node, f"other-{number}")
                began = time.monotonic()
                with Lock(client, key, timeout=10):
                    pass
                took.append(time.monotonic() - began)
        assert median(took) < 0.5, "a time-out"
        with pytest.raises(LockUnavailable):
            Lock(client, keys[0], timeout=10).acquire(blocking=False)
        for node in nodes.primaries[1:]:
            with Lock(client, nodes.key_of(node, "again"), timeout=10):
                pass
    finally:
        dead.restart()
        wait_until(nodes.is_up, "it is back")
    wait_until(lambda: _can_take(client, keys[0]), "the node is asked again")


def _can_take(client, key):
    try:
        return Lock(client, key, timeout=10).acquire(blocking=False)
    except LockUnavailable:
        return False


def test_a_hash_slot_that_no_node_has_costs_no_lock_in_another_one_and_is_said_once(nodes, client, keys, caplog):
    locks = [Lock(client, key, timeout=60, renew=True) for key in keys]
    for lock in locks:
        lock.acquire()
    with nodes.without_owner(keys[0]):
        time.sleep(LOOK_EVERY)  # the client has just looked up the hash slots
        for _ in range(3):
            assert isinstance(answer_of(Lock(client, keys[0], timeout=60).acquire), LockUnavailable)
        begin_renewal(locks[0])
        for lock in locks[1:]:
            renew(lock)
        assert _said(caplog) == ["unavailable"]
    wait_until(lambda: answer_of(locks[0].locked) is True, "the key is there again")
    for lock in locks:
        renew(lock)
        lock.release()
    assert _said(caplog) == ["unavailable", "available"]


def test_a_node_that_refuses_all_commands_is_asked_once_in_a_round_of_renewals(nodes, client, keys):
    """After each refusal, the process pauses, and with many locks there the renewals of the others would be late."""
    down, _, lost = nodes.primaries
    store = LockServer.behind(client).store
    names = _keys_on(nodes, down)
    locks = [(name, tokens.mint(tokens.mint_nonce(), None, "host task"), 60.0) for name in (*names, keys[1])]
    assert store.renew(locks) == [None] * len(locks)  # it knows now which node has which hash slot
    down.client.config_set("cluster-require-full-coverage", "yes")
    try:
        with nodes.without_owner(nodes.key_of(lost)):
            wait_until(lambda: down.client.cluster("INFO")["cluster_state"] == "fail", "the node refuses all commands")
            before = _refusals_of(down)
            answers = store.renew(locks)
            assert _refusals_of(down) == before + 1
            assert all("cluster is down" in str(answer) for answer in answers[:-1])
            assert answers[-1] is None
    finally:
        down.client.config_set("cluster-require-full-coverage", "no")


def _refusals_of(node):
    return int(node.client.info("errorstats").get("errorstat_CLUSTERDOWN", {"count": 0})["count"])


def test_hash_slots_that_no_node_has_fail_no_renewal_on_the_node_that_had_them(nodes, client):
    """Not even in the round that learns of it; and each round looks for a node once."""
    names = _keys_on(nodes, nodes.primaries[0])[:4]
    locks = [(name, tokens.mint(tokens.mint_nonce(), None, "host task"), 60.0) for name in names]
    store = LockServer.behind(client).store
    assert store.renew(locks) == [None] * 4
    with nodes.without_owner(*names[:2]):
        time.sleep(LOOK_EVERY)  # it has just looked up the hash slots
        for _ in range(3):
            before = _lookups_of(nodes)
            lost, lost_too, *others = store.renew(locks)
            assert isinstance(lost, ClusterDownError)
            assert isinstance(lost_too, ClusterDownError)
            assert others == [None, None]
        assert _lookups_of(nodes) - before == 1


def _lookups_of(nodes):
    stats = [node.client.info("commandstats") for node in nodes.primaries]
    return sum(of_node.get("cmdstat_cluster|slots", {"calls": 0})["calls"] for of_node in stats)


def _keys_on(nodes, node):
    return [name for name in (f"stock-{number}" for number in range(200)) if nodes.owner(name) is node]


def test_a_dead_node_that_the_others_forget_was_not_replaced(tmp_path, caplog):
    with three_nodes(tmp_path) as nodes, closing(nodes.client(socket_timeout=0.5)) as client:
        dead, *others = nodes.primaries
        key, forgotten = nodes.key_of(dead), node_id(dead)
        assert not Lock(client, key, timeout=60).locked()
        dead.kill()
        assert isinstance(answer_of(Lock(client, key, timeout=60).acquire), LockUnavailable)
        for node in others:
            node.client.execute_command("CLUSTER", "FORGET", forgotten)
        wait_until(lambda: "no node of the Cluster" in str(answer_of(Lock(client, key, timeout=60).acquire)), "known")
        assert "was replaced" not in caplog.text


def _said(caplog):
    return re.findall(r"the lock server.*? is (\w+)", caplog.text)


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_give_ups_for_living_nodes_are_sent_although_others_wait_for_one_that_does_not_answer(nodes, client, how):
    """That one has a lock, too, which is no longer renewed."""
    away, others = nodes.primaries[0], nodes.primaries[1:]
    server, claim = LockServer.behind(client), tokens.mint_nonce()
    reservation = tokens.mint(claim, None, tokens.origin("host", None), tokens.RESERVED)
    keys = [nodes.key_of(away, f"away-{number}") for number in range(20)]
    living = [(node, nodes.key_of(node, f"living-{number}")) for node in others for number in range(5)]
    for node, key in living:
        node.client.set(key, reservation.value)
    lock = Lock(client, nodes.key_of(away, "held"), timeout=30.0, renew=True)
    lock.acquire()
    (away.kill if how == "dead" else away.pause)()
    try:
        begin_renewal(lock)
        for key in [*keys, *(key for _, key in living)]:
            server.give_up(Demand(key), claim, 3600.0, is_to_come=False)
        wait_until(lambda: not any(node.client.exists(key) for node, key in living), "they are sent", 10)
    finally:
        (away.restart if how == "dead" else away.resume)()
        wait_until(nodes.is_up, "it is back")


def test_a_silent_node_delays_no_lock_of_the_others(nodes, client, keys):
    locks = [Lock(client, key, timeout=6.0, renew=True) for key in keys]
    for lock in locks:
        lock.acquire()
    silent, other = nodes.primaries[0], nodes.key_of(nodes.primaries[1], "other")
    silent.pause()
    try:
        end = time.monotonic() + 7
        took = []
        while time.monotonic() < end:
            assert "lost" not in [lock.state for lock in locks[1:]]
            began = time.monotonic()
            with Lock(client, other, timeout=10):
                pass
            took.append(time.monotonic() - began)
            time.sleep(0.05)
        assert sum(seconds > 1.0 for seconds in took) < 3  # the silent one is asked more often
    finally:
        silent.resume()
        wait_until(nodes.is_up, "it is back")


def test_a_lock_stays_held_and_waited_for_over_a_failover_by_hand(replicated):
    client = replicated.client(socket_timeout=0.5, socket_connect_timeout=0.5)
    primary = replicated.primaries[0]
    key = replicated.key_of(primary)
    holder = Lock(client, key, timeout=30, renew=True)
    holder.acquire()
    with client, ThreadPoolExecutor() as threads:
        waiting = threads.submit(Lock(client, key, timeout=10, thread_local=False).acquire, blocking_timeout=20)
        wait_until(lambda: primary.client.exists(keys_of(key).line), "it waits")
        replicated.fail_over(primary)
        renew(holder)
        holder.check()
        holder.release()
        assert waiting.result(10)  # who is not told looks when the lease ends


def test_a_lock_stays_held_and_waited_for_over_the_death_of_its_node_where_a_replica_takes_over(replicated):
    client = replicated.client(socket_timeout=0.5, socket_connect_timeout=0.5)
    primary, replica = replicated.primaries[0], replicated.replicas[0]
    key = replicated.key_of(primary)
    holder = Lock(client, key, timeout=15, renew=True)
    holder.acquire()
    with client, ThreadPoolExecutor() as threads:
        waiting = threads.submit(_acquire_at_last, client, key)
        wait_until(lambda: replica.client.dbsize() == 2, "it waits, and the replica knows it")
        primary.kill()
        replicated.wait_for_promotion(replica)
        left = replica.client.pttl(key)
        wait_until(lambda: replica.client.pttl(key) > left, "it is renewed")
        holder.check()
        wait_until(lambda: replica.client.exists(keys_of(key).line), "it waits")
        holder.release()
        assert waiting.result(5)


def _acquire_at_last(client, key):
    """Acquire the key over an outage, of which who blocks is told, if it looks for the key meanwhile."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            return Lock(client, key, timeout=10).acquire(blocking_timeout=30)
        except LockUnavailable:
            time.sleep(0.1)
    return False


def test_a_node_in_which_a_script_runs_for_long_keeps_no_new_process_from_the_others(nodes):
    """It refuses to say which node has which hash slot, and another node is asked."""
    busy, other = nodes.primaries[:2]
    keys = [nodes.key_of(other, f"stock-{number}") for number in range(10)]
    busy.client.config_set("busy-reply-threshold", 10)
    script = Thread(target=_run_until_killed, args=(busy,))
    script.start()
    wait_until(lambda: _is_busy(busy), "the script keeps others out")
    try:
        for key in keys:  # any node may be asked first
            client = connect(url_of(nodes), {})
            assert answer_of(Lock(client, key, timeout=10).acquire) is True
            LockServer.behind(client).stop()
            disconnect(client)
    finally:
        busy.client.script_kill()
        script.join()


def test_a_wrong_password_is_named_even_if_a_node_is_dead(nodes):
    url = url_of(nodes).replace("://", "://nobody:wrong@") + f",127.0.0.1:{free_port()}"
    for _ in range(12):  # any node may be asked first
        client = connect(url, {})
        with pytest.raises(redis.AuthenticationError):
            client.look()
        disconnect(client)


def test_silent_nodes_count_for_more_than_one_in_which_a_script_runs_for_long(nodes):
    """Else each caller would wait for the silent ones: callers fail at once only if a server cannot be reached."""
    busy, *silent = nodes.primaries
    busy.client.config_set("busy-reply-threshold", 10)
    script = Thread(target=_run_until_killed, args=(busy,))
    script.start()
    wait_until(lambda: _is_busy(busy), "the script keeps others out")
    for node in silent:
        node.pause()
    try:
        for _ in range(12):  # any node may be asked first
            client = connect(url_of(nodes), {"socket_timeout": 0.15, "socket_connect_timeout": 0.15})
            with pytest.raises(redis.RedisError) as caught:
                client.look()
            assert "no node of the Cluster" in str(caught.value)
            disconnect(client)
    finally:
        for node in silent:
            node.resume()
        busy.client.script_kill()
        script.join()
        wait_until(nodes.is_up, "they are back")


def _run_until_killed(node):
    with node.connect() as client, pytest.raises(redis.ResponseError):
        client.eval("while true do end", 0)


def _is_busy(node):
    try:
        return not node.client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
