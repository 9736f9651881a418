"""One delivered message, traced as a pool child does it, while the broker is away."""

from __future__ import annotations

import functools
import gc
import json
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from billiard.einfo import Traceback
from celery.app.trace import build_tracer, trace_task
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from redis.connection import AbstractConnection as Connection

from celery_redislock import LockedTask, signals
from celery_redislock.app import server_of
from celery_redislock.connection.store import LockStore
from celery_redislock.message import message
from celery_redislock.message.header import Header
from celery_redislock.policy import Ended
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import NOTE, Demand, keys_of
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE
from celery_redislock.protocol.tokens import Attempt, mint_nonce
from tests.lab.app import make_app
from tests.lab.arrivals import arrived
from tests.lab.interruption import raised_at
from tests.lab.servers import free_port, wait_until


@pytest.fixture
def deliver(config):
    """Runs a message of a task as a pool child does; the broker is away. Returns the state and the outcome."""
    config.broker = f"amqp://127.0.0.1:{free_port()}//"
    config.settings["task_ignore_result"] = True
    config.settings["broker_transport_options"] = {"max_retries": 1, "interval_start": 0, "interval_step": 0}

    def run(name, *args, wait_for=None, held_for=0, **request):
        config.settings["redislock_wait_for"] = wait_for
        app = make_app(config)
        task = app.tasks[name]
        request = {
            "id": "id",
            "retries": 0,
            "delivery_info": {"exchange": "", "routing_key": config.queue, "redelivered": False},
            "hostname": "w@host",
            **request,
        }
        request["redislock_delivery"] = arrived(task, request, held_for)
        traced = trace_task(task, "id", args, {}, request, app=app)
        return traced.info and traced.info.state, traced.retval

    return run


@pytest.fixture
def held(config):
    """Another's lock on the key ``k`` of a task."""
    made = []

    def hold(name="lab.work"):
        lock = make_app(config).tasks[name].lock_for("k")
        lock.acquire()
        made.append(lock)
        return lock

    yield hold
    for lock in made:
        if lock.state:
            lock.release()


@pytest.fixture
def held_until_met(held):
    """The same, given back as soon as a message has met it."""
    lock = held()

    def release(**_):
        lock.release()

    signals.lock_conflict.connect(release)
    yield
    signals.lock_conflict.disconnect(release)


def test_a_free_key_needs_no_broker(deliver, locks):
    assert deliver("lab.work", "k", "item") == (None, "item")
    wait_until(lambda: locks.client.keys() == [], "the key is free")


def test_from_the_hook_to_redis_py_a_run_goes_through_at_most_eight_frames_of_ours(deliver, monkeypatch):
    send, stacks = Connection.send_packed_command, []

    def noting(connection, packed, **options):
        if b"EVAL" in b"".join(packed):  # opening the connection goes another way, once
            stacks.append([frame.name for frame in traceback.extract_stack() if "/celery_redislock/" in frame.filename])
        return send(connection, packed, **options)

    monkeypatch.setattr(Connection, "send_packed_command", noting)
    deliver("lab.work", "k", "item")
    acquiring = [stack[1:] for stack in stacks if stack[1:2] == ["before_start"]]
    assert acquiring
    assert [stack for stack in acquiring if len(stack) > 8] == []


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
def test_a_run_that_a_policy_ends_leaves_no_frames_for_the_garbage_collector_or_the_main_process(deliver, held):
    """Celery copies those of the traceback: thousands of objects, in a cycle with the frames themselves."""
    held("lab.on_skip")
    gc.collect()
    gc.disable()
    try:
        state, outcome = deliver("lab.on_skip", "k")
        assert state == "IGNORED"
        assert "duplicate of a lock outside tasks" in outcome.traceback
        assert [one for one in gc.get_objects() if isinstance(one, Traceback)] == []
        del outcome
        assert [one for one in gc.get_objects() if isinstance(one, Ended)] == []
    finally:
        gc.enable()


