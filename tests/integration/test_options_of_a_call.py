"""Lock options of a call: those that a call may set travel with its message, and apply to it.

All others are refused, or, where Celery itself publishes, reported.
"""

from __future__ import annotations

import logging

import pytest
from billiard.exceptions import TimeLimitExceeded
from celery import chain, chord, group
from celery.app.task import Context
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConfigError, LockConflict, LockedTask, LockKeyError
from celery_redislock.app import server_of
from celery_redislock.message.header import Header
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt, mint, mint_nonce, origin
from celery_redislock.testing import busy
from tests.lab.app import make_app
from tests.lab.asking import acquire

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")


@pytest.fixture
def plain(app):
    """A task of Celery's own kind."""

    @app.task(name="lab.of_celery", shared=False)
    def plain(key=""): ...

    return plain


@pytest.fixture
def errors(log):
    """The lines at ERROR, and what they concern."""
    return lambda: [
        (record.redislock_event, record.redislock_task, record.getMessage())
        for record in log.records
        if record.levelno == logging.ERROR and record.name.startswith("celery_redislock")
    ]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("lock_lease", "set it in the decorator or the class of the task, or redislock_lease for the app"),
        ("lock_key", "set it in the decorator or the class of the task"),
        ("lock_scop", "; did you mean lock_scope?"),
        ("lock_ttl", "lock_lease"),
        ("lock_xyzzy", "; known: lock_args, lock_key, "),
    ],
)
def test_a_call_refuses_an_option_and_says_where_it_belongs_and_what_a_call_may_set(tasks, queued, option, told):
    with pytest.raises(LockConfigError) as refused:
        tasks.work.apply_async(("k",), **{option: "secret"})
    message = str(refused.value)
    assert message.startswith(f"lab.work: {option} is ")
    assert told in message
    assert message.endswith(
        "; a call may set lock_scope, lock_on_conflict, lock_wait_for, lock_cooldown or lock_window"
    )
    assert "secret" not in message
    assert queued() == []


def ways(task, plain):
    """Ways to publish a message of `task` with an option that belongs on the task."""
    return {
        "apply_async": lambda: task.apply_async(("k",), lock_fence=True),
        "task_id": lambda: task.apply_async(("k",), task_id="mine", lock_fence=True),
        "set": lambda: task.s("k").set(lock_fence=True).delay(),
        "signature": lambda: task.signature(("k",), lock_fence=True).delay(),
        "chain": lambda: chain(task.si("k").set(lock_fence=True), plain.si())(),
        "group": lambda: group(task.si("k").set(lock_fence=True), plain.si())(),
        "chord": lambda: chord([task.si("k").set(lock_fence=True)])(plain.si()),
        "link": lambda: task.apply_async(("k",), link=plain.si(), lock_fence=True),
        "apply": lambda: task.apply(("k",), lock_fence=True),
    }


@pytest.mark.parametrize("name", ["work", "job"])
@pytest.mark.parametrize(
    "how", ["apply_async", "task_id", "set", "signature", "chain", "group", "chord", "link", "apply"]
)
def test_every_way_to_call_refuses_it(tasks, plain, queued, name, how):
    with pytest.raises(LockConfigError, match=f"lab.{name}: lock_fence is an option of the task, not of a call"):
        ways(tasks.__getattr__(name), plain)[how]()
    assert queued() == []


@pytest.mark.parametrize("setting", ["redislock_enabled", "task_always_eager"])
def test_it_is_refused_where_locks_are_off_and_in_an_eager_call_too(app, tasks, setting):
    app.conf[setting] = setting != "redislock_enabled"
    with pytest.raises(LockConfigError, match=r"lock_scop is not known; did you mean lock_scope\?"):
        tasks.work.apply_async(("k",), lock_scop="job")
    with pytest.raises(LockConfigError, match="lock_scope = 'jobs' is not allowed"):
        tasks.work.apply_async(("k",), lock_scope="jobs")


