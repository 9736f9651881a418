"""A worker with a backlog: what waits in line gets the slots that become free, and blocks nobody until then."""

from __future__ import annotations

import re

from celery_redislock.protocol.scripts import STAND
from tests.conftest import every
from tests.lab.servers import need_pool, wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")
QUEUES = ("redis", "rabbitmq", "quorum")


@counts_on_wake_ups("it counts how many others run before the last one has its turn")
@every("pool, broker", POOLS, QUEUES)
def test_in_a_worker_with_a_backlog_a_waiting_message_gets_the_next_slot_once_its_key_is_free(
    config, tasks, start_worker, ledger, pool
):
    need_pool(pool)
    config.settings["worker_prefetch_multiplier"] = 4
    start_worker(2, "-P", pool)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(8)]
        wait_until(lambda: kept(tasks.work.app) == 8, "all wait")
        strangers = [tasks.plain.delay(seconds=0.5) for _ in range(100)]
        wait_until(lambda: len(ledger.runs()) >= 10, "the backlog is being worked off")
    before = len(ledger.runs())
    for result in waiting:
        result.get(timeout=30)
    runs = ledger.runs()
    assert [run.item for run in runs if run.key == "k"] == [str(number) for number in range(8)]
    last = max(number for number, run in enumerate(runs) if run.key == "k")
    assert last - before < 8 * 4, "each of the eight let at most a few strangers pass"
    assert len(ledger.conflicts()) == 8, "nobody is called without a slot"
    assert not all(result.ready() for result in strangers), "the backlog has lasted"


@counts_on_wake_ups("it counts how many others run before the waiting one has its turn")
@every("slots, broker", (1, 2), ("redis", "rabbitmq"))
def test_a_child_that_is_replaced_after_its_last_task_frees_one_slot_not_two(
    config, tasks, start_worker, ledger, slots
):
    """Billiard frees its slot at the end of its last run and when it is replaced. Fetched messages would get both."""
    config.settings |= {"worker_max_tasks_per_child": 2, "worker_prefetch_multiplier": 8}
    start_worker(slots)
    locks = [tasks.work.lock_for(f"k{number}") for number in range(4)]
    for lock in locks:
        assert lock.acquire()
    waiting = [tasks.work.delay(f"k{number}", f"w{number}") for number in range(4)]
    wait_until(lambda: kept(tasks.work.app) == 4, "all wait")
    for _ in range(100):
        tasks.plain.delay(seconds=0.1)
    passed = []
    for lock, waits in zip(locks, waiting, strict=True):
        seen = len(ledger.runs())
        wait_until(lambda seen=seen: len(ledger.runs()) >= seen + 4 * slots, "children are replaced")
        before = len(ledger.runs())
        lock.release()
        item = waits.get(timeout=60)
        passed.append([run.item for run in ledger.runs()[before:]].index(item))
    assert max(passed) <= 2 * slots, f"{passed} have passed the waiting messages"


@counts_on_wake_ups("it counts how many overtake")
@every("slots, broker", (2,), ("redis", "rabbitmq"))
def test_while_children_are_replaced_the_messages_of_a_key_keep_their_order(config, tasks, start_worker, ledger, slots):
    """A fetched message may wait in the pool for a child. It asked for the key just when the room had no slot.

    On a busy machine, that still happens now and then. So the messages are then sent once more.
    """
    config.settings |= {"worker_max_tasks_per_child": 2, "worker_prefetch_multiplier": 1}
    start_worker(slots)
    overtaken = []
    for _ in range(2):
        results = [tasks.work.delay("k", number, 0.15) for number in range(40)]
        for result in results:
            result.get(timeout=60)
        ran = [int(run.item) for run in ledger.runs()[-40:]]
        early = [item for place, item in enumerate(ran) if sum(later < item for later in ran[place:]) > 1]
        if len(early) <= 1:
            return
        overtaken.append(f"{early} have overtaken: {ran}")
    raise AssertionError(f"twice in a row: {overtaken}")