def test_a_time_limit_that_strikes_while_an_ignored_run_is_released_changes_no_outcome(
    deliver, locks, lock_proxy, caplog
):
    locks.client.script_load(RELEASE.text)
    release = lock_proxy.delay(60, where=RELEASE.sha.encode(), nth=1)
    with raised_at(release, SoftTimeLimitExceeded()):
        state, _ = deliver("lab.ends", "k", "ignore")
    assert state == "IGNORED"
    assert "task lab.ends[id]: an error interrupted the release of its lock" in caplog.text


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
def test_a_shutdown_that_strikes_in_a_release_leaves_its_cooldown(deliver, locks, lock_proxy):
    """The tracer sees no state then. It sends the same release once more, as the first may not have come."""
    locks.client.script_load(RELEASE.text)
    release = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    with raised_at(release, SystemExit()), pytest.raises(SystemExit):
        deliver("lab.cools_skip", "k")
    assert [tokens.Token.of(locks.client.get(key)).state for key in locks.client.keys("*}")] == ["cooling"]


def test_a_time_limit_that_strikes_in_the_release_of_one_key_leaves_none_renewed(deliver, locks, lock_proxy):
    """Celery calls `after_return` for neither; so there is no other release than the one that is struck."""
    locks.client.script_load(RELEASE.text)
    release = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    with raised_at(release, SoftTimeLimitExceeded()):
        assert deliver("lab.transfer", "a", "b", "item", 0.0, "ignores")[0] == "IGNORED"
    wait_until(lambda: locks.client.keys("*account*}") == [], "both accounts are free", 5)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
def test_a_reservation_that_cannot_be_given_up_changes_no_outcome(config, caplog):
    app = make_app(config)
    task = app.tasks["lab.job"]
    app.conf.redislock_enabled = "perhaps"
    header = {"claim": mint_nonce(), "key": "redislock:{k}"}
    request = {"id": "id", "retries": 0, "hostname": "w@host", "delivery_info": {}, "redislock": header}
    task.__trace__ = build_tracer(task.name, task, app=app)
    assert task.__trace__("id", ("k",), {}, request).info.state == "FAILURE"
    assert "task lab.job[id]: an error interrupted the release of its lock\nTraceback" in caplog.text
    app.close()


class TestItsTracer:
    """Celery sets it, and instrumentation may."""

    @pytest.fixture
    def app(self, config):
        config.settings["task_ignore_result"] = True
        app = make_app(config)
        yield app
        app.close()

    def test_may_be_set_to_none_or_deleted_so_that_celery_makes_another(self, app):
        task = app.tasks["lab.work"]
        for forget in (lambda: setattr(task, "__trace__", None), lambda: delattr(task, "__trace__")):
            trace_task(task, "id", ("k",), {}, {"id": "id", "delivery_info": {}}, app=app)
            assert task.__trace__ is not None
            forget()
            assert task.__trace__ is None

    def test_may_be_patched(self, app):
        task = app.tasks["lab.work"]
        trace_task(task, "id", ("k",), {}, {"id": "id", "delivery_info": {}}, app=app)
        before = task.__trace__
        with mock.patch.object(task, "__trace__", lambda *args: args):
            assert task.__trace__ is not before
        assert task.__trace__ is None  # mock deletes it, as it does any property

    def test_may_be_wrapped_without_giving_up_what_waits(self, config, locks):
        app = make_app(config)
        task = app.tasks["lab.queued"]
        claim, place = leave(config, locks, "lab.queued", ":queued")
        task.__trace__ = build_tracer(task.name, task, app=app)
        trace = task.__trace__
        task.__trace__ = lambda *args: trace(*args)
        request = {"id": "id", "retries": 0, "hostname": "w@host", "delivery_info": {}, "redislock": claim}
        with task.lock_for("k"):
            assert task.__trace__("id", ("k",), {}, request).info.state == "IGNORED"
        last, given_up = leave(config, locks, "lab.one_queued", ":queued")
        server_of(app).give_up(Demand(last["key"]), last["claim"], 30.0, is_to_come=False)
        wait_until(lambda: not locks.client.exists(given_up), "what was to be given up is")
        assert locks.client.exists(place)
        app.close()

    def test_leaves_the_names_of_a_users_class_alone(self, app):
        class Traced(LockedTask):
            abstract = True

            def _trace(self, what):
                return f"traced {what}"

        @app.task(base=Traced, shared=False, bind=True)
        def traced(self):
            return self._trace("by hand")

        task = app.tasks[traced.name]
        assert trace_task(task, "id", (), {}, {"id": "id", "delivery_info": {}}, app=app).retval == "traced by hand"

    def test_that_is_made_and_called_by_hand_is_told_to_be_the_tasks_own(self, app, ledger):
        task = app.tasks["lab.work"]
        traced = build_tracer(task.name, task, app=app)("id", ("k",), {}, {"id": "id", "delivery_info": {}})
        assert "lab.work is run by a tracer that is not its __trace__" in str(traced.info.retval)
        assert ledger.runs() == []

    def test_keeps_no_arguments_in_a_context_that_the_body_has_copied(self, app):
        contexts = []

        @app.task(base=LockedTask, shared=False, lock_key="k")
        def copies(argument):
            contexts.append(copy_context())

        argument = frozenset({"one"})
        alive, task = weakref.ref(argument), app.tasks[copies.name]
        trace_task(task, "id", (argument,), {}, {"id": "id", "delivery_info": {}}, app=app)
        del argument
        gc.collect()
        assert alive() is None
        assert contexts

    def test_frees_the_key_of_a_second_run_of_the_message_that_the_first_has_begun_in_its_context(self, app, locks):
        """As a greenlet of a pool may, that a run's end has started."""
        contexts = []

        @app.task(base=LockedTask, shared=False, bind=True, lock_key="k")
        def begins_it(self):
            contexts.append(copy_context())
            raise Ignore

        task = app.tasks[begins_it.name]

        def run():
            trace_task(task, "id", (), {}, {"id": "id", "delivery_info": {}}, app=app)
            wait_until(lambda: locks.client.keys("*}") == [], "the key is free", 5)

        run()
        contexts[0].run(run)