def test_arguments_of_the_task_may_have_such_names(app, queued):
    @app.task(base=LockedTask, name="lab.named", shared=False)
    def named(lock_scope, lock_color):
        return lock_scope, lock_color

    assert named.apply(kwargs={"lock_scope": 1, "lock_color": 2}).get() == (1, 2)
    named.delay(lock_scope=1, lock_color=2)
    named.s(lock_color=2).delay(lock_scope=1)
    assert len(queued()) == 2


def test_a_task_without_a_lock_takes_what_it_took(plain, queued):
    plain.apply_async(("k",), lock_scope="job")
    assert len(queued()) == 1


def test_a_beat_entry_may_have_them(app, tasks, queued):
    entry = ScheduleEntry("e", tasks.work.name, schedule=1.0, args=("k",), options={"lock_scope": "job"}, app=app)
    Scheduler(app, lazy=True).apply_entry(entry)
    Scheduler(app, lazy=True).apply_entry(entry)
    assert options_sent(queued) == [{"scope": "job"}]


def test_beat_logs_the_refusal_and_goes_on(app, tasks, caplog):
    entry = ScheduleEntry("e", tasks.work.name, schedule=1.0, args=("k",), options={"lock_fence": True}, app=app)
    Scheduler(app, lazy=True).apply_entry(entry)
    assert "lab.work: lock_fence is an option of the task, not of a call" in caplog.text


@pytest.mark.parametrize("name", ["work", "job"])
def test_what_celery_publishes_after_a_run_is_sent_without_it_and_an_error_is_logged(
    app, tasks, deliver, queued, errors, name
):
    follows = tasks.__getattr__(name).si("b").set(lock_fence=True, task_id="next")
    assert deliver(app, tasks.work.name, "a", callbacks=[follows])[0] == "SUCCESS"
    assert [message["id"] for message in queued()] == ["next"]
    ((event, task, line),) = errors()
    assert (event, task) == ("call_option", f"lab.{name}")
    assert line.startswith(f"task lab.{name}[next] is sent without lock_fence: lab.{name}: lock_fence is an option")


def test_an_errback_that_the_main_process_publishes_is_sent_without_it(app, tasks, queued, errors):
    """It does so for a task whose process it is about to kill: an error here would leave that process alive."""
    errback = tasks.errback_wait.si("b").set(lock_fence=True)
    request = Context(id="failed", root_id="failed", delivery_info={}, errbacks=[errback])
    app.backend.mark_as_failure("failed", TimeLimitExceeded(1.0), request=request)
    assert len(queued()) == 1
    assert [event for event, *_ in errors()] == ["call_option"]


def test_a_retry_with_an_option_is_sent_without_it_for_the_work_must_not_be_lost(app, deliver, queued, errors):
    @app.task(base=LockedTask, bind=True, name="lab.retried", shared=False)
    def retried(self, key):
        raise self.retry(lock_fence=True, countdown=0)

    assert deliver(app, "lab.retried", "k")[0] == "RETRY"
    assert [(message["id"], message["retries"]) for message in queued()] == [("id", 1)]
    assert [event for event, *_ in errors()] == ["call_option"]


def test_a_bare_call_in_a_body_is_refused_in_the_body(app, tasks, deliver, queued):
    @app.task(base=LockedTask, name="lab.caller", shared=False)
    def caller(key):
        tasks.work.apply_async((key,), lock_fence=True)

    state, error = deliver(app, "lab.caller", "k")
    assert state == "FAILURE"
    assert isinstance(error.exception, LockConfigError)
    assert queued() == []


# Options that a call may set.


def options_sent(queued):
    """The lock options in the header of each queued message."""
    return [message["redislock"].get("options") for message in queued()]


ALL = {"lock_scope": "queue", "lock_on_conflict": "wait", "lock_wait_for": 5, "lock_cooldown": 0}
SENT = {"scope": "queue", "on_conflict": "wait", "wait_for": 5, "cooldown": 0}


def test_a_message_carries_what_its_call_has_set_and_nothing_else(tasks, queued):
    tasks.work.apply_async(("k",), **ALL)
    tasks.work.apply_async(("k",), lock_wait_for=None)
    tasks.work.apply_async(("k",))
    assert options_sent(queued) == [None, {"wait_for": None}, SENT]
    assert not any(name.startswith("lock_") for message in queued() for name in message)


