"""docs/migrating.md is true: beside celery-once and celery-singleton themselves, on real servers and workers.

The tasks ``shop.*`` are those that the page defines.
"""

from __future__ import annotations

import itertools
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import pytest
import redis
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult
from celery_once import AlreadyQueued
from celery_once.backends.redis import parse_url
from celery_singleton import DuplicateTaskError, Singleton, clear_locks
from celery_singleton.config import Config as SingletonConfig
from kombu.exceptions import SerializerNotInstalled

from celery_redislock import LockUnavailable
from celery_redislock.connection.connect import connect
from celery_redislock.options import KEY_OPTIONS, OPTIONS, SETTINGS
from celery_redislock.protocol.names import NOTE
from tests.conftest import IS_MATRIX
from tests.lab.kinds import needs_one_server
from tests.lab.moving import PAGE, Alarm, make_moving_app, make_step_app
from tests.lab.servers import free_port, wait_until
from tests.lab.wake_ups import A_MINUTE, counts_on_wake_ups
from tests.lab.workers import kept, worker

pytestmark = needs_one_server("celery-once and celery-singleton lock on the same server, and know no Cluster")
#: Of the READMEs: the task there and on the page, calls that are sent, calls that are duplicates of them, the result.
EXAMPLES = [
    ("once.slow_task", "shop.slow_task", [()], [], "Done!"),
    ("once.graceful", "shop.slow_task", [()], [], "Done!"),
    ("once.slow_add", "shop.slow_add", [(1, 1), (1, 2)], [], None),
    ("once.add_by_a", "shop.add_by_a", [(1, 1), (2, 2)], [(1, 2)], None),
    ("once.add_alone", "shop.add_alone", [(1, 1)], [(2, 2)], None),
    ("once.long_running_task", "shop.long_running_task", [()], [], None),
    ("once.example_task", "shop.example_task", [(1,)], [], 1),
    ("singleton.do_stuff", "shop.do_stuff", [(1, 2, 3), (4, 5, 6)], [], "I just woke up"),
    ("singleton.do_something", "shop.do_something", [("bob", 99), ("eve", 99)], [("bob", 100)], None),
    ("singleton.do_or_raise", "shop.do_or_raise", [("bob",), ("eve",)], [], None),
]


@pytest.fixture(autouse=True)
def fresh_clients(monkeypatch):
    """Both plugins keep one client for ever, whatever the app."""
    monkeypatch.setattr("celery_once.backends.redis.redis", None)
    monkeypatch.setattr("celery_singleton.backends._backend", None)


@pytest.fixture
def start(config, tmp_path):
    with ExitStack() as stack:
        yield lambda config=config, concurrency=4: stack.enter_context(
            worker(config, tmp_path, concurrency, app="tests.lab.moving")
        )


@pytest.fixture
def alarm(config):
    return Alarm(config)


@pytest.fixture
def moving(config):
    app = make_moving_app(config)
    yield app
    app.close()


@pytest.fixture
def keys(locks):
    """The locks in Redis and how long they live; notes that a run is over are none."""
    client = locks.client
    return lambda: {key.decode(): client.ttl(key) for key in client.scan_iter() if NOTE.encode() not in key}


_seen: set[str] = set()


def publish(task, *args, **kwargs):
    """The result, or None where it is told to be a duplicate, however that is."""
    try:
        result = task.delay(*args, **kwargs)
    except (AlreadyQueued, DuplicateTaskError):
        return None
    except Exception as error:
        if type(error).__name__ != "AlreadyQueued":  # of the page
            raise
        return None
    if isinstance(result, EagerResult) or getattr(result, "duplicate", False):
        return None
    if result.id in _seen:  # celery-singleton's way
        return None
    _seen.add(result.id)
    return result


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
def test_an_example_has_the_same_outcome_before_and_after(moving, start, alarm, keys, example):
    before, after, firsts, duplicates, result = example
    start()
    for name in (before, after):
        task = moving.tasks[name]
        first = [publish(task, *args) for args in firsts]
        assert None not in first
        for args in [*firsts, *duplicates]:
            assert publish(task, *args) is None
        alarm.ring()
        values = [one.get(timeout=10) for one in first]
        if result is not None:
            assert values == [result] * len(firsts)
        wait_until(lambda: keys() == {}, "the keys are free")
        alarm.stop()
        again = publish(task, *firsts[0])
        assert again is not None
        alarm.ring()
        assert again.get(timeout=10) == values[0]
        wait_until(lambda: keys() == {}, "the keys are free")
        alarm.stop()