def test_a_late_acked_message_is_given_back_to_the_broker(deliver, held, ledger):
    held("lab.late")
    state, outcome = deliver("lab.late", "k")
    assert state == "REJECTED"
    assert outcome.exception.exc.requeue is True
    assert ledger.runs() == []


def test_an_acked_message_is_held_and_runs_when_the_key_is_free(deliver, held_until_met, ledger):
    assert deliver("lab.work", "k", "item") == (None, "item")
    assert ledger.items() == ["item"]


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        ({}, "is held by"),
        ({"retries": 1, "redislock": {"times": 1, "since": 1.0, "begun": False}}, ": this run is lost"),
    ],
)
def test_an_acked_message_that_is_held_in_vain_fails_after_lock_wait_for(deliver, held, ledger, request_of, said):
    lock = held()
    state, outcome = deliver("lab.work", "k", "item", wait_for=0.2, **request_of)
    assert state == "FAILURE"
    assert outcome.exception.key == lock.name
    assert said in str(outcome.exception)
    assert ledger.runs() == []


def test_an_acked_message_that_is_held_asks_again_for_a_key_that_it_was_granted_before(config, locks):
    """The lease of that one has ended while the process kept the message, and another has the key now."""
    config.broker = f"amqp://127.0.0.1:{free_port()}//"
    config.settings["task_ignore_result"] = True
    config.settings["broker_transport_options"] = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    app, client, found = make_app(config), locks.client, []
    a, b = (f"redislock:{{{name}}}" for name in "ab")

    @app.task(base=LockedTask, shared=False, lock_key=["a", "b"], lock_on_conflict="wait")
    def both():
        found.append(client.get(b))

    def change_hands(**_):
        if client.exists(a):
            assert client.set(b, "another's", xx=True)
            client.delete(a)
        else:
            client.delete(b)

    task = app.tasks[both.name]
    request = {"id": "id", "delivery_info": {"exchange": "", "routing_key": config.queue}, "hostname": "w@host"}
    client.set(a, "another's")
    signals.lock_conflict.connect(change_hands)
    try:
        trace_task(task, "id", (), {}, {**request, "redislock_delivery": arrived(task, request)}, app=app)
    finally:
        signals.lock_conflict.disconnect(change_hands)
    assert [(value or b"free")[:1] for value in found] == [b">"]


@pytest.fixture
def lose(locks, lock_proxy):
    """The next command of a script is lost: the server never hears of it."""

    def lose_command(script):
        locks.client.script_load(script.text)
        return lock_proxy.drop_command(to=b"EVALSHA", where=script.sha.encode())

    return lose_command


