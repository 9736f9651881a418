"""Options of other plugins, which Celery takes as plain attributes: they lock nothing, and somebody must say so."""

from __future__ import annotations

import pytest
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_redislock import LockConfigError, LockedTask


@pytest.fixture
def define(app, request, log):
    """Makes a task and binds it; returns what is said of it."""

    def make(number=0, base=LockedTask, **options):
        name = f"shop.{request.node.name}{number}"
        app.tasks.pop(name, None)

        @app.task(name=name, base=base, shared=False, **options)
        def task(a, b=None): ...

        assert task.app is app
        return [record.getMessage().replace(name, "shop.f") for record in log.records]

    return make


ALL = " Until then, its key is made of all its arguments."


@pytest.mark.parametrize(
    ("options", "plugin", "instead"),
    [
        ({"once": {"keys": ["a"], "graceful": True}}, "celery-once", "lock_args=['a'], lock_scope='job'." + ALL),
        ({"once": {"keys": []}}, "celery-once", "lock_args=[], lock_scope='job'." + ALL),
        ({"once": {"graceful": True}}, "celery-once", "lock_scope='job'." + ALL),
        ({"once": {"unlock_before_run": True, "timeout": 60}}, "celery-once", "lock_scope='queue'." + ALL),
        ({"once": {"keys": ("a",)}, "lock_args": ["a"]}, "celery-once", "lock_args=['a'], lock_scope='job'."),
        ({"unique_on": ["a", "b"]}, "celery-singleton", "lock_args=['a', 'b'], lock_scope='job'." + ALL),
        ({"unique_on": "a"}, "celery-singleton", "lock_args=['a'], lock_scope='job'." + ALL),
        ({"unique_on": []}, "celery-singleton", "lock_scope='job'." + ALL),
        (
            {"raise_on_duplicate": True, "lock_key": "f:{a}"},
            "celery-singleton",
            "lock_scope='job', and raise where the `duplicate` of what delay() returns is true.",
        ),
    ],
)
def test_a_leftover_is_named_with_what_to_write(define, options, plugin, instead):
    (name, *_) = options
    (said,) = define(**options)
    assert (
        said == f"task shop.f: the option {name!r} belongs to {plugin} and has no effect here; instead, set {instead}"
    )


def test_it_is_said_once_in_a_process(define):
    assert len(define(unique_on=["a"])) == 1
    assert len(define(unique_on=["a"])) == 1
    assert len(define(number=1, unique_on=["a"])) == 2


@pytest.mark.parametrize("plugin", [QueueOnce, Singleton])
def test_nothing_is_said_where_the_plugin_itself_is_mixed_in(define, plugin):
    """As on the way over, which docs/migrating.md describes."""

    class Both(plugin, LockedTask):
        abstract = True

    assert define(base=Both, **({"once": {"keys": ["a"]}} if plugin is QueueOnce else {"unique_on": ["a"]})) == []


def test_of_what_only_has_the_same_name_nothing_is_said(define):
    class Own(LockedTask):
        abstract = True
        unique_on = None

        def once(self): ...

    assert define(base=Own) == []


def test_lock_expiry_is_refused_with_what_to_write(define):
    with pytest.raises(LockConfigError) as refused:
        define(lock_expiry=10)
    assert str(refused.value).endswith(
        "lock_expiry is not known; did you mean lock_lease, how long the lock outlives a dead holder, or "
        "lock_max_hold, the longest that a run may hold it?"
    )
