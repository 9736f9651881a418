"""The errors: what they are caught as, and that they survive pickle and Celery's result backends."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, states
from celery.exceptions import ImproperlyConfigured
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError, RedisError

from celery_redislock import (
    LockConfigError,
    LockConflict,
    LockInfo,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
)

KEY = "redislock:{shop.bill:é}"
HOLDER = LockInfo(KEY, "an id", "shop.bill", "celery@host", datetime(2026, 1, 2, 3, 4, 5, 678000, UTC), 29.5)
OUTSIDE = LockInfo(KEY, None, None, "host", None, None)

ERRORS: dict[str, RedisLockError] = {
    "conflict with a task": LockConflict(KEY, HOLDER),
    "conflict with no task": LockConflict(KEY, OUTSIDE),
    "conflict with somebody": LockConflict(KEY),
    "conflict after a wait": LockConflict(KEY, HOLDER, 0.5),
    "lost": LockLost(KEY),
    "lost for a reason": LockLost(KEY, "its key was deleted"),
    "unavailable": LockUnavailable(KEY),
    "unavailable for a reason": LockUnavailable(KEY, "TimeoutError: too slow"),
    "key": LockKeyError("shop.bill: parameter 'a' cannot be part of a lock key"),
    "config": LockConfigError("shop.bill: lock_lease = 0 is not allowed"),
}
every_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)


def assert_same(rebuilt: Any, error: RedisLockError) -> None:
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    for name in ("key", "holder", "waited", "reason", "lock_name"):
        assert getattr(rebuilt, name, None) == getattr(error, name, None)
    holder = getattr(rebuilt, "holder", None)
    if holder is not None:
        assert type(holder) is LockInfo
        assert holder.since is None or holder.since.utcoffset() is not None


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickle(error: RedisLockError, protocol: int) -> None:
    """It crosses the pool of a prefork worker."""
    assert_same(pickle.loads(pickle.dumps(error, protocol)), error)  # noqa: S301


@every_error
def test_an_error_survives_copying(error: RedisLockError) -> None:
    assert_same(copy.copy(error), error)
    assert_same(copy.deepcopy(error), error)


@pytest.fixture(params=["json", "pickle", "yaml"])
def result_app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app with a real result backend, in memory."""
    with Celery("unit", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        app.conf.update(result_serializer=request.param, result_accept_content=[request.param])
        yield app


@every_error
def test_an_error_survives_a_result_backend(result_app: Celery, error: RedisLockError) -> None:
    task_id = str(uuid4())
    result_app.backend.store_result(task_id, error, states.FAILURE)
    assert_same(result_app.AsyncResult(task_id).result, error)


@every_error
def test_an_errors_arguments_are_plain_values(error: RedisLockError) -> None:
    """What a backend cannot serialize it stores as text, and then the error cannot be rebuilt."""
    assert_same(type(error)(*json.loads(json.dumps(error.args))), error)


@every_error
def test_an_error_can_be_shown(error: RedisLockError) -> None:
    """In a log line, in a debugger, in the events of a worker."""
    assert repr(error) == f"{type(error).__name__}({str(error)!r})"
    assert str(error)


@every_error
def test_an_error_is_as_complete_as_redis_pys_own(error: RedisLockError) -> None:
    """What reads the attributes of redis-py's errors can read those of ours."""
    for base in type(error).__mro__:
        if issubclass(base, RedisError) and base.__module__.startswith("redis"):
            for name in vars(base()):
                assert hasattr(error, name)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (LockConflict, {LockError}),
        (LockLost, {LockError, LockNotOwnedError}),
        (LockUnavailable, {RedisConnectionError}),
        (LockKeyError, {ValueError}),
        (LockConfigError, {ImproperlyConfigured}),
    ],
)
def test_an_error_is_caught_as_ours_and_as_redis_pys_or_celerys(error: type, bases: set[type]) -> None:
    assert {RedisLockError, *bases} <= set(error.__mro__)


@pytest.mark.parametrize("held", [LockConflict, LockLost])
def test_an_outage_and_a_held_lock_are_never_the_same_class(held: type) -> None:
    """But for the bases of all errors of ours, of redis-py and of Python."""
    common = set(LockUnavailable.__mro__) & set(held.__mro__)
    assert common == {RedisLockError, RedisError, Exception, BaseException, object}


def test_each_error_is_one_kind_alone() -> None:
    kinds = [LockConflict, LockLost, LockUnavailable, LockKeyError, LockConfigError]
    for kind in kinds:
        assert [other for other in kinds if issubclass(kind, other)] == [kind]


def test_a_conflict_names_the_key_and_the_holder() -> None:
    assert str(LockConflict(KEY, HOLDER)) == f"the lock {KEY} is held by task an id on celery@host"
    assert str(LockConflict(KEY)) == f"the lock {KEY} is already held"
    assert str(LockConflict(KEY, None, 2)).endswith("is already held; gave up after 2 s in line (lock_wait_for)")


def test_a_loss_and_an_outage_name_the_key_and_the_reason() -> None:
    assert KEY in str(LockLost(KEY, "a reason"))
    assert "a reason" in str(LockLost(KEY, "a reason"))
    assert KEY in str(LockUnavailable(KEY, "a reason"))
    assert "a reason" in str(LockUnavailable(KEY, "a reason"))


@pytest.mark.parametrize("error", [LockConflict(KEY), LockLost(KEY)])
def test_redis_pys_names_for_the_data_work(error: LockConflict | LockLost) -> None:
    assert (error.lock_name, error.message) == (KEY, str(error))