def test_a_soft_time_limit_before_the_claim_is_used_frees_what_was_left_to_the_message(deliver, config, locks, lose):
    """Redis is slow, and the time limit strikes while the key is asked for."""
    claim, key = leave(config, locks, "lab.job")
    with raised_at(lose(ACQUIRE), SoftTimeLimitExceeded()):
        assert deliver("lab.job", "k", "item", redislock=claim)[0] == "FAILURE"
    wait_until(lambda: not locks.client.exists(key), "the key is free", 5)


def leave(config, locks, name, place=""):
    """Leave the key of ``k``, or a place beside it, to a message; returns its header, and the key."""
    key = make_app(config).tasks[name].lock_for("k").name + place
    token = tokens.mint(tokens.mint_nonce(), Attempt("id", 0, 0), tokens.origin("host", name), tokens.RESERVED)
    locks.client.set(key, token, px=3_600_000)
    return Header(claim=token.nonce, key=key.removesuffix(place)).wire, key


def test_a_retry_that_is_dropped_is_left_nothing_by_a_second_run_of_the_one_that_sent_it(deliver, config, locks):
    """The first run sent it, and died; the retry ran; the second one has sent it anew and is still to end."""
    claim, key = leave(config, locks, "lab.job_again")
    origin = tokens.origin("w@host", "lab.job_again")
    running = tokens.mint(tokens.mint_nonce(), Attempt("id", 0, 0), origin)
    locks.client.set(key, running, px=30_000)
    locks.client.set(keys_of(key).note("id/1/0"), "", px=30_000)
    redelivered = {"exchange": "", "routing_key": "q", "redelivered": True}
    assert deliver("lab.job_again", "k", retries=1, redislock=claim, delivery_info=redelivered)[0] == "IGNORED"
    wait_until(lambda: locks.client.exists(keys_of(key).gone(claim["claim"])), "it has given up its claim")
    again = tokens.mint(claim["claim"], Attempt("id", 1, 0), origin, tokens.RESERVED)
    assert LockStore.of(locks.client).send(commands.hand_over(Demand(key), running, again, 3600.0)) is True
    assert locks.client.keys("*}") == []


class TestAMessageThatTheBrokerGivesBack:
    """Its claim is still in it, and what was left to it is still needed."""

    @pytest.fixture(autouse=True)
    def late(self, config):
        config.settings["task_acks_late"] = True

    def test_keeps_its_place(self, deliver, config, held, locks):
        claim, place = leave(config, locks, "lab.queued", ":queued")
        held("lab.queued")
        assert deliver("lab.queued", "k", "item", redislock=claim)[0] == "REJECTED"
        time.sleep(0.3)  # a release would come from another thread
        assert locks.client.exists(place)

    def test_keeps_its_key_where_its_user_has_given_it_back(self, deliver, config, locks):
        claim, key = leave(config, locks, "lab.postponing_job")
        assert deliver("lab.postponing_job", "k", redislock=claim)[0] == "REJECTED"
        time.sleep(0.3)  # a release would come from another thread
        assert locks.client.exists(key)


def test_a_place_is_kept_no_longer_than_until_its_message_expires(deliver, config, held, locks):
    config.settings["task_acks_late"] = True
    claim, place = leave(config, locks, "lab.queued", ":queued")
    held("lab.queued")
    expires = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
    deliver("lab.queued", "k", "item", redislock=claim, expires=expires)
    assert 0 < locks.client.ttl(place) <= 20


@pytest.mark.parametrize(("held_for", "notes"), [(80, 0), (95, 1), (101, 1)])
def test_a_run_that_ends_close_to_the_visibility_timeout_leaves_a_note(deliver, config, locks, held_for, notes):
    """The key is free before the broker has the ack; it may give the message again in between."""
    config.settings["broker_transport_options"]["visibility_timeout"] = 100
    assert deliver("lab.late", "k", "item", held_for=held_for) == (None, "item")
    assert len(locks.client.keys(f"*{NOTE}id/0/0")) == notes


@pytest.mark.parametrize("come_back", [{}, {"redislock": {"times": 1, "since": 1.0, "begun": True}}])
def test_begun_work_is_never_skipped_also_when_it_comes_back(deliver, held, locks, come_back):
    """A redelivered message whose key a third party holds by now; the broker is away, so that it is given back."""
    held("lab.once_late")
    redelivered = {"exchange": "", "routing_key": "q", "redelivered": not come_back}
    assert deliver("lab.once_late", "k", delivery_info=redelivered, **come_back)[0] == "REJECTED"


