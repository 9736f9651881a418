"""What the log says of a run, traced as a pool child does it: what happened to which task, and what is next."""

from __future__ import annotations

import logging

import pytest
from celery import states

from celery_redislock import LockConflict, LockedTask

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")


def nothing(key): ...


@pytest.fixture
def task(app):
    """Makes a task: ``task(lock_on_conflict="skip")``; its body does what it is told to."""

    def make(body=nothing, **options):
        options = {"base": LockedTask, "name": "lab.lines", "shared": False, "lock_args": ["key"], **options}
        return app.task(**options)(body)

    return make


@pytest.fixture
def celerys(caplog):
    """What Celery itself has logged."""
    caplog.set_level(logging.INFO, "celery.app.trace")
    return lambda: [record for record in caplog.records if record.name == "celery.app.trace"]


class TestRaise:
    """A conflict by policy ``raise`` was asked for: it is no error for the log."""

    def test_celery_logs_it_as_expected_and_names_the_holder(self, app, task, deliver, celerys):
        task = task(lock_on_conflict="raise")
        with task.lock_for("k"):
            assert deliver(app, task.name, "k")[0] == states.FAILURE
        (record,) = celerys()
        assert (record.levelno, record.exc_info) == (logging.INFO, None)
        assert "redislock:{lab.lines:" in record.getMessage()
        assert "is held by a lock outside tasks on " in record.getMessage()

    @pytest.mark.parametrize("throws", [(KeyError,), KeyError, ()])
    def test_what_the_user_expects_besides_stays_so(self, app, task, deliver, celerys, throws):
        def body(key):
            raise {"a": KeyError, "b": ValueError}[key]

        task = task(body, lock_on_conflict="raise", throws=throws)
        for key, level in {"a": logging.INFO if throws else logging.ERROR, "b": logging.ERROR}.items():
            deliver(app, task.name, key)
            assert celerys()[-1].levelno == level

    def test_an_unlucky_end_by_another_policy_is_an_error(self, app, task, deliver, celerys):
        task = task(lock_on_conflict="retry", lock_retry_for=0.1)
        with task.lock_for("k"):
            came_back = {"times": 1, "since": 1.0, "begun": False}
            state, outcome = deliver(app, task.name, "k", redislock=came_back)
        assert state == states.FAILURE
        assert isinstance(outcome.exception, LockConflict)
        assert celerys()[-1].levelno == logging.ERROR
        assert task.throws == ()
