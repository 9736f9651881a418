"""Options of the lock belong to the task: in a call they are refused, or, where Celery itself publishes, reported."""

from __future__ import annotations

import logging

import pytest
from billiard.exceptions import TimeLimitExceeded
from celery import chain, chord, group
from celery.app.task import Context
from celery.beat import ScheduleEntry, Scheduler

from celery_redislock import LockConfigError, LockedTask

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
        ("lock_scope", "set it in the decorator or the class of the task, or redislock_scope for the app"),
        ("lock_lease", "set it in the decorator or the class of the task, or redislock_lease for the app"),
        ("lock_key", "set it in the decorator or the class of the task"),
        ("lock_scop", "; did you mean lock_scope?"),
        ("lock_ttl", "lock_lease"),
        ("lock_xyzzy", "; known: lock_args, lock_key, "),
    ],
)
def test_a_call_refuses_an_option_and_says_where_it_belongs(tasks, queued, option, told):
    with pytest.raises(LockConfigError) as refused:
        tasks.work.apply_async(("k",), **{option: "secret"})
    message = str(refused.value)
    assert message.startswith(f"lab.work: {option} is ")
    assert told in message
    assert "a call" in message
    assert "secret" not in message
    assert queued() == []


def ways(task, plain):
    """Ways to publish a message of `task` with an option of the lock."""
    return {
        "apply_async": lambda: task.apply_async(("k",), lock_scope="job"),
        "task_id": lambda: task.apply_async(("k",), task_id="mine", lock_scope="job"),
        "set": lambda: task.s("k").set(lock_scope="job").delay(),
        "signature": lambda: task.signature(("k",), lock_scope="job").delay(),
        "chain": lambda: chain(task.si("k").set(lock_scope="job"), plain.si())(),
        "group": lambda: group(task.si("k").set(lock_scope="job"), plain.si())(),
        "chord": lambda: chord([task.si("k").set(lock_scope="job")])(plain.si()),
        "link": lambda: task.apply_async(("k",), link=plain.si(), lock_scope="job"),
        "apply": lambda: task.apply(("k",), lock_scope="job"),
    }


@pytest.mark.parametrize("name", ["work", "job"])
@pytest.mark.parametrize(
    "how", ["apply_async", "task_id", "set", "signature", "chain", "group", "chord", "link", "apply"]
)
def test_every_way_to_call_refuses_it(tasks, plain, queued, name, how):
    with pytest.raises(LockConfigError, match=f"lab.{name}: lock_scope is an option of the task, not of a call"):
        ways(tasks.__getattr__(name), plain)[how]()
    assert queued() == []


@pytest.mark.parametrize("setting", ["redislock_enabled", "task_always_eager"])
def test_it_is_refused_where_locks_are_off_and_in_an_eager_call_too(app, tasks, setting):
    app.conf[setting] = setting != "redislock_enabled"
    with pytest.raises(LockConfigError, match="lock_scope"):
        tasks.work.apply_async(("k",), lock_scope="job")


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


def test_beat_logs_the_refusal_and_goes_on(app, tasks, caplog):
    entry = ScheduleEntry("e", tasks.work.name, schedule=1.0, args=("k",), options={"lock_scope": "job"}, app=app)
    Scheduler(app, lazy=True).apply_entry(entry)
    assert "lab.work: lock_scope is an option of the task, not of a call" in caplog.text


@pytest.mark.parametrize("name", ["work", "job"])
def test_what_celery_publishes_after_a_run_is_sent_without_it_and_an_error_is_logged(
    app, tasks, deliver, queued, errors, name
):
    follows = tasks.__getattr__(name).si("b").set(lock_scope="job", task_id="next")
    assert deliver(app, tasks.work.name, "a", callbacks=[follows])[0] == "SUCCESS"
    assert [message["id"] for message in queued()] == ["next"]
    ((event, task, line),) = errors()
    assert (event, task) == ("call_option", f"lab.{name}")
    assert line.startswith(f"task lab.{name}[next] is sent without lock_scope: lab.{name}: lock_scope is an option")


def test_an_errback_that_the_main_process_publishes_is_sent_without_it(app, tasks, queued, errors):
    """It does so for a task whose process it is about to kill: an error here would leave that process alive."""
    errback = tasks.errback_wait.si("b").set(lock_scope="job")
    request = Context(id="failed", root_id="failed", delivery_info={}, errbacks=[errback])
    app.backend.mark_as_failure("failed", TimeLimitExceeded(1.0), request=request)
    assert len(queued()) == 1
    assert [event for event, *_ in errors()] == ["call_option"]


def test_a_retry_with_an_option_is_sent_without_it_for_the_work_must_not_be_lost(app, deliver, queued, errors):
    @app.task(base=LockedTask, bind=True, name="lab.retried", shared=False)
    def retried(self, key):
        raise self.retry(lock_scope="job", countdown=0)

    assert deliver(app, "lab.retried", "k")[0] == "RETRY"
    assert [(message["id"], message["retries"]) for message in queued()] == [("id", 1)]
    assert [event for event, *_ in errors()] == ["call_option"]


def test_a_bare_call_in_a_body_is_refused_in_the_body(app, tasks, deliver, queued):
    @app.task(base=LockedTask, name="lab.caller", shared=False)
    def caller(key):
        tasks.work.apply_async((key,), lock_scope="job")

    state, error = deliver(app, "lab.caller", "k")
    assert state == "FAILURE"
    assert isinstance(error.exception, LockConfigError)
    assert queued() == []