@pytest.mark.parametrize("held_for", [0, 95], ids=["redelivered before its early ack", "merely old"])
def test_what_cannot_have_begun_meets_its_policy(deliver, config, held, ledger, log, held_for):
    """An early ack is sent before the body begins; and a long countdown is no run."""
    config.settings["broker_transport_options"]["visibility_timeout"] = 100
    held("lab.once")
    info = {"exchange": "", "routing_key": "q", "redelivered": not held_for}
    assert deliver("lab.once", "k", delivery_info=info, held_for=held_for)[0] == "IGNORED"
    assert "skip" in log.text
    assert ledger.runs() == []


def test_a_note_outlives_the_visibility_timeout(deliver, config, locks):
    week = 7 * 24 * 3600
    config.settings["broker_transport_options"]["visibility_timeout"] = week
    redelivered = {"exchange": "", "routing_key": "q", "redelivered": True}
    assert deliver("lab.late", "k", "item", delivery_info=redelivered) == (None, "item")
    (note,) = locks.client.keys(f"*{NOTE}id/0/0")
    assert locks.client.ttl(note) > 2 * week


def test_a_key_that_the_publisher_made_of_other_parameters_is_given_up(deliver, config, locks, ledger, log):
    """A deploy has added a parameter: the publisher's key would be kept for lock_queue_ttl, and answer publishes."""
    header, _ = leave(config, locks, "lab.job")
    key = "redislock:{lab.job:older}"
    locks.client.rename(header["key"], key)
    assert deliver("lab.job", "k", "item", redislock={**header, "key": key}) == (None, "item")
    wait_until(lambda: locks.client.keys() == [], "nothing is left")
    assert f"the publisher reserved lock {key} but this worker computes" in log.text
    assert ledger.items() == ["item"]


def test_max_hold_counts_from_the_grant_and_not_from_the_wait(deliver, config, log):
    config.settings.update(redislock_max_hold=60.0)
    lock = make_app(config).tasks["lab.bound"].lock_for(1, "k")
    lock.acquire()
    released, ends = [], []

    def release_once_it_waits():
        wait_until(lambda: "its message could not be republished" in log.text, "it waits")
        released.append(time.monotonic())
        lock.release()

    def note(lock, **_):
        ends.append(lock.stop_at)

    signals.lock_acquired.connect(note)
    try:
        with ThreadPoolExecutor(1) as pool:
            releasing = pool.submit(release_once_it_waits)
            deliver("lab.bound", 1, "k", retries=1)
            releasing.result()
    finally:
        signals.lock_acquired.disconnect(note)
    assert ends[-1] >= released[0] + 60


def test_every_run_has_a_greater_fence_where_it_is_asked_for(deliver, config, held):
    assert deliver("lab.bound", 1, "k")[1]["fence"] is None
    config.settings["redislock_fence"] = True
    fences = [deliver("lab.bound", 1, "k")[1]["fence"] for _ in range(3)]
    assert fences == sorted(set(fences))


def test_a_message_that_was_sent_although_the_broker_seemed_away_does_not_run_twice(
    deliver, held_until_met, locks, ledger
):
    """Its reply was lost, so it is held and run here too; what was sent finds the note."""
    deliver("lab.work", "k", "item")
    sent = {"redislock": {"times": 1, "since": time.time(), "republished": True}}
    assert deliver("lab.work", "k", "item", **sent)[0] == "IGNORED"
    assert ledger.items() == ["item"]


@pytest.mark.parametrize(("header", "notes"), [({}, 0), ({"republished": True}, 1), ({"begun": True}, 1)])
def test_of_messages_that_have_waited_those_leave_a_note_that_may_be_there_twice(deliver, locks, header, notes):
    waited = {"redislock": {"times": 1, "since": time.time(), **header}}
    assert deliver("lab.work", "k", "item", **waited) == (None, "item")
    wait_until(lambda: not locks.held(), "the key is free")
    assert len(locks.client.keys(f"*{NOTE}id/0/0")) == notes