@pytest.mark.parametrize("task", ["work", "job"])
def test_a_message_whose_call_has_set_none_has_the_header_it_had(tasks, queued, task):
    tasks.__getattr__(task).apply_async(("k",))
    (message,) = queued()
    expected = ["publish", "published"] if task == "work" else ["publish", "claim", "key", "published"]
    assert list(message["redislock"]) == expected


def test_a_canvas_carries_the_options_of_each_signature(tasks, plain, queued):
    chain(tasks.work.si("first").set(lock_cooldown=1), tasks.work.si("next").set(lock_on_conflict="join"))()
    group(tasks.work.si("one"), tasks.work.si("two")).apply_async(lock_on_conflict="raise")
    tasks.work.apply_async(("k",), link=tasks.work.si("link").set(lock_wait_for=3))
    chain(tasks.work.si("first"), tasks.work.si("next")).apply_async(lock_wait_for=4)
    sent = [{"wait_for": 4}, None, {"on_conflict": "raise"}, {"on_conflict": "raise"}, {"cooldown": 1}]
    assert options_sent(queued) == sent


def test_what_follows_a_run_carries_the_options_of_its_own_signature(app, tasks, deliver, queued):
    follows = tasks.work.si("b").set(lock_on_conflict="join")
    header = {"options": {"on_conflict": "raise"}}
    assert deliver(app, tasks.work.name, "a", callbacks=[follows], redislock=header)[0] == "SUCCESS"
    assert options_sent(queued) == [{"on_conflict": "join"}]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lock_scope": "jobs"}, "lock_scope = 'jobs' is not allowed; allowed: 'run' or 'job' or 'queue'; did you"),
        ({"lock_scope": ["job"]}, "lock_scope = \\['job'\\] is not allowed"),
        ({"lock_scope": None}, "lock_scope = None is not allowed"),
        ({"lock_on_conflict": "skipp"}, "did you mean 'skip'?"),
        ({"lock_on_conflict": {}}, "lock_on_conflict = {} is not allowed"),
        ({"lock_wait_for": 0}, "lock_wait_for = 0 is not allowed; allowed: seconds greater than 0"),
        ({"lock_wait_for": -1}, "lock_wait_for = -1 is not allowed"),
        ({"lock_wait_for": "5"}, "lock_wait_for = '5' is not allowed"),
        ({"lock_wait_for": True}, "lock_wait_for = True is not allowed"),
        ({"lock_wait_for": float("nan")}, "lock_wait_for = nan is not allowed"),
        ({"lock_cooldown": -0.1}, "lock_cooldown = -0.1 is not allowed; allowed: seconds, 0 or greater"),
        ({"lock_cooldown": None}, "lock_cooldown = None is not allowed"),
        ({"lock_cooldown": 10**400}, "lock_cooldown = 1000.* is not allowed"),
        ({"lock_scope": "queue", "lock_on_conflict": "skip"}, "'queue' with lock_on_conflict = 'skip' is not allowed"),
        ({"lock_scope": "job", "lock_wait_for": 1, "lock_cooldown": "1"}, "lock_cooldown = '1' is not allowed"),
    ],
)
@pytest.mark.parametrize("way", ["apply_async", "set", "apply"])
def test_a_value_or_a_combination_that_a_task_could_not_have_is_refused(tasks, queued, options, told, way):
    call = {
        "apply_async": lambda: tasks.work.apply_async(("k",), **options),
        "set": lambda: tasks.work.si("k").set(**options).delay(),
        "apply": lambda: tasks.work.apply(("k",), **options),
    }[way]
    with pytest.raises(LockConfigError, match=told) as refused:
        call()
    assert str(refused.value).startswith("lab.work: lock_")
    assert queued() == []