def test_the_duplicate_has_the_existing_result_and_says_so(moving):
    for name in ("once.graceful", "singleton.do_stuff", "shop.slow_task"):
        task = moving.tasks[name]
        first, second = task.delay(), task.delay()
        if name == "once.graceful":
            assert (second.id, second.state) == (None, "REJECTED")
        else:
            assert second.id == first.id
            told = [getattr(result, "duplicate", None) for result in (first, second)]
            assert told == ([False, True] if name == "shop.slow_task" else [None, None])


def test_code_that_expects_an_error_gets_one_with_the_existing_id(moving, capsys):
    page = moving.conf.lab_page
    first = page["do_or_raise"].delay("bob")
    with pytest.raises(page["AlreadyQueued"]) as error:
        page["do_or_raise"].delay("bob")
    before = moving.tasks["singleton.do_or_raise"].delay("bob")
    with pytest.raises(DuplicateTaskError) as before_error:
        moving.tasks["singleton.do_or_raise"].delay("bob")
    assert (error.value.task_id, before_error.value.task_id) == (first.id, before.id)
    assert page["start"](1, 2).duplicate is False
    assert page["start"](1, 2).duplicate is True
    assert "already queued" in capsys.readouterr().out
    assert 3500 < page["slow_add"].lock_info(1, 2).ttl <= 3600


def test_unlock_before_run_lets_one_wait_and_with_us_no_two_run(moving, start, alarm, ledger, keys):
    worker = start()
    for name, running in (("once.unlocked", 2), ("shop.unlocked", 1)):
        task = moving.tasks[name]
        first = publish(task)
        wait_until(lambda: ledger.running(), "the first runs")
        second = publish(task)
        assert second is not None
        if running == 1:
            assert publish(task) is None
            met = f"{name}[{second.id}]: lock"
            wait_until(lambda: met in worker.output(), "the second has met the first")  # noqa: B023
        else:
            wait_until(lambda: len(ledger.running()) == 2, "both run")
        assert len(ledger.running()) == running
        alarm.ring()
        assert [first.get(timeout=10), second.get(timeout=10)] == ["Done!"] * 2
        wait_until(lambda: keys() == {}, "the keys are free")
        alarm.stop()


def test_a_second_one_runs_beside_one_that_takes_too_long(config, start, alarm, ledger, keys):
    """`lock_expiry`, shortened as the two options are here."""
    config.settings["task_annotations"] = {"shop.runs_for_12_seconds": {"lock_max_hold": 2, "lock_lease": 4}}
    app = make_moving_app(config)
    start()
    for name in ("singleton.runs_for_12_seconds", "shop.runs_for_12_seconds"):
        task = app.tasks[name]
        results = [publish(task)]
        wait_until(ledger.running, "the first runs")
        assert publish(task) is None
        wait_until(lambda: results.append(publish(task)) or results[-1], "its key has ended")  # noqa: B023
        wait_until(lambda: len(ledger.running()) == 2, "both run")
        alarm.ring()
        assert [results[0].get(timeout=10), results[-1].get(timeout=10)] == [None, None]
        wait_until(lambda: keys() == {}, "the keys are free")
        alarm.stop()
    app.close()


