"""A rate: in no time do more runs of a key begin than `lock_rate` allows, over all workers and whatever dies."""

from __future__ import annotations

import queue
import re
import threading
from collections import defaultdict
from contextlib import suppress

import pytest
import redis
from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConfigError, LockConflict, LockKeyError, LockLost
from celery_redislock.signals import lock_acquired
from tests.conftest import on_every_broker
from tests.lab.kinds import ON_A_CLUSTER
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups

PATIENCE = 40
#: How many runs of `rated` may begin in a second.
RATE = 60


@pytest.fixture
def grants(locks):
    """When the lock server has granted which key to whom, by its own clock."""
    seen, begun, servers = defaultdict(list), queue.SimpleQueue(), locks.nodes.primaries if ON_A_CLUSTER else [locks]

    def listen(client):
        client.connection_pool.connection_kwargs["socket_timeout"] = None  # else it would stop in a quiet moment
        with suppress(redis.RedisError, OSError, ValueError), client.monitor() as monitor:
            client.ping()
            begun.put(client)
            for line in monitor.listen():
                found = re.match(r"set (\S+?)(:permit:\d+)? #", line["command"], re.IGNORECASE)
                if line["client_type"] == "lua" and found:
                    seen[found[1].strip("{}")].append(line["time"])

    listeners = [threading.Thread(target=listen, args=[server.connect()]) for server in servers]
    for listener in listeners:
        listener.start()
        begun.get(timeout=10)
    yield seen
    for server, listener in zip(servers, listeners, strict=True):
        server.client.client_kill_filter(_type="normal", skipme=True)
        listener.join()


def most_in_a_second(times):
    """A fifth is left out: the lock server counts from the begin of a script, and is seen a moment later."""
    return max(sum(begin <= time < begin + 0.8 for time in times) for begin in times)


@counts_on_wake_ups("a hundred and eighty messages have their turn, one every five seconds")
@on_every_broker
def test_in_no_second_do_more_runs_begin_on_two_workers(tasks, start_worker, ledger, grants, nothing_is_left):
    for _ in range(2):
        start_worker(4)
    results = [tasks.rated.delay("k", number) for number in range(3 * RATE)]
    assert {result.get(timeout=PATIENCE) for result in results} == {"none"}
    assert sorted(map(int, ledger.items())) == list(range(3 * RATE))
    (times,) = grants.values()
    wait_until(lambda: len(times) == 3 * RATE, "all grants are seen")
    assert most_in_a_second(times) <= RATE
    nothing_is_left()


@counts_on_wake_ups("messages have their turn, one every five seconds")
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_killed_worker_and_killed_children_do_not_make_it_more(tasks, start_worker, ledger, grants, gate):
    """What they had begun has used its share of the rate, and is run again."""
    workers = [start_worker(2) for _ in range(2)]
    stuck = [tasks.rated.delay("k", f"stuck {number}", str(gate)) for number in range(4)]
    wait_until(lambda: len(ledger.running()) == 4, "all processes are busy")
    results = [tasks.rated.delay("k", number) for number in range(2 * RATE)]
    workers[0].kill()
    for child in workers[1].children():
        workers[1].kill_child(child.pid)
    gate.open()
    for result in [*stuck, *results]:
        assert result.get(timeout=PATIENCE) == "none"
    (times,) = grants.values()
    wait_until(lambda: len(times) >= 2 * RATE + 8, "all grants are seen")
    assert most_in_a_second(times) <= RATE


@counts_on_wake_ups("messages have their turn, one every five seconds")
@on_every_broker
def test_each_key_has_its_own_rate_and_its_messages_run_in_order(tasks, start_worker, ledger, grants, nothing_is_left):
    start_worker(1)  # else two that ask at the same moment may swap
    results = [tasks.rated_by_key.delay(key, f"{key} {number}") for number in range(4) for key in "ab"]
    for result in results:
        result.get(timeout=PATIENCE)
    runs = ledger.runs()
    for key in "ab":
        mine = [run for run in runs if run.key == key]
        assert [run.item for run in mine] == [f"{key} {number}" for number in range(4)]
    wait_until(lambda: [len(times) for times in grants.values()] == [4, 4], "all grants are seen")
    for times in map(sorted, grants.values()):
        assert min(times[2] - times[0], times[3] - times[1]) >= 2.8  # as above
    nothing_is_left()