def test_a_combination_with_an_option_of_the_task_is_refused(app, tasks, queued):
    with pytest.raises(LockConfigError, match="lock_scope = 'queue' with lock_on_conflict = 'skip' is not allowed"):
        tasks.once.apply_async(("k",), lock_scope="queue")
    with pytest.raises(LockConfigError, match="lock_scope = 'queue' with lock_on_conflict = 'join' is not allowed"):
        tasks.queued.apply_async(("k",), lock_on_conflict="join")
    with pytest.raises(LockConfigError, match="lock_limit = 3 is not allowed with lock_scope = 'job'"):
        tasks.three.apply_async(("k",), lock_scope="job")
    with pytest.raises(LockConfigError, match="lock_limit = 3 is not allowed with lock_cooldown"):
        tasks.three.apply_async(("k",), lock_cooldown=1)
    assert queued() == []


@pytest.mark.parametrize("backend", ["rpc://", None])
def test_join_is_refused_where_the_result_of_the_holder_cannot_be_read(config, backend):
    with make_app(config) as app:
        app.conf.result_backend = backend

        @app.task(base=LockedTask, name="lab.private", shared=False)
        def private(key): ...

        with pytest.raises(LockConfigError, match=r"lab.private: lock_on_conflict = 'join' needs the holder's result"):
            private.apply_async(("k",), lock_on_conflict="join")


def test_join_is_refused_where_the_results_of_the_task_are_ignored(app):
    @app.task(base=LockedTask, name="lab.ignored", shared=False, ignore_result=True)
    def ignored(key): ...

    with pytest.raises(LockConfigError, match=r"lock_on_conflict = 'join' .* its results are ignored"):
        ignored.apply_async(("k",), lock_on_conflict="join")


def test_the_default_policy_is_that_of_a_task_with_these_options(app):
    @app.task(base=LockedTask, name="lab.plainest", shared=False)
    def plainest(key): ...

    plan = plainest.lock_plan
    assert plan.options.on_conflict == "skip"
    assert plan.options_of({"scope": "queue"}).on_conflict == "wait"
    assert plan.options_of({"scope": "job"}).on_conflict == "skip"
    assert plan.options_for(Header()) is plan.options


def test_a_task_of_another_scope_runs_a_call_in_scope_run_by_its_default(tasks):
    assert tasks.queued.lock_plan.options_of({"scope": "run"}).on_conflict == "wait"  # for it has lock_args


@pytest.mark.parametrize("setting", ["redislock_enabled", "task_always_eager"])
def test_they_are_taken_where_locks_are_off_and_in_an_eager_call(app, tasks, queued, setting):
    app.conf[setting] = setting != "redislock_enabled"
    tasks.work.apply_async(("k",), **ALL)
    assert [name for message in queued() for name in message if name in {"redislock", *ALL}] == []


def test_a_task_of_celerys_own_checks_the_names_alone(app, queued):
    app.task_cls = LockedTask

    @app.task(base=LockedTask, name="celery.own", shared=False)
    def own(key): ...

    with pytest.raises(LockConfigError, match=r"did you mean lock_scope\?"):
        own.apply_async(("k",), lock_scop="job")
    own.apply_async(("k",), lock_scope="job")
    assert len(queued()) == 1


# A publish.


def test_scope_job_of_a_call_is_answered_with_a_job_that_is_queued_or_runs(app, tasks, deliver, queued):
    first = tasks.work.apply_async(("k", "a"), lock_scope="job")
    again = tasks.work.apply_async(("k", "b"), lock_scope="job")
    other = tasks.work.apply_async(("k", "c"))
    assert (again.id, again.duplicate) == (first.id, True)
    assert (other.duplicate, len(queued())) == (False, 2)


def test_scope_queue_of_a_call_takes_the_place_in_the_queue(tasks, queued):
    first = tasks.work.apply_async(("k", "a"), lock_scope="queue")
    assert tasks.work.apply_async(("k", "b"), lock_scope="queue").id == first.id
    assert [message["redislock"].get("queued") for message in queued()] == [True]


def test_scope_run_of_a_call_reserves_nothing(tasks, queued, locks):
    tasks.job.apply_async(("k",), lock_scope="run")
    tasks.job.apply_async(("k",), lock_scope="run")
    assert len(queued()) == 2
    assert locks.client.keys() == []


