"""Publishing in the scopes job and queue, on a real lock server and broker; no worker runs."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import Celery, Task, chain, chord, group, states
from kombu.exceptions import OperationalError

from celery_redislock import LockedResult, LockedTask, LockKeyError, LockUnavailable, signals
from celery_redislock.app import server_of
from celery_redislock.connection.store import LockStore
from celery_redislock.policy.conflict import on_outstanding
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Outstanding
from celery_redislock.protocol.scripts import ACQUIRE, Passed
from celery_redislock.protocol.tokens import Attempt, Token
from celery_redislock.task import publish
from celery_redislock.testing import busy
from tests.conftest import IS_MATRIX
from tests.lab.app import Config, make_app
from tests.lab.servers import free_port, wait_until

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

SCOPES = ["job", "queued"]


@pytest.fixture
def waiting(config, broker_server):
    """How many messages wait in the queue."""
    return lambda: broker_server.client.llen(config.queue)


@pytest.fixture
def ttl(locks):
    """Seconds that the only key lives."""

    def look():
        (key,) = locks.client.keys()
        return locks.client.pttl(key) / 1000

    return look


@pytest.fixture
def conflicts():
    """The conflicts that were announced in this process."""
    seen = []

    def note(**arguments):
        seen.append(arguments)

    signals.lock_conflict.connect(note)
    yield seen
    signals.lock_conflict.disconnect(note)


@pytest.mark.parametrize("name", SCOPES)
def test_a_duplicate_publish_returns_the_existing_result_and_sends_nothing(name, tasks, waiting, conflicts, log):
    task = getattr(tasks, name)
    first = task.delay("k", "first")
    assert (first.duplicate, waiting()) == (False, 1)
    for second in (task.delay("k", "second"), task.apply_async(kwargs={"key": "k"}, countdown=5, priority=3)):
        assert (second.id, second.duplicate) == (first.id, True)
    assert waiting() == 1
    (one, _) = conflicts
    assert (one["sender"].name, one["policy"], one["holder"].task_id) == (task.name, "return existing", first.id)
    assert one["holder"].state == "queued"
    assert f"task {task.name}: lock {one['key']} is held by task {first.id}, queued by " in log.text
    assert "second" not in log.text
    assert task.delay("other").duplicate is False


def test_a_duplicate_of_a_task_whose_id_is_too_long_for_a_token_is_sent(tasks, waiting):
    """Nobody could tell it the whole id, by which alone its result is found."""
    tasks.job.apply_async(("k", "first"), task_id="i" * 1000)
    assert tasks.job.delay("k", "second").duplicate is False
    assert waiting() == 2


def _do_nothing() -> None: ...


@pytest.mark.parametrize("scope", ["job", "queue"])
@pytest.mark.parametrize("name", ["n" * 201, "\u00e4" * 300])
def test_a_duplicate_of_a_task_whose_name_is_too_long_for_a_token_is_not_sent(scope, name, app, waiting):
    task = app.task(base=LockedTask, lock_scope=scope, name=name, shared=False)(_do_nothing)
    first = task.delay()
    assert [(again.id, again.duplicate) for again in (task.delay(), task.delay())] == [(first.id, True)] * 2
    assert waiting() == 1


def test_a_publish_in_scope_run_is_no_duplicate_and_asks_redis_nothing(tasks, waiting, locks):
    locks.client.config_resetstat()
    results = [tasks.work.delay("k") for _ in range(2)]
    assert [result.duplicate for result in results] == [False, False]
    assert all(isinstance(result, LockedResult) for result in results)
    assert waiting() == 2
    assert "cmdstat_evalsha" not in locks.client.info("commandstats")


@pytest.mark.parametrize("name", SCOPES)
def test_a_publish_takes_two_round_trips_and_a_duplicate_one(name, tasks, locks):
    task = getattr(tasks, name)
    task.delay("warm")  # the scripts are loaded
    locks.client.config_resetstat()
    task.delay("k")
    assert locks.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2
    task.delay("k")
    assert locks.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3


def continued(task, plain, key="k"):
    """Publishes of a duplicate that somebody waits for, or that must go on; how many messages each sends."""
    return {
        "task_id": (lambda: task.apply_async((key,), task_id="mine"), 1),
        "parent_id": (lambda: task.apply_async((key,), parent_id="parent", root_id="root"), 1),
        "link": (lambda: task.apply_async((key,), link=plain.si()), 1),
        "link_error": (lambda: task.apply_async((key,), link_error=plain.si()), 1),
        "chain": (lambda: chain(task.si(key), plain.si()).apply_async(), 1),
        "group": (lambda: group(task.si(key), task.si(key)).apply_async(), 2),
        "chord": (lambda: chord([task.si(key), plain.si()])(plain.si()), 2),
    }


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("how", ["task_id", "parent_id", "link", "link_error", "chain", "group", "chord"])
def test_only_a_bare_publish_is_answered_with_anothers_result(name, how, tasks, waiting):
    task = getattr(tasks, name)
    first = task.delay("k")
    publish, messages = continued(task, tasks.plain)[how]
    result = publish()
    assert waiting() == 1 + messages
    assert first.id not in {result.id, *(child.id for child in result.children or ())}


def test_a_continued_publish_takes_a_free_key_too(tasks, waiting):
    chained = chain(tasks.job.si("k"), tasks.plain.si()).apply_async()
    later = tasks.job.delay("k")
    assert (later.duplicate, later.id, waiting()) == (True, chained.parent.id, 1)


@pytest.mark.parametrize("name", SCOPES)
def test_where_the_broker_is_stopped_fifty_callers_get_fifty_errors(name, config, locks):
    """None is answered with the id of a task that another caller could not send."""
    config.broker = f"redis://127.0.0.1:{free_port()}/0"
    config.settings["broker_transport_options"] = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    task = make_app(config).tasks[f"lab.{name}"]
    with ThreadPoolExecutor(50) as callers:
        errors = [call.exception() for call in [callers.submit(task.delay, "k") for _ in range(50)]]
    assert {type(error) for error in errors} == {OperationalError}
    assert locks.client.keys() == []


class TestTheKeyOfAMessage:
    def test_lives_for_lock_queue_ttl(self, tasks, ttl):
        tasks.job.delay("k")
        assert 3590 < ttl() <= 3600

    @pytest.mark.parametrize(
        "delay",
        [
            {"countdown": 500},
            {"eta": datetime.now(UTC) + timedelta(seconds=500)},
            {"eta": (datetime.now(UTC) + timedelta(seconds=500)).isoformat()},
        ],
        ids=["countdown", "eta", "eta as text"],
    )
    def test_lives_longer_by_a_countdown_or_eta(self, tasks, ttl, delay):
        """The etas were made when the tests were collected."""
        tasks.job.apply_async(("k",), **delay)
        assert 3600 < ttl() <= 4100

    def test_lives_longer_by_an_eta_that_is_a_date(self, tasks, ttl, waiting):
        """Celery sends whatever has an `isoformat`; the worker reads it as that day's midnight."""
        result = tasks.job.apply_async(("k",), eta=datetime.now(UTC).date() + timedelta(days=2))
        assert (result.duplicate, waiting()) == (False, 1)
        assert 3600 + 24 * 3600 < ttl() <= 3600 + 48 * 3600

    @pytest.mark.parametrize("eta", ["tomorrow", datetime.now(UTC).time()], ids=["no moment", "a time"])
    def test_lives_as_ever_where_only_the_worker_will_refuse_an_eta(self, tasks, ttl, waiting, eta):
        result = tasks.job.apply_async(("k",), eta=eta)
        assert (result.duplicate, waiting()) == (False, 1)
        assert 3590 < ttl() <= 3600

    @pytest.mark.parametrize("refused", [{"expires": date(2100, 1, 1)}, {"eta": 5}, {"countdown": "5"}], ids=repr)
    def test_is_free_where_celery_refuses_a_moment(self, tasks, locks, waiting, refused):
        with pytest.raises((TypeError, AttributeError)):
            tasks.job.apply_async(("k",), **refused)
        assert (locks.client.keys(), waiting()) == ([], 0)

    @pytest.mark.parametrize(
        "expires",
        [20, 20.5, timedelta(seconds=20), "text"],
        ids=["int", "float", "datetime", "text"],
    )
    def test_lives_no_longer_than_until_its_message_expires(self, tasks, ttl, expires):
        moment = datetime.now(UTC) + timedelta(seconds=20)
        expires = {"text": moment.isoformat()}.get(expires, moment) if not isinstance(expires, int | float) else expires
        tasks.job.apply_async(("k",), countdown=5, expires=expires)
        assert 0 < ttl() <= 20.5

    def test_lives_no_longer_than_the_tasks_own_expires(self, tasks, ttl):
        tasks.job.expires = 20
        try:
            tasks.job.delay("k")
            assert 0 < ttl() <= 20
        finally:
            del tasks.job.expires

    def test_is_taken_over_if_its_publisher_died_before_it_sent_the_message(self, config, locks, waiting):
        """It would otherwise block the job for a lease, and callers would get the id of a task that never runs."""
        spawn = multiprocessing.get_context("spawn")
        started, never = spawn.Event(), spawn.Event()
        publisher = spawn.Process(target=publish_slowly, args=(config.dump(), started, never))
        publisher.start()
        assert started.wait(30)
        os.kill(publisher.pid, signal.SIGKILL)
        publisher.join()
        (key,) = locks.client.keys()
        assert 0 < locks.client.ttl(key) <= 30
        app = make_app(config)
        assert app.tasks["lab.job"].lock_info("k").state == "sending"
        again = app.tasks["lab.job"].delay("k")
        assert (again.duplicate, waiting()) == (False, 1)
        assert (app.tasks["lab.job"].delay("k").id, waiting()) == (again.id, 1)
        assert locks.client.ttl(key) > 30

    @pytest.mark.parametrize("name", SCOPES)
    def test_is_free_before_the_error_of_a_failed_publish_leaves(self, name, config, locks):
        config.broker = f"redis://127.0.0.1:{free_port()}/0"
        config.settings["broker_transport_options"] = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
        task = make_app(config).tasks[f"lab.{name}"]
        with pytest.raises(OperationalError):
            task.delay("k")
        assert locks.client.keys() == []

    def test_of_a_failed_publish_is_free_once_the_lock_server_answers_again(
        self, lock_proxy, tasks, locks, monkeypatch
    ):
        """As where one server is the broker and the lock server: both are away."""

        def fail(*args, **kwargs):
            lock_proxy.refuse()
            refuse_to_send()

        monkeypatch.setattr(tasks.job.app, "send_task", fail)
        with pytest.raises(OperationalError):
            tasks.job.delay("k")
        (key,) = locks.client.keys()
        locks.client.persist(key)
        lock_proxy.mend()
        wait_until(lambda: locks.client.keys() == [], "the key is free")

    def test_is_free_where_a_publish_is_interrupted(self, tasks, locks, monkeypatch):
        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(tasks.job.app, "send_task", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tasks.job.delay("k")
        assert locks.client.keys() == []

    def test_is_never_taken_for_arguments_that_are_refused(self, tasks, locks, waiting):
        with pytest.raises(TypeError):
            tasks.job.delay("k", nonsense=1)
        with pytest.raises(LockKeyError, match="parameter 'key' cannot be part of a lock key"):
            tasks.job.delay(object())
        assert (locks.client.keys(), waiting()) == ([], 0)


def refuse_to_send(*args, **kwargs):
    """What `send_task` does where the broker is away."""
    raise OperationalError("the broker is away")


def publish_slowly(config: str, started, goes_on) -> None:
    """Publish a message that reaches the broker only once the event `goes_on` is set."""
    import json

    app = make_app(Config(**json.loads(config)))
    send = app.send_task

    def send_late(*args, **kwargs):
        started.set()
        goes_on.wait(60)
        return send(*args, **kwargs)

    app.send_task = send_late
    app.tasks["lab.job"].delay("k")


class TestHolders:
    def test_a_lock_outside_tasks_is_no_existing_job(self, tasks, waiting):
        with busy(tasks.job.lock_for("k")):
            result = tasks.job.delay("k")
        assert (result.duplicate, waiting()) == (False, 1)

    def test_a_run_by_apply_is_no_existing_job(self, app, tasks, waiting):
        """Nobody else can read its result: get() would wait for ever."""
        published = []

        @app.task(base=LockedTask, bind=True, lock_key="eager", lock_scope="job", lock_cooldown=60.0)
        def publishes(self):
            with ThreadPoolExecutor(1) as others:
                published.extend(others.submit(self.delay).result() for _ in range(2))

        @app.task(base=LockedTask, lock_key="cooling", lock_scope="job", lock_cooldown=60.0)
        def cools_down():
            pass

        publishes.apply()
        cools_down.apply()
        published.append(cools_down.delay())
        assert [result.duplicate for result in published] == [False, True, False]
        assert published[1].id == published[0].id
        assert waiting() == 2

    def test_another_task_that_shares_the_key_is_no_existing_job(self, tasks, waiting):
        first = tasks.shared_job.delay("k")
        second = tasks.shared_job_too.delay("k")
        assert (second.duplicate, waiting()) == (False, 2)
        assert (tasks.shared_job.delay("k").id, tasks.shared_job_too.delay("k").id) == (first.id, second.id)

    def test_in_scope_queue_the_place_is_apart_from_the_running_ones_key(self, tasks, waiting, locks):
        with busy(tasks.queued.lock_for("k")):
            first = tasks.queued.delay("k")
            assert (first.duplicate, waiting()) == (False, 1)
            assert tasks.queued.delay("k").id == first.id
        assert waiting() == 1


class TestOutage:
    @pytest.fixture(autouse=True)
    def redis_is_away(self, config):
        config.locks = f"redis://127.0.0.1:{free_port()}/0"

    @pytest.mark.parametrize("policy", ["retry", "run"])
    def test_the_message_is_sent_without_the_key(self, config, waiting, policy):
        config.settings["redislock_on_outage"] = policy
        seen = []
        signals.lock_unavailable.connect(lambda error, **_: seen.append(error), weak=False, dispatch_uid="t")
        try:
            result = make_app(config).tasks["lab.job"].delay("k")
        finally:
            signals.lock_unavailable.disconnect(dispatch_uid="t")
        assert (result.duplicate, waiting()) == (False, 1)
        assert [type(error) for error in seen] == [LockUnavailable]

    def test_or_refused_where_lock_on_outage_says_so(self, config, waiting):
        config.settings["redislock_on_outage"] = "raise"
        with pytest.raises(LockUnavailable, match="the lock server is unavailable for lock"):
            make_app(config).tasks["lab.job"].delay("k")
        assert waiting() == 0


class TestAfterTheEnd:
    """A result is stored before the key is free: who has seen it, and asks again, is not answered with it."""

    @pytest.fixture
    def ended(self, app, tasks, locks):
        """A run whose result is stored, and which still holds its key; what is called gives the key back."""
        key = tasks.job.lock_for("k").name
        token = tokens.mint(tokens.mint_nonce(), Attempt("ended", 0, 0), tokens.origin("w@host", "lab.job"))
        locks.client.set(key, token, px=30_000)
        app.backend.mark_as_done("ended", "old")
        return lambda: LockStore.of(locks.client).release(Demand(key), token)

    def test_a_publish_waits_for_the_key_and_takes_it(self, tasks, ended, waiting, ttl):
        with ThreadPoolExecutor(1) as pool:
            publish = pool.submit(tasks.job.delay, "k")
            ended()
            assert (publish.result().duplicate, waiting()) == (False, 1)
        assert ttl() > 3590

    def test_fifty_at_once_make_one_message_though_the_run_does_not_let_go(self, tasks, ended, waiting):
        with ThreadPoolExecutor(50) as pool:
            results = [pool.submit(tasks.job.delay, "k") for _ in range(50)]
        made = {one.result().id for one in results}
        assert (len(made), waiting()) == (1, 1)
        assert "ended" not in made

    @pytest.mark.parametrize("name", SCOPES)
    def test_a_message_that_ended_without_a_run_is_no_existing_job(self, app, tasks, name):
        """One that has waited for `lock_wait_for` fails before its place is given up."""
        first = getattr(tasks, name).delay("k")
        app.backend.mark_as_failure(first.id, RuntimeError("it has waited in vain"))
        assert getattr(tasks, name).delay("k").duplicate is False

    def test_it_takes_the_place_behind_that_run_also_in_an_event_loop(self, tasks, ended, waiting, locks):
        async def publish():
            return tasks.job.delay("k")

        assert (asyncio.run(publish()).duplicate, waiting()) == (False, 1)
        assert locks.client.exists(keys_of(tasks.job.lock_for("k").name).queued)

    def test_a_run_of_that_id_which_began_later_is_an_existing_job(self, app, tasks, locks):
        """Yesterday's result is stored under an id that its caller uses again."""
        done = time.time()
        app.backend.mark_as_done("ended", "old")
        wait_until(lambda: time.time() > done + 0.01, "the clock goes on")
        token = tokens.mint(tokens.mint_nonce(), Attempt("ended", 0, 0), tokens.origin("w@host", "lab.job"))
        locks.client.set(tasks.job.lock_for("k").name, token, px=30_000)
        assert tasks.job.delay("k").id == "ended"

    def test_a_key_that_cools_down_is_kept_on_purpose(self, app, tasks, locks, waiting):
        token = tokens.mint(tokens.mint_nonce(), Attempt("ended", 0, 0), tokens.origin("w@host", "lab.cooling_job"))
        locks.client.set(tasks.cooling_job.lock_for("k").name, tokens.cooling(token), px=30_000)
        app.backend.mark_as_done("ended", "old")
        assert (tasks.cooling_job.delay("k").id, waiting()) == ("ended", 0)

    @pytest.mark.parametrize("backend", ["rpc://", "cache+memory://", None, "redis+socket:///nowhere"])
    def test_a_backend_that_cannot_tell_changes_nothing(self, config, ended, waiting, backend):
        app = Celery("other", broker=config.broker, backend=backend, set_as_current=False)
        app.conf.update(redislock_url=config.locks, task_default_queue=config.queue)

        @app.task(name="lab.job", base=LockedTask, lock_args=["key"], lock_scope="job", shared=False)
        def job(key):
            pass

        assert job.delay("k").id == "ended"
        assert waiting() == 0

    def test_an_eager_run_waits_for_the_key(self, tasks, app, locks):
        key = tasks.lingers_skip.lock_for("k").name
        token = tokens.mint(tokens.mint_nonce(), Attempt("ended", 0, 0), tokens.origin("w@host", "lab.lingers_skip"))
        locks.client.set(key, token, px=30_000)
        app.backend.mark_as_done("ended", "old")
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(lambda: tasks.lingers_skip.apply(("k", "new")).get())
            LockStore.of(locks.client).release(Demand(key), token)
            assert run.result() == "new"


def test_where_redis_goes_away_after_the_publish_the_key_is_kept_for_a_lease(
    config, lock_proxy, locks, waiting, ttl, log
):
    app = make_app(config)
    task = app.tasks["lab.job"]
    send = app.send_task

    def send_and_cut(*args, **kwargs):
        result = send(*args, **kwargs)
        lock_proxy.refuse()
        return result

    app.send_task = send_and_cut
    result = task.delay("k")
    assert (result.duplicate, waiting()) == (False, 1)
    assert 0 < ttl() <= 30
    assert f"task lab.job[{result.id}] was sent, but lock" in log.text


@pytest.fixture
def no_keeper(monkeypatch):
    """No thread can start, as in a process that ends, from Python 3.12 on: in a function of `atexit`, for example."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "redislock-keeper":  # not those of the proxy
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_keeper")
def test_where_no_thread_can_start_a_publish_returns_its_result(config, waiting, ttl):
    task = make_app(config).tasks["lab.job"]
    try:
        first, second = task.delay("k"), task.delay("k")
    except RuntimeError as error:
        pytest.fail(f"the message was sent, but delay() raised {error!r}")
    assert (first.duplicate, second.duplicate, second.id, waiting()) == (False, True, first.id, 1)
    assert ttl() > 3590


@pytest.mark.usefixtures("no_keeper")
def test_where_no_thread_can_start_a_failed_publish_raises_the_brokers_error(config, lock_proxy, ttl, monkeypatch):
    def fail(*args, **kwargs):
        lock_proxy.refuse()
        refuse_to_send()

    app = make_app(config)
    monkeypatch.setattr(app, "send_task", fail)
    with pytest.raises(OperationalError):
        app.tasks["lab.job"].delay("k")
    assert 0 < ttl() <= 30


def test_one_connection_lost_amid_the_publish_does_not_shorten_the_keys_life(config, lock_proxy, ttl):
    app = make_app(config)
    send = app.send_task

    def send_and_cut(*args, **kwargs):
        result = send(*args, **kwargs)
        lock_proxy.cut()
        return result

    app.send_task = send_and_cut
    app.tasks["lab.job"].delay("k")
    assert ttl() > 3590


@pytest.mark.parametrize("name", SCOPES)
def test_a_lost_reply_about_a_message_that_is_sent_in_any_case_does_not_shorten_the_keys_life(
    name, tasks, locks, lock_proxy, ttl
):
    """Its caller has chosen its id. Without the key, it would wait for its own publish."""
    locks.client.script_load(ACQUIRE.text)
    fault = lock_proxy.drop_reply(to=b"EVALSHA", where=ACQUIRE.sha.encode())
    getattr(tasks, name).apply_async(("k",), task_id="mine")
    assert fault.struck == 1

    def states():
        return [Token.of(value).state for value in map(locks.client.get, locks.client.scan_iter())]

    wait_until(lambda: states() == ["queued"], "the message has its reservation")
    assert ttl() > 3590


@pytest.mark.parametrize("scope", ["run", "job", "queue"])
def test_a_base_class_that_publishes_later_may_have_no_result_yet(app, waiting, scope):
    """As those that publish when a database's transaction is committed."""
    committed = []

    class OnCommit(Task):
        def apply_async(self, *args, **options):
            committed.append(lambda: super(OnCommit, self).apply_async(*args, **options))

    class Base(LockedTask, OnCommit):
        abstract = True

    @app.task(base=Base, shared=False, lock_scope=scope)
    def task(key): ...

    assert task.delay("k") is None
    assert waiting() == 0
    committed.pop()()
    assert waiting() == 1


def test_a_duplicate_of_a_task_without_results_waits_for_none(tasks):
    tasks.job.ignore_result = True
    try:
        results = [tasks.job.delay("k"), tasks.job.delay("k")]
    finally:
        del tasks.job.ignore_result
    assert [result.duplicate for result in results] == [False, True]
    assert [result.get(timeout=15) for result in results] == [None, None]


def test_in_scope_run_the_run_ends_with_what_makes_no_key_also_where_retries_hold_it(config, waiting):
    config.settings["task_annotations"] = {"lab.keyed": {"lock_hold_on_retry": True}}
    make_app(config).tasks["lab.keyed"].delay(1.5)
    assert waiting() == 1


def test_eagerly_nothing_is_published_and_the_key_is_held_for_the_run_alone(app, tasks, locks, ledger):
    app.conf.task_always_eager = True
    results = [tasks.job.delay("k", item) for item in "ab"]
    assert [result.get() for result in results] == ["a", "b"]
    assert {result.duplicate for result in results} == {False}
    assert locks.client.keys() == []


def test_a_burst_of_duplicates_leaves_one_message_and_one_key(tasks, waiting, locks):
    results = {tasks.job.delay("k").id for _ in range(10_000 if IS_MATRIX else 1000)}
    assert (len(results), waiting(), locks.client.dbsize()) == (1, 1, 1)


def test_a_thousand_racing_publishers_in_eight_processes_make_one_job(config, waiting, locks):
    forked = multiprocessing.get_context("forkserver")  # from a process that has no threads, and no connections
    forked.set_forkserver_preload([__name__])
    go = forked.Barrier(8)
    with forked.Pool(8, initializer=race_ready, initargs=(config.dump(), go)) as pool:
        published = [pair for pairs in pool.map(race, [125] * 8, chunksize=1) for pair in pairs]
    assert len(published) == 1000
    assert len({task_id for task_id, _ in published}) == 1
    assert sum(not duplicate for _, duplicate in published) == 1
    assert (waiting(), locks.client.dbsize()) == (1, 1)


def race_ready(config: str, go) -> None:
    import json

    global _app, _go
    _app, _go = make_app(Config(**json.loads(config))), go
    # Connected: who needs a second between its reservation and its message is passed over, as may happen under a load.
    with _app.producer_pool.acquire(block=True) as producer:
        producer.connection.ensure_connection(max_retries=3)


def race(times: int) -> list[tuple[str, bool]]:
    _go.wait(60)
    results = [_app.tasks["lab.job"].delay("k") for _ in range(times)]
    return [(result.id, result.duplicate) for result in results]


@pytest.mark.parametrize("signal", [signals.lock_conflict, signals.lock_unavailable], ids=lambda signal: signal.name)
def test_a_receiver_that_fails_never_harms_a_publish(tasks, lock_proxy, signal):
    told = []

    def fail(sender, signal, **arguments):
        told.append(arguments.keys())
        raise RuntimeError("a broken receiver")

    first = tasks.job.delay("k")
    if signal is signals.lock_unavailable:
        lock_proxy.refuse()
    signal.connect(fail)
    try:
        second = tasks.job.delay("k")
    finally:
        signal.disconnect(fail)
    assert told == [signal.providing_args]
    assert (second.id == first.id) == (signal is signals.lock_conflict), "answered, or sent all the same"


class Clock:
    """A clock that only a sleep moves on. It rings once, shortly before a publish loses patience."""

    def __init__(self, ring):
        self.now, self.rang_at, self._ring = 0.0, None, ring

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.rang_at is None and self.now > publish.PATIENCE - 0.1:
            self.rang_at = self.now
            self._ring()


class TestAJobThatIsBeingSent:
    """Its publisher has reserved the key, and has not said that the message is out."""

    @pytest.fixture
    def sending(self, config, locks):
        """Publishes, in a process of its own, a message that is not out before the event is set."""
        spawn = multiprocessing.get_context("spawn")
        started, goes_on = spawn.Event(), spawn.Event()
        publisher = spawn.Process(target=publish_slowly, args=(config.dump(), started, goes_on))
        publisher.start()
        assert started.wait(30)
        yield goes_on
        goes_on.set()
        publisher.join()

    def test_is_waited_for(self, sending, tasks, waiting, monkeypatch):
        """A slow publish is no reason for a second job."""
        asked = threading.Semaphore(0)
        monkeypatch.setattr(publish, "PATIENCE", 60.0)
        monkeypatch.setattr(
            publish, "on_outstanding", lambda *of, **how: (asked.release(), on_outstanding(*of, **how))[1]
        )
        with ThreadPoolExecutor(8) as callers:
            results = [callers.submit(tasks.job.delay, "k") for _ in range(8)]
            for _ in range(16):
                assert asked.acquire(timeout=30)
            sending.set()
            published = [result.result() for result in results]
        assert all(result.duplicate for result in published)
        assert (len({result.id for result in published}), waiting()) == (1, 1)

    def test_has_its_own_time_however_long_its_caller_has_waited_for_another(self, tasks, locks, waiting, monkeypatch):
        """Else all that wait for a dead publisher overwrite each other's reservations once that time is over."""
        key, origin = tasks.job.lock_for("k").key, tokens.origin("web", "lab.job")
        clock = Clock(lambda: locks.client.set(key, sending("another")))

        def sending(task_id):
            return tokens.mint(tokens.mint_nonce(), Attempt(task_id, 0, 0), origin, tokens.SENDING)

        locks.client.set(key, sending("one"))
        monkeypatch.setattr(publish, "time", clock)
        mine = tasks.job.delay("k")
        assert (mine.duplicate, waiting()) == (False, 1)
        assert clock.now >= clock.rang_at + publish.PATIENCE


#: Seconds that the windows of `TestAWindow` stay open; no test waits for that long.
WINDOW = 60.0


class TestAWindow:
    """It opens at the publish and stays open for `lock_window`. A call inside gets the job's result."""

    @pytest.fixture(autouse=True)
    def jobs_have_windows(self, config):
        names = ("job", "job_again", "job_ends", "shared_job", "shared_job_too")
        config.settings["task_annotations"] = {f"lab.{name}": {"lock_window": WINDOW} for name in names}

    @pytest.fixture
    def windows(self, locks):
        """The keys of the windows that are open."""
        return lambda: locks.client.keys("*:window:*")

    @pytest.fixture
    def deliver(self, app, queued, deliver):
        """Runs the first message in the queue, which stays there: whatever else is sent is a second one."""

        def run(name, *args, **request):
            sent = {header: value for header, value in queued()[0].items() if header not in {"argsrepr", "kwargsrepr"}}
            del sent["task"]
            return deliver(app, f"lab.{name}", *args, **{**sent, **request})[0]

        return run

    def test_opens_at_the_publish(self, tasks, locks, windows):
        tasks.job.delay("k")
        (window,) = windows()
        assert WINDOW - 10 < locks.client.pttl(window) / 1000 <= WINDOW
        assert Token.of(locks.client.get(window)).state == "queued"

    def test_is_not_kept_open_by_a_call_inside(self, tasks, locks, windows, waiting):
        first = tasks.job.delay("k")
        locks.client.delete(tasks.job.lock_for("k").name)
        (window,) = windows()
        locks.client.pexpire(window, 20_000)
        assert tasks.job.delay("k").id == first.id
        assert locks.client.pttl(window) <= 20_000
        locks.client.pexpire(window, 1)
        wait_until(lambda: not windows(), "the window is closed")
        later = tasks.job.delay("k")
        assert (later.duplicate, waiting()) == (False, 2)
        assert WINDOW - 10 < locks.client.pttl(window) / 1000 <= WINDOW
        assert tasks.job.delay("k").id == later.id

    @pytest.mark.parametrize(
        ("end", "state"),
        [("success", states.SUCCESS), ("failure", states.FAILURE), ("ignore", states.IGNORED)],
    )
    def test_outlives_the_run_whatever_its_end(self, tasks, deliver, waiting, end, state):
        first = tasks.job_ends.delay("k", end)
        assert deliver("job_ends", "k", end) == state
        assert tasks.job_ends.lock_info("k") is None
        second = tasks.job_ends.delay("k", end)
        assert (second.id, second.duplicate, waiting()) == (first.id, True, 1)

    def test_outlives_a_crash_and_the_run_of_the_copy(self, tasks, locks, deliver, waiting):
        first = tasks.job.delay("k")
        key = tasks.job.lock_for("k").name
        run = tokens.mint(tokens.mint_nonce(), Token.of(locks.client.get(key)).attempt, tokens.origin("w@h", "lab.job"))
        locks.client.set(key, run, px=1)  # of a run whose process is dead
        wait_until(lambda: not locks.client.exists(key), "the lease of the dead process ends")
        assert tasks.job.delay("k").id == first.id
        assert deliver("job", "k", redelivered=True) == states.SUCCESS
        assert (tasks.job.delay("k").id, waiting()) == (first.id, 1)

    def test_outlives_a_retry(self, tasks, locks, deliver, waiting):
        first = tasks.job_again.delay("k", "a", 1)
        assert deliver("job_again", "k", "a", 1) == states.RETRY
        assert waiting() == 2
        locks.client.delete(tasks.job_again.lock_for("k").name)
        assert (tasks.job_again.delay("k", "a", 0).id, waiting()) == (first.id, 2)

    def test_holds_for_the_job_itself(self, app, deliver, waiting):
        """Without a window, what a job publishes follows that job and is no duplicate of it."""
        inner = []

        @app.task(
            base=LockedTask, bind=True, name="lab.calls_itself", lock_scope="job", lock_window=WINDOW, shared=False
        )
        def calls_itself(self):
            inner.append(self.delay())

        first = calls_itself.delay()
        assert deliver("calls_itself") == states.SUCCESS
        assert ([result.id for result in inner], waiting()) == ([first.id], 1)

    def test_is_not_closed_by_a_copy_that_expires_after_the_job_has_run(self, tasks, deliver, waiting):
        first, expires = tasks.job.apply_async(("k",), expires=0.5), time.time() + 0.5
        assert deliver("job", "k", redelivered=True) == states.SUCCESS  # a copy, which leaves a note for the others
        wait_until(lambda: time.time() > expires, "the message has expired")
        assert deliver("job", "k", redelivered=True) == states.IGNORED
        is_given_up = threading.Event()
        server_of(tasks.job.app).keeper.later("another key", math.inf, lambda _: is_given_up.set())
        assert is_given_up.wait(30)
        assert (tasks.job.delay("k").id, waiting()) == (first.id, 1)

    def test_is_closed_by_a_failed_send(self, tasks, locks, waiting, monkeypatch):
        with monkeypatch.context() as broken:
            broken.setattr(tasks.job.app, "send_task", refuse_to_send)
            with pytest.raises(OperationalError):
                tasks.job.delay("k")
        assert locks.client.keys() == []
        assert (tasks.job.delay("k").duplicate, waiting()) == (False, 1)

    def test_is_closed_by_a_failed_send_behind_another_tasks_job(self, tasks, locks, windows, monkeypatch):
        """That publish has the place in the queue."""
        tasks.shared_job.delay("k")
        kept = set(locks.client.keys())
        with monkeypatch.context() as broken:
            broken.setattr(tasks.job.app, "send_task", refuse_to_send)
            with pytest.raises(OperationalError):
                tasks.shared_job_too.delay("k")
        assert set(locks.client.keys()) == kept

    @pytest.mark.parametrize("how", ["task_id", "parent_id", "link", "link_error", "chain", "group", "chord"])
    def test_is_neither_read_nor_opened_by_a_publish_that_is_not_bare(self, how, tasks, windows, waiting):
        publish, messages = continued(tasks.job, tasks.plain)[how]
        publish()
        assert (windows(), waiting()) == ([], messages)
        first = tasks.job.delay("other")
        publish, _ = continued(tasks.job, tasks.plain, "other")[how]
        publish()
        assert waiting() == 2 * messages + 1
        assert tasks.job.delay("other").id == first.id

    def test_is_each_tasks_own(self, tasks, locks, windows, waiting):
        first = tasks.shared_job.delay("k")
        second = tasks.shared_job_too.delay("k")
        assert (second.duplicate, len(windows()), waiting()) == (False, 2, 2)
        locks.client.delete(*(key for key in locks.client.scan_iter() if key not in windows()))
        assert tasks.shared_job.delay("k").id == first.id
        assert tasks.shared_job_too.delay("k").id == second.id
        assert waiting() == 2

    def test_costs_a_call_inside_one_round_trip_and_no_read_of_the_backend(self, tasks, locks, deliver, monkeypatch):
        first = tasks.job.delay("k")
        assert deliver("job", "k") == states.SUCCESS
        monkeypatch.setattr(publish, "has_ended", pytest.fail)
        monkeypatch.setattr(time, "sleep", pytest.fail)
        for _ in range(3):
            locks.client.config_resetstat()
            assert tasks.job.delay("k").id == first.id
            assert locks.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1

    def test_of_a_job_that_was_never_sent_is_taken_over(self, tasks, locks, windows, waiting, monkeypatch):
        """Its publisher has died. The key lives for a lease; the window would last longer."""
        monkeypatch.setattr(publish, "PATIENCE", 0.0)
        key = tasks.job.lock_for("k").name
        window = keys_of(key).window("lab.job")
        dead = tokens.mint(tokens.mint_nonce(), Attempt("dead", 0, 0), tokens.origin("web", "lab.job"), tokens.SENDING)
        locks.client.set(window, dead, px=60_000)
        mine = tasks.job.delay("k")
        assert (mine.duplicate, waiting()) == (False, 1)
        assert Token.of(locks.client.get(window)).attempt.task_id == mine.id

    def test_of_a_job_that_was_sent_is_not_taken_over_by_a_publish_that_has_waited_for_another_one(
        self, tasks, locks, waiting
    ):
        first = tasks.job.delay("k")
        key = tasks.job.lock_for("k").name
        mine = tokens.mint(tokens.mint_nonce(), Attempt("mine", 0, 0), tokens.origin("web", "lab.job"), tokens.SENDING)
        owner = SimpleNamespace(hold=Hold(Demand(key), mine))
        locks.client.delete(key)
        for passed in (Passed(unsent=frozenset({first.id})), Passed(unsent=frozenset({"another"}))):
            found = LockStore.of(locks.client).reserve(owner, 30.0, passed, window=WINDOW)
            assert isinstance(found, Outstanding)
            assert [job.task_id for job in found.info(key)] == [first.id]
            assert found.in_window