@on_every_broker
class TestWhereItIsUsedUp:
    @pytest.fixture
    def used_up(self, start_worker):
        def use(task):
            worker = start_worker(2)
            for number in range(2):
                assert task.delay("k", number).get(timeout=PATIENCE) == "none"
            return worker

        return use

    def test_a_message_waits_in_line_and_holds_no_process(self, tasks, used_up):
        used_up(tasks.rated_slowly)
        waits = tasks.rated_slowly.delay("k", "waits")
        wait_until(lambda: waits.state == states.RETRY, "it waits")
        assert tasks.rated_slowly.delay("other").get(timeout=PATIENCE) == "none"
        info = tasks.rated_slowly.lock_info("k")
        assert (info.state, info.task, 0 < info.ttl <= 60) == ("spent", "lab.rated_slowly", True)
        assert str(LockConflict(info.key, info)).startswith(
            f"the lock {info.key} is held by its rate, which is used up for another "
        )

    def test_a_run_is_skipped_by_the_policy_skip(self, tasks, used_up):
        used_up(tasks.rated_skip)
        skipped = tasks.rated_skip.delay("k", "skipped")
        with pytest.raises(TaskRevokedError, match="the rate is used up"):
            skipped.get(timeout=PATIENCE)

    def test_a_run_fails_by_the_policy_raise(self, tasks, used_up):
        used_up(tasks.rated_raise)
        with pytest.raises(LockConflict, match="is held by its rate, which is used up for another"):
            tasks.rated_raise.delay("k", "fails").get(timeout=PATIENCE)

    def test_a_retry_counts_too(self, tasks, start_worker, ledger):
        start_worker(2)
        assert tasks.rated_slowly.delay("k", "again", 0, "retry").get(timeout=PATIENCE) == "none"
        assert ledger.items() == ["again", "again"]
        waits = tasks.rated_slowly.delay("k", "waits")
        wait_until(lambda: waits.state == states.RETRY, "it waits")


def test_a_rate_that_the_arguments_tell_is_checked_at_the_run(tasks, start_worker, ledger):
    start_worker(2)
    assert tasks.rated_by_call.delay("k", "1/m").get(timeout=PATIENCE) == "none"
    with pytest.raises(LockKeyError, match='lock_rate must return "100/m"'):
        tasks.rated_by_call.delay("k", "often").get(timeout=PATIENCE)
    assert ledger.items() == ["1/m"]


def test_a_run_that_had_waited_and_ends_with_ignore_does_not_stay_retry(tasks, start_worker):
    start_worker(1)
    for number in range(2):
        tasks.rated_by_key.delay("k", number)
    waits = tasks.rated_by_key.delay("k", "waits", 0, "ignore")
    wait_until(lambda: waits.state == states.RETRY, "it waits")
    wait_until(lambda: waits.state == states.IGNORED, "it has run")


def test_a_receiver_of_lock_acquired_has_nothing_to_extend(tasks):
    seen = []

    def extend(lock, **_):
        with pytest.raises(LockLost):
            lock.extend()
        seen.append(lock.key)

    lock_acquired.connect(extend)
    try:
        assert tasks.rated_slowly.apply(("k",)).get() == "none"
    finally:
        lock_acquired.disconnect(extend)
    assert len(seen) == 1


def test_an_eager_run_takes_its_share_and_there_is_no_lock_to_take(tasks):
    for _ in range(2):
        assert tasks.rated_slowly.apply(("k",), {}).get() == "none"
        assert tasks.rated_raise.apply(("k",), {}).get() == "none"
    with pytest.raises(LockConflict, match="its rate"):
        tasks.rated_raise.apply(("k",)).get()
    with pytest.raises(LockConfigError, match="has a lock_rate"):
        tasks.rated_slowly.lock_for("k")