def test_arguments_that_make_no_key_fail_a_call_of_scope_job(tasks):
    with pytest.raises(LockKeyError):
        tasks.keyed.apply_async((1.5,), lock_scope="job")
    tasks.keyed.apply_async((1.5,))


# A run.


def test_a_run_follows_the_policy_of_its_message(app, tasks, deliver):
    with tasks.work.lock_for("k"):
        for policy, state in {"skip": "REVOKED", "raise": "FAILURE"}.items():
            deliver(app, "lab.work", "k", id=policy, redislock={"options": {"on_conflict": policy}})
            assert app.AsyncResult(policy).state == state


def test_a_run_cools_down_as_its_message_says(app, tasks, deliver):
    assert deliver(app, "lab.work", "k", redislock={"options": {"cooldown": 50}})[0] == "SUCCESS"
    info = tasks.work.lock_info("k")
    assert info.state == "cooling"
    assert 40 < info.ttl <= 50


def test_the_refused_run_of_a_call_that_raises_is_expected(app, tasks, deliver, caplog):
    """As one of a task that raises: in one line, without a traceback. A conflict that nobody asked for is an error."""
    caplog.set_level(logging.INFO)
    with tasks.work.lock_for("k"):
        deliver(app, "lab.work", "k", redislock={"options": {"on_conflict": "raise"}})
    assert "raised expected: LockConflict(" in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert isinstance(tasks.work.throws, tuple)
    assert not isinstance(LockConflict("k"), tasks.work.throws)


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "for ever", "on_conflict": "skip", "xyzzy": 1},
        {"on_conflict": "skip", "wait_for": -1, "lease": 1, "": []},
        {"on_conflict": "skip", "cooldown": True, "window": {}},
    ],
)
def test_an_unknown_name_or_a_wrong_value_in_a_header_is_passed_over(app, tasks, deliver, errors, options):
    with tasks.work.lock_for("k"):
        deliver(app, "lab.work", "k", redislock={"options": options})
    assert app.AsyncResult("id").state == "REVOKED"
    assert errors() == []


@pytest.mark.parametrize("options", [None, [], "skip", 1, {}, {"on_conflict": 1}, {1: 2}])
def test_a_header_without_a_valid_option_is_that_of_a_plain_call(app, deliver, errors, options):
    assert deliver(app, "lab.work", "k", redislock={"options": options})[0] == "SUCCESS"
    assert Header.read({"options": options}).options is None
    assert errors() == []


def test_a_combination_that_this_version_of_the_task_does_not_allow_is_an_error_in_the_log(
    app, deliver, errors, queued
):
    """The message runs by the options of the task, and says so once, though it retries."""

    @app.task(base=LockedTask, bind=True, name="lab.limited", shared=False, lock_limit=2)
    def limited(self, key):
        raise self.retry(countdown=0)

    header = {"options": {"scope": "job", "wait_for": 5}}
    assert deliver(app, "lab.limited", "k", redislock=header)[0] == "RETRY"
    ((event, task, line),) = errors()
    assert (event, task) == ("call_option", "lab.limited")
    assert line.startswith(
        "task lab.limited[id] runs without the lock options of its call: lab.limited: lock_limit = 2"
    )
    assert options_sent(queued) == [None]


@pytest.mark.parametrize(
    ("own", "of_call", "state"),
    [(0.0, {"cooldown": 50}, "PENDING"), (50.0, {"cooldown": 0}, "PENDING"), (50.0, None, "REVOKED")],
)
def test_who_comes_between_a_result_and_the_release_is_skipped_only_where_the_key_must_cool_down(
    app, deliver, queued, own, of_call, state
):
    """The call of the holder may have set another cooldown, so its key may be free in a moment."""

    @app.task(base=LockedTask, name="lab.skips", shared=False, lock_cooldown=own)
    def skips(key): ...

    store = server_of(app).store
    token = mint(mint_nonce(), Attempt("holder", 0, 0), origin("w@host", "lab.skips"))
    acquire(store, Demand(skips.lock_for("k").name), token, 30.0)
    app.backend.mark_as_done("holder", "result")
    deliver(app, "lab.skips", "k", redislock={"options": of_call})
    assert app.AsyncResult("id").state == state
    assert options_sent(queued) == ([] if state == "REVOKED" else [of_call])