def test_after_a_crash_their_keys_stay_and_ours_end(config, start, ledger, keys):
    config.settings["redislock_lease"] = 2.0
    config.settings["task_annotations"] = {"shop.runs_for_12_seconds": {"lock_lease": 2.0}}
    app = make_moving_app(config)
    tasks = [app.tasks[name] for name in ("once.slow_task", "singleton.do_stuff", "shop.slow_task")]
    worker = start()
    for task in tasks:
        assert publish(task) is not None
    wait_until(lambda: len(ledger.running()) == 3, "all run")
    worker.kill()
    wait_until(lambda: publish(tasks[2]) is not None, "our key has ended")
    assert [publish(task) for task in tasks[:2]] == [None, None]
    stay = {key: ttl for key, ttl in keys().items() if not key.startswith("redislock")}
    assert sorted(ttl == -1 for ttl in stay.values()) == [False, True]  # celery-singleton's has no end
    clear_locks(app)
    assert publish(tasks[1]) is not None
    app.close()


def test_before_the_start_a_revoke_frees_our_key_only(moving, start, keys):
    worker = start()
    for name in ("once.slow_task", "singleton.do_stuff", "shop.slow_task"):
        moving.control.revoke(name)
        wait_until(lambda: f"Tasks flagged as revoked: {name}" in worker.output(), "the worker knows")  # noqa: B023
        moving.tasks[name].apply_async(task_id=name)
    wait_until(lambda: sum("Discarding" in line for line in worker.output().splitlines()) == 3, "all are revoked")
    wait_until(lambda: not any(key.startswith("redislock") for key in keys()), "ours is free")
    assert len(keys()) == 2


def test_a_retry_keeps_the_key_and_celery_singleton_never_sends_it(moving, start, keys, config, broker_server):
    start()
    for plugin in ("once", "shop"):
        assert moving.tasks[f"{plugin}.retries"].delay().get(timeout=10) == "retried"
        wait_until(lambda: keys() == {}, "its key is free")
    lost = moving.tasks["singleton.retries"].delay()
    wait_until(lambda: lost.state == "RETRY", "it has retried")
    assert moving.tasks["shop.retries"].delay().get(timeout=10) == "retried"  # published later, with the same countdown
    assert lost.state == "RETRY"
    assert broker_server.client.llen(config.queue) == 0
    wait_until(lambda: len(keys()) == 1, "ours is free")
    assert moving.tasks["singleton.retries"].delay().id == lost.id


def test_the_same_call_has_one_key_however_it_is_written(moving):
    page = moving.conf.lab_page
    calls = [((1,), {}), ((), {"username": 1}), ((1,), {"otherarg": None})]
    assert len({page["do_something"].lock_for(*args, **kwargs).name for args, kwargs in calls}) == 1
    calls = [((1,), {}), ((), {"a": 1}), ((1,), {"b": 2})]
    assert _distinct(moving.tasks["once.defaults"].get_key, calls) == 2
    singleton = moving.tasks["singleton.defaults"]
    assert _distinct(lambda args, kwargs: singleton.generate_lock("x", args, kwargs), calls) == 3
    texts = [((1,), {}), (("1",), {})]
    assert _distinct(moving.tasks["once.defaults"].get_key, texts) == 1
    assert _distinct(lambda args, kwargs: singleton.generate_lock("x", args, kwargs), texts) == 2
    assert len({page["do_something"].lock_for(*args).name for args, _ in texts}) == 2


def _distinct(key_of, calls):
    return len({key_of(args, kwargs) for args, kwargs in calls})


def test_an_argument_that_was_not_passed_counts_by_its_default(moving):
    """`keys` and `unique_on` raise KeyError from `delay()`."""
    add, greet = moving.tasks["once.by_default"], moving.tasks["singleton.by_default"]
    for task in (add, greet):
        with pytest.raises(KeyError):
            task.delay(1)
    page = moving.conf.lab_page
    assert page["do_something"].delay("bob").duplicate is False


