"""Real workers whose locks are on a Cluster of three nodes: what waits there has its turn in order and at once."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import pytest

from celery_redislock.worker.server_check import try_lock_server
from tests.lab.kinds import TIME_OUTS
from tests.lab.nodes import url_of
from tests.lab.servers import wait_until
from tests.lab.workers import kept, stands_in_line


def on(nodes, config):
    config.locks = url_of(nodes)
    config.settings["redislock_client_options"] = TIME_OUTS
    return config


@pytest.fixture
def config(config, nodes):
    return on(nodes, config)


def keys_on(nodes, task, node, many=1):
    """Arguments of `task` whose locks are on `node`."""
    found = (n for n in range(1000) if nodes.owner(task.lock_for(n).name) is node)
    return [next(found) for _ in range(many)]


def test_messages_for_keys_on_each_node_run_in_order_and_at_once(nodes, tasks, start_worker, ledger):
    keys = [keys_on(nodes, tasks.work, node)[0] for node in nodes.primaries]
    for _ in range(2):
        start_worker(4)
    holders = [tasks.work.lock_for(key) for key in keys]
    for holder in holders:
        holder.acquire()
    results = [tasks.work.delay(key, f"{key}.{number}", 0.02) for number in range(10) for key in keys]
    wait_until(lambda: kept(tasks.work.app, 2) == 30, "all wait")
    lines = list(zip(nodes.primaries, keys, strict=True))
    wait_until(lambda: all(stands_in_line(one.client, tasks.work, key, 2) for one, key in lines), "with their ranks")
    for holder in holders:
        holder.release()
    for result in results:
        result.get(timeout=20)
    assert ledger.overlaps() == []
    for key in keys:
        of_key = [item for item in ledger.items() if item.startswith(f"{key}.")]
        assert of_key == [f"{key}.{number}" for number in range(10)]
    wait_until(lambda: [node.held() for node in nodes.primaries] == [[], [], []], "nothing is left")


def test_a_node_that_closes_idle_connections_or_whose_clock_is_far_off_is_warned_of(nodes, app, caplog, monkeypatch):
    def said():
        caplog.clear()
        try_lock_server(app)
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    names = [f"the lock server redis://127.0.0.1:{node.port}/0" for node in nodes.primaries]
    nodes.primaries[1].client.config_set("timeout", 60)
    try:
        (line,) = said()
    finally:
        nodes.primaries[1].client.config_set("timeout", 0)
    assert line.startswith(f"{names[1]} closes connections that are idle for 60 s: ")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)  # this host's clock is the one that is wrong
    assert sorted(line.partition(" this host's")[0] for line in said()) == sorted(
        f"the clock of {name} is 60 s behind" for name in names
    )


def test_no_more_than_three_run_at_once_on_each_node(nodes, tasks, start_worker, ledger, gate):
    keys = [keys_on(nodes, tasks.three, node)[0] for node in nodes.primaries]
    for _ in range(2):
        start_worker(10)  # whichever of them runs the nine has a child left, by which others ask and then wait
    results = [tasks.three.delay(key, f"{key}.{number}", gate) for number in range(6) for key in keys]
    wait_until(lambda: len(ledger.running()) == 9, "nine run")
    wait_until(lambda: kept(tasks.three.app, 2) == 9, "nine wait")
    gate.open()
    for result in results:
        result.get(timeout=20)
    for key in keys:
        runs = [run for run in ledger.runs() if run.key == str(key)]
        assert max(sum(one.start <= run.start < one.end for one in runs) for run in runs) == 3


def test_a_run_is_renewed_and_what_waits_for_it_begins_although_their_hash_slot_moves(
    nodes, tasks, start_worker, ledger, gate
):
    (key,) = keys_on(nodes, tasks.work, nodes.primaries[0])
    start_worker(2)
    name, new = tasks.work.lock_for(key).name, nodes.primaries[1]
    first = tasks.work.delay(key, "first", gate)
    wait_until(lambda: ledger.items() == ["first"], "it runs")
    second = tasks.work.delay(key, "second")
    wait_until(lambda: kept(tasks.work.app) == 1, "the second waits")
    nodes.move(name, new)
    wait_until(lambda: new.client.pttl(name) > 0, "the key is there")
    new.client.pexpire(name, 15_000)
    wait_until(lambda: new.client.pttl(name) > 15_000, "it is renewed")
    gate.open()
    assert first.get(timeout=20) == "first"
    assert second.get(timeout=20) == "second"
    assert ledger.overlaps() == []
    nodes.move(name, nodes.primaries[0])


def test_what_is_on_the_other_nodes_runs_and_what_waits_for_a_dead_one_runs_when_a_replica_has_taken_over(
    replicated, config, tasks, start_worker, ledger
):
    on(replicated, config)
    tasks.work.app.conf.redislock_url = config.locks
    start_worker(3)
    dead, other = replicated.primaries[:2]
    (of_dead,) = keys_on(replicated, tasks.work, dead)
    of_others = keys_on(replicated, tasks.work, other, 10)
    dead.kill()
    there = tasks.work.delay(of_dead, "there")
    for key in of_others:
        assert tasks.work.delay(key, key).get(timeout=20) == key
    assert there.get(timeout=20) == "there"
    assert ledger.overlaps() == []


def test_a_transfer_waits_for_the_node_of_one_account_and_leaves_the_other_account_free(
    nodes, tasks, start_worker, ledger, gate
):
    """One node is dead and comes back. The transfer that runs loses nothing, and the one that waits holds nothing."""
    away, here = nodes.primaries[:2]
    (first, second), (other, third) = (keys_on(nodes, tasks.account_only, node, 2) for node in (here, away))
    start_worker(3)
    assert tasks.transfer.delay(first, other, "warm").get(timeout=20) == "warm"
    runs = tasks.transfer.delay(second, first, "runs", gate)
    wait_until(lambda: "runs" in ledger.items(), "it runs")
    away.kill()
    try:
        waits = tasks.transfer.delay(*keys_on(nodes, tasks.account_only, here, 3)[2:], third, "waits")
        free = keys_on(nodes, tasks.account_only, here, 3)[2]
        assert tasks.account_only.delay(free, "free").get(timeout=20) == "free"
        assert not waits.ready()
    finally:
        away.restart()
        wait_until(nodes.is_up, "it is back")
    gate.open()
    assert [one.get(timeout=30) for one in (runs, waits)] == ["runs", "waits"]
    assert ledger.overlaps() == []
    assert ledger.losses() == []


def test_of_a_run_whose_process_has_died_the_keys_on_the_other_nodes_are_free_at_once(
    nodes, tasks, start_worker, ledger, gate
):
    away, here = nodes.primaries[:2]
    first = min(keys_on(nodes, tasks.account_only, away, 5), key=str)  # it is asked for first
    last = max(keys_on(nodes, tasks.account_only, here, 5), key=str)
    assert str(first) < str(last)
    worker = start_worker(1)
    tasks.transfer.delay(first, last, "runs", gate)
    wait_until(lambda: "runs" in ledger.items(), "it runs")
    away.kill()
    try:
        worker.kill_child()
        wait_until(lambda: here.held() == [], "its key on the other node is free", 15)
    finally:
        away.restart()
        wait_until(nodes.is_up, "it is back")


def test_what_waits_for_a_silent_node_delays_no_turn_at_the_others(nodes, config, tasks, start_worker, ledger):
    silent, other = nodes.primaries[:2]
    (of_silent,), (key,) = (keys_on(nodes, tasks.work, node) for node in (silent, other))
    config.settings["redislock_client_options"] = {"socket_timeout": 3.0}  # far longer than a turn takes
    worker = start_worker(2)
    holders = [tasks.work.lock_for(one) for one in (of_silent, key)]
    for holder in holders:
        holder.acquire()
    silent.client.pexpire(holders[0].key, 2000)  # then the worker asks again
    there = tasks.work.delay(of_silent, "there")
    wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
    silent.pause()
    try:
        wait_until(lambda: " is unavailable: " in worker.output(), "the worker has noticed")
        results = [tasks.work.delay(key, number, 0.3) for number in range(25)]
        wait_until(lambda: kept(tasks.work.app) == 26, "the others wait")
        holders[1].release()
        for result in results:
            result.get(timeout=60)
    finally:
        silent.resume()
        wait_until(nodes.is_up, "it is back")
    runs = ledger.runs()[:25]
    pauses = [second.start - first.end for first, second in pairwise(runs)]
    assert max(pauses) < 2.0, "as long as a command to the silent node"
    assert there.get(timeout=20) == "there"
    assert ledger.overlaps() == []