# A retry.


@pytest.fixture
def retries(app):
    """A task that retries itself, with options if the test says so."""

    @app.task(base=LockedTask, bind=True, name="lab.retries", shared=False)
    def retries(self, key, **options):
        if not self.request.retries:
            raise self.retry(countdown=0, **options)
        return key

    return retries


KEPT = {"scope": "queue", "wait_for": 5, "cooldown": 0}


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ({}, KEPT),
        ({"lock_wait_for": None}, {**KEPT, "wait_for": None}),
        ({"lock_scope": "job", "lock_on_conflict": "join"}, {**KEPT, "scope": "job", "on_conflict": "join"}),
    ],
)
def test_a_retry_keeps_the_options_of_its_run_but_for_its_own(app, deliver, queued, own, sent):
    @app.task(base=LockedTask, bind=True, name="lab.retries", shared=False)
    def retries(self, key):
        raise self.retry(countdown=0, **own)

    deliver(app, "lab.retries", "k", redislock={"options": KEPT})
    assert options_sent(queued) == [sent]


def test_the_retry_of_a_call_of_scope_job_keeps_the_key(app, tasks, retries, deliver, queued):
    deliver(app, "lab.retries", "k", redislock={"options": {"scope": "job"}})
    assert retries.lock_info("k").state == "queued"
    (message,) = queued()
    assert message["redislock"]["claim"]


def test_an_automatic_retry_keeps_them_too(app, deliver, queued):
    @app.task(base=LockedTask, name="lab.fails", shared=False, autoretry_for=(OSError,))
    def fails(key):
        raise OSError(key)

    deliver(app, "lab.fails", "k", redislock={"options": KEPT})
    assert options_sent(queued) == [KEPT]


def test_a_replacement_keeps_nothing(app, tasks, deliver, queued):
    @app.task(base=LockedTask, bind=True, name="lab.replaces", shared=False)
    def replaces(self, key):
        raise self.replace(tasks.work.si(key))

    deliver(app, "lab.replaces", "k", redislock={"options": KEPT})
    assert options_sent(queued) == [None]


def test_a_call_in_a_body_keeps_nothing(app, tasks, deliver, queued):
    @app.task(base=LockedTask, bind=True, name="lab.calls_others", shared=False)
    def calls(self, key):
        tasks.work.delay(key)
        tasks.work.apply_async((key,), headers=self.request.headers)

    deliver(app, "lab.calls_others", "k", redislock={"options": KEPT})
    assert options_sent(queued) == [None, None]


# An eager run.


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("scope", ["run", "job"])
def test_an_eager_run_follows_the_policy_of_its_call(app, tasks, always, scope):
    app.conf.task_always_eager = always
    call = tasks.work.apply_async if always else tasks.work.apply
    with busy(tasks.work.lock_for("k")):
        for policy, error in {"raise": LockConflict, "skip": TaskRevokedError}.items():
            # A lock outside tasks is no job, so a job waits for it.
            result = call(("k",), lock_on_conflict=policy, lock_scope="run")
            assert isinstance(result.result, error)
    assert call(("k",), lock_cooldown=50, lock_scope=scope).get(disable_sync_subtasks=False) == ""
    assert tasks.work.lock_info("k").state == "cooling"


@pytest.mark.parametrize("always", [False, True])
def test_the_retry_of_an_eager_run_keeps_them(app, retries, always):
    app.conf.task_always_eager = always
    call = retries.apply_async if always else retries.apply
    assert call(("k",), lock_cooldown=50).get(disable_sync_subtasks=False) == "k"
    assert retries.lock_info("k").state == "cooling"


def test_an_eager_run_does_not_show_them_in_its_headers(app):
    @app.task(base=LockedTask, bind=True, name="lab.shows", shared=False)
    def shows(self):
        return self.request.headers

    assert shows.apply(lock_cooldown=1, headers={"mine": 1}).get() == {"mine": 1}