@pytest.mark.parametrize("acks", [True, False])
@pytest.mark.parametrize("name", ["task_acks_on_failure_or_timeout", "task_acks_on_failure"])
def test_a_failed_message_that_celery_rejects_may_run_again(config, deliver, ledger, name, acks):
    """A dead-letter exchange delivers it again. It had waited, so a copy of it might have come as well."""
    config.settings[name] = acks
    if name.endswith("failure") and not hasattr(LockedTask, "acks_on_failure"):
        pytest.skip("new in Celery 5.7")
    waited = {"redislock": {"times": 1, "since": time.time(), "republished": True}}
    for _ in range(2):
        deliver("lab.late", "k", "item", 0.0, True, **waited)
    assert len(ledger.items()) == (1 if acks else 2)


def test_a_soft_time_limit_amid_the_sending_is_not_taken_for_a_broker_that_is_away(deliver, held, monkeypatch):
    held()

    def strike(*args, **kwargs):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(message, "confirmed", strike)
    state, outcome = deliver("lab.work", "k", "item")
    assert state == "FAILURE"
    assert isinstance(outcome.exception, SoftTimeLimitExceeded)


def test_a_run_leaves_no_cycle_that_keeps_its_arguments(deliver):
    class Argument(str):
        """Can be referred to weakly."""

    argument = Argument("item")
    gone = weakref.ref(argument)
    gc.collect()
    gc.disable()
    try:
        deliver("lab.work", "k", argument)
        del argument
        assert gone() is None
    finally:
        gc.enable()


def test_a_body_whose_decorator_adds_arguments_fails_instead_of_running_unlocked(config, ledger):
    app = make_app(config)

    def with_session(body):
        @functools.wraps(body)
        def inner(*args, **kwargs):
            return body("session", *args, **kwargs)

        return inner

    @app.task(base=LockedTask, shared=False)
    @with_session
    def task(session, key):
        ledger.write({"event": "ran"})

    with pytest.raises(TypeError, match=r"task\(\) missing a required argument: 'key'"):
        task.apply(("k",)).get()
    assert ledger.lines() == []


def test_in_an_outage_of_the_broker_too_a_run_asks_again_until_it_has_its_lock(
    deliver, config, lock_proxy, ledger, log
):
    """Its message is acked, so nobody else has it."""

    def mend_once_it_waits():
        wait_until(lambda: "its message could not be republished" in log.text, "it waits")
        lock_proxy.mend()

    lock_proxy.refuse()
    with ThreadPoolExecutor(1) as pool:
        mending = pool.submit(mend_once_it_waits)
        assert deliver("lab.work", "k", "item") == (None, "item")
        mending.result()
    assert ledger.items() == ["item"]
    lock_info = make_app(config).tasks["lab.work"].lock_info
    wait_until(lambda: lock_info("k") is None, "it has given its lock back")


def test_begun_work_that_meets_an_outage_comes_back_as_begun_work(config, lock_proxy, broker_server):
    app = make_app(config)
    task = app.tasks["lab.once_late"]
    lock_proxy.refuse()
    delivery_info = {"exchange": "", "routing_key": config.queue, "redelivered": True}
    request = {"id": "id", "retries": 0, "delivery_info": delivery_info, "hostname": "w@host"}
    request["redislock_delivery"] = arrived(task, request)
    traced = trace_task(task, "id", ("k",), {}, request, app=app)
    assert traced.info.state == "IGNORED"
    message = json.loads(broker_server.client.lpop(config.queue))
    assert message["headers"]["redislock"].get("begun") is True
    assert message["headers"]["redislock"]["times"] == 1


def test_a_run_that_is_cut_short_before_its_result_is_stored_leaves_neither_key_nor_note(config, locks):
    """Celery reports SUCCESS of it all the same."""
    app = make_app(config)
    task = app.tasks["lab.cut_short"]
    delivery_info = {"exchange": "", "routing_key": config.queue, "redelivered": True}
    request = {"id": "id", "retries": 0, "delivery_info": delivery_info, "hostname": "w@host"}
    request["redislock_delivery"] = arrived(task, request)
    with pytest.raises(SystemExit):
        trace_task(task, "id", ("k", "item"), {}, request, app=app)
    wait_until(lambda: not locks.held(), "the key is free", 5)
    assert locks.client.keys() == []