def test_with_a_link_theirs_are_refused_or_lose_it_and_ours_is_sent(moving, start, alarm, ledger):
    start()
    link = moving.tasks["shop.slow_add"].si(2, 3)
    once, singleton, ours = (moving.tasks[name] for name in ("once.add_by_a", "singleton.do_stuff", "shop.add_by_a"))
    once.delay(1, 1)
    with pytest.raises(AlreadyQueued):
        once.apply_async((1, 2), link=link)
    first = singleton.delay(1)
    assert singleton.apply_async((1,), link=link).id == first.id
    first_of_ours = ours.delay(1, 1)
    wait_until(lambda: len(ledger.running()) == 3, "they run")
    linked = ours.apply_async((1, 2), link=link)
    assert linked.id != first_of_ours.id
    alarm.ring()
    assert [first_of_ours.get(timeout=10), linked.get(timeout=10)] == [2, 3]
    wait_until(lambda: [run.key for run in ledger.runs()].count("shop.slow_add") == 1, "the link runs, once")


def test_where_all_arguments_make_the_key_one_that_had_to_be_sent_is_skipped(moving, start, alarm, ledger):
    start()
    task = moving.tasks["shop.slow_task"]
    first = task.delay()
    wait_until(ledger.running, "it runs")
    with pytest.raises(TaskRevokedError, match=f"duplicate of {first.id}"):
        task.apply_async(task_id="mine").get(timeout=10)


def test_what_was_published_before_is_skipped_for_what_was_published_since(moving, start, alarm, ledger):
    """All arguments make the key. To us, an old message is as one that was sent by name."""
    before = moving.send_task("shop.slow_task")
    since = moving.tasks["shop.slow_task"].delay()
    assert since.duplicate is False
    start()
    with pytest.raises(TaskRevokedError, match=f"duplicate of {since.id}"):
        before.get(timeout=10)
    alarm.ring()
    assert since.get(timeout=10) == "Done!"
    assert len(ledger.runs()) == 1


def test_once_in_apply_async_does_nothing_here(moving, start, alarm):
    alarm.ring()
    start()
    assert moving.tasks["shop.slow_add"].apply_async((1, 2), once={"graceful": True}).get(timeout=10) == 3


def test_the_url_of_a_socket_is_spelled_otherwise():
    assert parse_url("redis+socket:///path?db=1") == {"unix_socket_path": "/path", "db": 1}
    ours = connect("unix:///path?db=1", {}).connection_pool.connection_kwargs
    assert (ours["path"], ours["db"]) == ("/path", 1)


def test_sent_by_name_theirs_has_no_lock_and_ours_takes_it_when_it_starts(moving, start, ledger, keys):
    start()
    for number, name in enumerate(("once.slow_task", "singleton.do_stuff", "shop.slow_task"), 1):
        moving.send_task(name)
        wait_until(lambda: len(ledger.running()) == number, "it runs")  # noqa: B023
    (key,) = keys()
    assert key.startswith("redislock")
    assert moving.tasks["shop.slow_task"].delay().duplicate is True


def test_a_publish_that_fails_leaves_the_key_of_celery_once_only(moving, keys):
    for name in ("once.slow_task", "singleton.do_stuff", "shop.slow_task"):
        with pytest.raises(SerializerNotInstalled):
            moving.tasks[name].apply_async(serializer="none")
    assert list(keys()) == ["qo_once.slow_task"]


def test_without_redis_theirs_raise_at_the_publish_and_ours_only_if_told_to(config):
    config.locks = f"redis://127.0.0.1:{free_port()}/0"
    app = make_moving_app(config)
    for name in ("once.slow_task", "singleton.do_stuff"):
        with pytest.raises(redis.ConnectionError):
            app.tasks[name].delay()
    assert app.tasks["shop.slow_task"].delay().duplicate is False
    app.close()
    config.settings["redislock_on_outage"] = "raise"
    app = make_moving_app(config)
    with pytest.raises(LockUnavailable):
        app.tasks["shop.slow_task"].delay()
    app.close()


