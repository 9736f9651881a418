"""The line and Celery's `rate_limit`: who must wait uses no token, and takes one at its turn."""

from __future__ import annotations

import itertools
from statistics import median

import pytest
from celery.exceptions import TaskRevokedError

from tests.lab.app import make_app
from tests.lab.paces import tokens_noted
from tests.lab.servers import need_pool, wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import first_rank, kept, stands_in_line


@pytest.fixture
def limited(config):
    """Makes an app in which the task `lab.work` has a rate limit."""
    apps = []

    def make(rate):
        config.settings["task_annotations"] = {name: {"rate_limit": rate} for name in ("lab.work", "lab.once")}
        apps.append(make_app(config))
        return apps[-1].tasks["lab.work"]

    yield make
    for app in apps:
        app.close()


@counts_on_wake_ups("it counts how many run in a while")
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet", "solo"])
def test_those_who_wait_hold_no_stranger_up_and_run_in_order_as_often_as_the_limit_allows(
    limited, config, start_worker, ledger, pool
):
    rate = 2  # a second: the machine may be busy for longer than a quarter of one
    need_pool(pool)
    config.settings |= {"worker_prefetch_multiplier": 8, "lab_tokens": True}
    work = limited("2/m")
    start_worker(2, "-P", pool)
    with work.lock_for("k"):
        waiting = [work.delay("k", number) for number in range(10)]
        # The next token would come after half a minute: each of the ten has given its token back.
        work.delay("other", "stranger").get(timeout=25)
        wait_until(lambda: kept(work.app) == 10, "all wait")
        assert [tokens > 0 for tokens, _ in tokens_noted(ledger)] == 10 * [True, False] + [True]
        work.app.control.rate_limit("lab.work", f"{rate}/s", reply=True)
    for result in waiting:
        result.get(timeout=20)
    assert ledger.items() == ["stranger", *map(str, range(10))]
    taken = tokens_noted(ledger)[21:]
    assert [tokens for tokens, _ in taken] == 10 * [1], "no token is wasted, and none is used twice"
    pauses = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(taken)]
    assert min(pauses) > 0.999 / rate
    assert median(pauses) < 1.9 / rate, "no turn is wasted"


@counts_on_wake_ups("it has its turn five seconds later")
def test_who_has_its_turn_takes_the_next_token_before_those_that_have_not_waited(limited, config, start_worker, ledger):
    config.settings["worker_prefetch_multiplier"] = 8
    work = limited("2/s")
    start_worker(1)
    with work.lock_for("k"):
        waits = work.delay("k", "waits")
        wait_until(lambda: kept(work.app) == 1, "it waits")
        strangers = [work.delay(number, number) for number in range(16)]
        wait_until(lambda: len(ledger.items()) >= 2, "two strangers have run")
    had_run = len(ledger.items())
    waits.get(timeout=20)
    assert ledger.items().index("waits") <= had_run + 4
    for result in strangers:
        result.get(timeout=20)


def test_a_worker_whose_next_token_is_far_off_lets_another_worker_have_its_turn(limited, config, start_worker, ledger):
    work = limited("1/m")
    other = f"{config.queue}-other"
    start_worker(1)
    start_worker(1, "-Q", other)
    with work.lock_for("k"):
        waits = work.delay("k", "waits")
        wait_until(lambda: kept(work.app, 2) == 1, "it waits")
        assert work.delay("other", "takes the token").get(timeout=10)
        later = work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: kept(work.app, 2) == 2, "the later one waits in the other worker")
    assert later.get(timeout=20) == "later"
    assert ledger.items() == ["takes the token", "later"]
    work.app.control.rate_limit("lab.work", "100/s", reply=True)
    assert waits.get(timeout=20) == "waits"


@counts_on_wake_ups("the look that is held back is the one after the release")
def test_a_message_whose_token_is_taken_while_it_is_called_waits_on_and_another_worker_has_its_turn(
    lock_proxy, locks, limited, config, start_worker, ledger
):
    """Its call is held back, and another message of its task has taken the token meanwhile."""
    work = limited("1/m")
    other = f"{config.queue}-other"
    start_worker(1)
    start_worker(1, "-Q", other)
    with work.lock_for("k"):
        waits = work.delay("k", "waits")
        wait_until(lambda: kept(work.app, 2) == 1, "it waits")
        work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: kept(work.app, 2) == 2, "the later one waits in the other worker")
        wait_until(lambda: stands_in_line(locks.client, work, "k", 2), "each with its rank")
        first = str(first_rank(locks.client, work, "k")).encode()
        call = lock_proxy.hold(b"EVALSHA", first, before=True)  # not a look of the other worker
    call.wait()
    assert work.delay("other", "takes the token").get(timeout=10)
    call.let_go()
    wait_until(lambda: ledger.items() == ["takes the token", "later"], "the later one runs")
    wait_until(lambda: kept(work.app, 2) == 1, "it waits again")
    work.app.control.rate_limit("lab.work", "100/s", reply=True)
    assert waits.get(timeout=20) == "waits"


def test_duplicates_that_are_skipped_use_no_token(limited, start_worker, ledger):
    """The second token would come after a minute."""
    once = limited("1/m").app.tasks["lab.once"]
    start_worker(1)
    with once.lock_for("k"):
        for result in [once.delay("k") for _ in range(10)]:
            with pytest.raises(TaskRevokedError):
                result.get(timeout=20)


@counts_on_wake_ups("many messages have their turn, one every five seconds")
def test_a_limit_that_is_changed_holds_for_those_who_wait(limited, start_worker, ledger):
    work = limited("1/m")
    start_worker(1)
    with work.lock_for("k"):
        waiting = [work.delay("k", number) for number in range(5)]
        wait_until(lambda: kept(work.app) == 5, "all wait")
    assert waiting[0].get(timeout=20) == 0
    assert ledger.items() == ["0"]
    work.app.control.rate_limit("lab.work", "100/s", reply=True)
    assert [result.get(timeout=20) for result in waiting[1:]] == [1, 2, 3, 4]
