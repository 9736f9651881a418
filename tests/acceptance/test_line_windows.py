"""The line where the prefetch count of a consumer cannot grow: on RabbitMQ 4, and on quorum queues."""

from __future__ import annotations

import pytest

from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

pytestmark = pytest.mark.parametrize("broker", ["quorum", "rabbitmq 4"], indirect=True)


@counts_on_wake_ups("many messages have their turn, one every five seconds")
@pytest.mark.parametrize(
    ("slots", "multiplier", "pool"), [(1, 1, "prefork"), (4, 1, "prefork"), (2, 4, "prefork"), (4, 1, "threads")]
)
def test_the_owner_of_the_key_and_a_stranger_get_through_behind_many_more_waiters_than_the_worker_prefetches(
    config, start_worker, ledger, gate, slots, multiplier, pool
):
    config.settings["worker_prefetch_multiplier"] = multiplier
    config.settings["task_annotations"] = {"lab.shared_job": {"lock_key": "stock:{key}"}}
    app = make_app(config)
    others = [app.tasks["lab.keyed"].delay("k", number) for number in range(60)]
    stranger = app.tasks["lab.plain"].delay("stranger")
    owner = app.tasks["lab.shared_job"].delay("k", gate)
    assert app.tasks["lab.keyed"].lock_info("k").task_id == owner.id
    worker = start_worker(slots, "-P", pool)
    wait_until(lambda: "shared_job" in ledger.items() and stranger.ready(), "both get through")
    wait_until(lambda: kept(app) == 60, "all others wait")
    gate.open()
    wait_until(owner.ready, "the owner has ended")
    assert (owner.get(), stranger.get()) == ("shared_job", "plain")
    assert [result.get(timeout=20) for result in others] == list(range(60))
    ran = [run.item for run in ledger.runs() if run.key != "plain"]
    assert ran[0] == "shared_job"
    assert ran[1:] == [str(number) for number in range(60)]
    assert "; trying again in" not in worker.output()
    app.close()


def test_all_slots_stay_of_use_while_one_message_waits(tasks, start_worker, ledger, gate):
    start_worker(2)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        strangers = [tasks.work.delay(key, key, gate) for key in ("a", "b")]
        wait_until(lambda: len(ledger.running()) == 2, "two strangers run side by side")
        gate.open()
    for result in [*strangers, waits]:
        result.get(timeout=10)


def test_what_is_sent_back_with_a_pause_keeps_no_stranger_out(config, tasks, start_worker):
    """On classic queues, the worker itself keeps the message until the pause is over."""
    config.settings["redislock_waiting_limit"] = 0
    worker = start_worker(1)
    tasks.collected_debounced.delay("k")
    wait_until(lambda: "not due yet" in worker.output(), "it is sent back for a minute")
    for _ in range(3):
        stranger = tasks.plain.delay()
        wait_until(stranger.ready, "a stranger runs")


def test_a_message_that_waits_beside_plain_ones_with_a_countdown_keeps_no_stranger_out(config, tasks, start_worker):
    config.settings["worker_prefetch_multiplier"] = 4
    start_worker(1)
    later = [tasks.plain.apply_async(countdown=600) for _ in range(3)]
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        assert tasks.plain.delay().get(timeout=10) == "plain"
    assert waits.get(timeout=10) == "waits"
    assert not any(result.ready() for result in later)


def test_many_more_messages_with_a_countdown_than_the_worker_prefetches_keep_no_stranger_out(tasks, start_worker):
    """It starts one consumer after the other at once, and does not sleep for a second before each."""
    start_worker(1)
    for number in range(60):
        tasks.work.apply_async((number,), countdown=600)
    assert tasks.plain.delay().get(timeout=20) == "plain"