def test_apply_frees_the_key_of_others_with_them_and_with_us_takes_it(moving, alarm, keys):
    alarm.ring()
    once, singleton, ours = (moving.tasks[name] for name in ("once.slow_task", "singleton.do_stuff", "shop.slow_task"))
    for task in (once, singleton):
        task.delay()
        task.apply()
        assert keys() == {}
    queued = ours.delay()
    with pytest.raises(TaskRevokedError, match=f"duplicate of {queued.id}"):
        ours.apply(throw=True)
    assert len(keys()) == 1


def test_ignore_frees_our_key_only(moving, start, keys):
    for plugin in ("once", "singleton", "shop"):
        moving.tasks[f"{plugin}.ignores"].delay()
    assert len(keys()) == 3
    start(concurrency=1)  # so that ours is the last
    wait_until(lambda: len(keys()) == 2, "ours is free")
    assert {key.split("_")[0] for key in keys()} == {"qo", "SINGLETONLOCK"}


def test_every_option_on_the_page_is_ours_and_every_one_of_theirs_is_there():
    text = PAGE.read_text()
    ours = {f"lock_{name}" for name in {**KEY_OPTIONS, **OPTIONS}} | {"lock_for", "lock_info", "lock_expiry"}
    ours |= {f"redislock_{name}" for name in {**SETTINGS, **OPTIONS}}
    assert set(re.findall(r"\b(?:lock|redislock)_\w+", text)) <= ours
    theirs = {"keys", "graceful", "timeout", "unlock_before_run", "default_timeout", "blocking", "blocking_timeout"}
    theirs |= {name for name in vars(Singleton) if name in {"unique_on", "raise_on_duplicate", "lock_expiry"}}
    theirs |= {f"singleton_{name}" for name, value in vars(SingletonConfig).items() if isinstance(value, property)}
    assert [name for name in theirs if name not in text] == []


class Site:
    """The processes of a system of which one task is brought over: publishers here, and real workers."""

    def __init__(self, config, plugin, start, ledger, broker_server):
        self.ledger = ledger
        self._broker_server = broker_server
        self.sent = []
        self._configs = {step: replace(config, settings={"lab_step": [plugin, step]}) for step in STEPS}
        self._start = start
        self._apps = {step: make_step_app(config, plugin, step) for step in STEPS}

    def start(self, step):
        return self._start(self._configs[step], 2)

    def publish(self, step, key, seconds=0.05):
        result = publish(self._apps[step].tasks["shop.sync"], key, seconds)
        if result is not None:
            self.sent.append(result.id)
        return result

    def publish_for_all(self, *steps):
        for _ in range(10):
            for key in KEYS:
                for step in steps:
                    self.publish(step, key)

    def wait_until_all_have_run(self):
        wait_until(lambda: set(self.sent) <= {run.item for run in self.ledger.runs()}, "all that was sent has run")
        wait_until(lambda: self.ledger.running() == [], "all has ended")

    def wait_until_all_is_acked(self):
        """Else a worker that is stopped now gives a message back that has run, and an old one runs it once more."""
        with self._broker_server.connect() as broker:
            wait_until(lambda: broker.hlen("unacked") == 0, "all is acked: the workers are idle")

    def wait_until_none_is_refused(self, step):
        """Not one key has been left behind that this publisher looks at."""
        for key in KEYS:
            wait_until(lambda: self.publish(step, key), f"{step} publishes {key}", 10)  # noqa: B023

    def check(self):
        self.wait_until_all_have_run()
        assert self.ledger.overlaps() == []
        assert sorted(self.ledger.items()) == sorted(self.sent)  # each once

    def close(self):
        for app in self._apps.values():
            app.close()


STEPS = ["Before", "Both", "Moving", "LockedTask"]
KEYS = ["a", "b", "c"]