@counts_on_wake_ups("a look is held back")
@every("pool, broker", ("threads", "prefork", "gevent", "eventlet", "solo"), ("redis",))
def test_a_silent_lock_server_does_not_keep_fetched_messages_from_the_slots(
    lock_proxy, config, tasks, start_worker, ledger, pool
):
    """Each slot is held for a quarter of a second at most; the room gives a command up only after twenty seconds."""
    need_pool(pool)
    config.settings |= {
        "redislock_client_options": {"socket_timeout": 20.0, "socket_connect_timeout": 1.0},
        "task_annotations": {"*": {"lock_lease": 120.0}},
        "worker_prefetch_multiplier": 64,
    }
    start_worker(1, "-P", pool)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        strangers = [tasks.plain.delay(seconds=0.1) for _ in range(40)]
        wait_until(lambda: len(ledger.runs()) >= 5, "the backlog is being worked off")
        looks = lock_proxy.hold(b"EVALSHA", STAND.sha.encode(), nth=None, before=True)
    looks.wait()
    before = len(ledger.runs())
    wait_until(lambda: len(ledger.runs()) >= before + 8, "the backlog goes on", 15)
    looks.let_go()
    for result in [waits, *strangers]:
        result.get(timeout=30)


@counts_on_wake_ups("it counts how often messages were told to wait")
@every("slots, broker", (4, 1), QUEUES)
def test_a_worker_with_a_backlog_of_slow_tasks_does_not_keep_a_key_from_an_idle_worker(
    config, tasks, start_worker, ledger, slots
):
    config.settings["worker_prefetch_multiplier"] = 4
    other = f"{config.queue}-other"
    start_worker(slots)
    start_worker(2, "-Q", other)
    with tasks.work.lock_for("k"):
        backlogged = [tasks.work.delay("k", f"b{number}") for number in range(4)]
        wait_until(lambda: kept(tasks.work.app, 2) == 4, "four wait in the first worker")
        for _ in range(20 * slots):
            tasks.plain.delay(seconds=2.0)
        wait_until(lambda: len(ledger.running()) == slots, "it has no free slot")
        idle = [tasks.work.apply_async(("k", f"i{number}"), queue=other) for number in range(20)]
        wait_until(lambda: kept(tasks.work.app, 2) == 24, "twenty wait in the idle one")
    for result in idle + backlogged:
        result.get(timeout=30)
    ran = [run.item for run in ledger.runs() if run.key == "k"]
    for worker, count in (("i", 20), ("b", 4)):
        assert [item for item in ran if item[0] == worker] == [f"{worker}{number}" for number in range(count)]
    assert len(ledger.conflicts()) == 24, "nobody is called without a slot"


def test_an_autoscaled_worker_makes_a_child_for_a_message_that_waits(tasks, start_worker, running, gate):
    start_worker(1, "--autoscale=3,1")
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        stranger = tasks.work.delay("l", "stranger", gate)
        running("stranger")
    assert waits.get(timeout=20) == "waits"
    gate.open()
    assert stranger.get(timeout=20) == "stranger"


def test_while_a_message_waits_a_dead_child_is_replaced_although_celery_has_not_noticed(config, tasks, start_worker):
    config.settings["lab_misses_deaths"] = True
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        (child,) = worker.children()
        worker.kill_child(child.pid)
    wait_until(waits.successful, "it runs", 20)


def test_messages_come_back_ever_more_rarely_while_their_worker_is_full(config, app, tasks, start_worker):
    config.settings["redislock_waiting_limit"] = 0
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        for number in range(10):
            app.send_task("lab.work", ("k", number), headers={"redislock": {"times": 10}})
        wait_until(lambda: worker.output().count("; trying again in") == 10, "all are sent back")
    pauses = [float(pause) for pause in re.findall(r"; trying again in ([\d.]+) s", worker.output())]
    assert 30 < max(pauses) <= 300