PLUGINS = ["once", "singleton"]
#: To a lock of ours and back; `make matrix` does both with each plugin.
WAYS = {"there": STEPS, "back": STEPS[::-1]}
MOVES = [*itertools.product(PLUGINS, WAYS)] if IS_MATRIX else [*zip(PLUGINS, WAYS, strict=True)]


@pytest.fixture(params=PLUGINS)
def site(request, config, start, ledger, broker_server):
    site = Site(config, request.param, start, ledger, broker_server)
    yield site
    site.close()


@counts_on_wake_ups(A_MINUTE)
@pytest.mark.parametrize(("site", "way"), MOVES, indirect=["site"])
def test_in_three_deployments_no_two_runs_overlap_and_none_is_lost(site, way):
    """In each, publishers of both kinds publish, while the workers are replaced one by one, each when it is idle."""
    way = WAYS[way]
    workers = [site.start(way[0]), site.start(way[0])]
    for step, following in pairwise(way):
        for number in range(2):
            site.wait_until_all_is_acked()
            workers[number].stop()
            site.publish_for_all(step, following)
            workers[number] = site.start(following)
            site.publish_for_all(step, following)
            site.wait_until_all_have_run()
        for publisher in (step, following):  # the last old one may still be there
            site.wait_until_none_is_refused(publisher)
        site.wait_until_all_have_run()
    site.check()


@counts_on_wake_ups(A_MINUTE)
def test_with_a_pause_no_two_runs_overlap_and_none_is_lost(site, gate):
    worker = site.start("Before")
    running = site.publish("Before", "a", gate)
    wait_until(site.ledger.running, "one runs")
    site.wait_until_all_is_acked()
    worker.begin_to_stop()
    gate.open()
    worker.wait()
    assert running.get(timeout=10) == "a"
    waiting = [site.publish("Before", key) for key in KEYS]
    both = [site.publish(step, "a") for step in ("Before", "LockedTask")]
    assert [result is None for result in both] == [True, False]
    site.start("LockedTask")
    assert [result.get(timeout=10) for result in [*waiting, both[1]]] == [*KEYS, "a"]
    site.wait_until_none_is_refused("LockedTask")
    site.check()


def test_an_old_publisher_is_refused_once_a_new_worker_has_run_its_message(site, locks):
    """Why `Moving` comes before `LockedTask`, why no old publisher may be left, and why old keys are deleted."""
    site.start("LockedTask")
    for step in ("Before", "Both"):
        assert site.publish(step, "a").get(timeout=10) == "a"
        assert site.publish(step, "a") is None
        locks.client.delete(*locks.client.keys("qo_*"), *locks.client.keys("SINGLETONLOCK_*"))
    assert site.publish("Before", "a").get(timeout=10) == "a"


def test_an_old_worker_does_not_know_our_lock(site, locks, gate):
    """Why `Both` comes first: their runs overlap, and the key of the job stays."""
    site.start("Before")
    first = site.publish("LockedTask", "a", gate)
    wait_until(site.ledger.running, "the first runs")
    assert site.publish("Before", "a").get(timeout=10) == "a"
    gate.open()
    assert first.get(timeout=10) == "a"
    assert len(site.ledger.overlaps()) == 1
    assert locks.client.keys("redislock:*")
    assert site.publish("LockedTask", "a").get(timeout=10) == "a"  # the job's result tells that it has ended


def test_what_waits_in_both_is_not_refused_by_its_own_old_key(site, locks, gate):
    """`lock_on_conflict="wait"`, where the old key has lapsed under the first run."""
    site.start("Both")
    first = site.publish("Both", "a", gate)
    wait_until(site.ledger.running, "the first runs")
    assert site.publish("LockedTask", "a") is None  # it knows our lock
    locks.client.delete(*locks.client.keys("qo_*"), *locks.client.keys("SINGLETONLOCK_*"))
    second = site.publish("Both", "a")
    wait_until(lambda: kept(second.app) == 1, "the second waits")
    gate.open()
    assert [result.get(timeout=10) for result in (first, second)] == ["a", "a"]
    site.check()
