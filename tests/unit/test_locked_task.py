"""`locked_task`, the parameters of `LockedTask`, and reading the options of a task. None of it needs a server."""

from __future__ import annotations

import ast
import inspect
from typing import get_type_hints

import pytest
from celery import Celery, Task, chain, group

from celery_redislock import LockConfigError, LockedTask, locked_task
from celery_redislock.options import ATTRIBUTES, KEY_OPTIONS, OPTIONS
from celery_redislock.task import decorator
from celery_redislock.task.plan import LockAttributes

URL = "redis://nowhere.invalid:6379/0"


@pytest.fixture
def app():
    return Celery("shop", broker=URL, set_as_current=False)


def double(a: int) -> int:
    """Twice as much."""
    return 2 * a


def bound(self, a: int, *, b: int = 1) -> str:
    return f"{self.name} {a} {b}"


#: What differs between any two tasks.
OF_EACH_APP = {"app", "_app", "run", "__header__", "__trace__", "lock_plan", "_backend", "__wrapped__"}


def attributes_of(task):
    return {name: repr(value) for name, value in vars(type(task)).items() if name not in OF_EACH_APP}


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (double, {}),
        (double, {"name": "shop.twice", "lock_scope": "job", "acks_late": True, "max_retries": 7}),
        (double, {"autoretry_for": (OSError,), "lock_key": "double:{a}"}),
        (bound, {"bind": True, "lock_args": ["a"], "typing": False, "track_started": True}),
    ],
)
def test_the_decorator_makes_the_same_task_as_celerys_own(app, body, options):
    other = Celery("shop", broker=URL, set_as_current=False)
    ours = locked_task(app, shared=False, **options)(body)
    celerys = other.task(base=LockedTask, shared=False, **options)(body)
    assert attributes_of(ours) == attributes_of(celerys)
    assert type(ours).__mro__[1:] == type(celerys).__mro__[1:]
    assert ours.lock_plan.options == celerys.lock_plan.options
    assert ours.lock_for(3).name == celerys.lock_for(3).name
    assert (ours(3), ours.__doc__, ours.__module__) == (celerys(3), celerys.__doc__, celerys.__module__)
    assert inspect.signature(ours.run) == inspect.signature(celerys.run)
    assert app.tasks[ours.name] is ours._get_current_object()
    assert chain(ours.si(1), group(ours.s(2))).tasks[0].task == ours.name


def test_the_decorator_is_as_lazy_as_celerys_own(app):
    locked_task(app, shared=False, lock_scop="job")(double)
    with pytest.raises(LockConfigError, match="lock_scop is not known; did you mean lock_scope"):
        app.finalize()


def test_without_an_app_the_decorator_declares_a_shared_task(app):
    locked_task(name="shop.shared_of_locked_task", lock_scope="job")(double)
    assert app.tasks["shop.shared_of_locked_task"].lock_scope == "job"


def test_a_base_may_be_a_locked_task_of_your_own_and_nothing_else(app):
    class GeoApi(LockedTask):
        abstract = True
        lock_key = "geo"

    assert locked_task(app, base=GeoApi, shared=False)(double).lock_for(1).name == "redislock:{geo}"
    with pytest.raises(TypeError, match="base must be a subclass of LockedTask, not Task"):
        locked_task(app, base=Task)


def test_the_parameters_of_the_class_are_only_for_type_checkers(app):
    class Own(LockedTask[[int], int]):
        abstract = True

    assert LockedTask[[int], int] is LockedTask[..., str] is LockedTask
    assert Own[[int], int] is Own
    assert app.task(base=LockedTask[[int], int], shared=False)(double)(3) == 6
    assert app.task(base=Own[[int], int], shared=False, name="shop.own")(double)(3) == 6


@pytest.mark.parametrize("name", sorted({*KEY_OPTIONS, *OPTIONS}))
def test_an_option_that_is_not_set_answers_with_what_applies(app, name):
    task = app.task(base=LockedTask, shared=False)(double)
    assert getattr(task, f"lock_{name}") == getattr(task.lock_plan.options, name)


def test_an_option_answers_with_its_own_value_or_the_apps_or_the_default(app):
    app.conf.redislock_lease = 12
    task = app.task(base=LockedTask, shared=False, lock_args=["a"], lock_max_hold=60)(double)
    assert (task.lock_lease, task.lock_max_hold, task.lock_scope) == (12, 60, "run")
    assert (task.lock_args, task.lock_on_conflict) == (["a"], "wait")
    assert not hasattr(task, "lock_scop")
    assert not hasattr(app.tasks["celery.chord_unlock"], "lock_scope")


def test_celerys_own_tasks_have_no_lock_options_where_all_tasks_are_locked():
    app = Celery("shop", broker=URL, task_cls=LockedTask, set_as_current=False)
    assert isinstance(app.tasks["celery.chord_unlock"], LockedTask)
    assert not hasattr(app.tasks["celery.chord_unlock"], "lock_scope")


def test_the_decorator_knows_every_option_with_the_type_of_its_attribute():
    """Type checkers read `TaskOptions` at the decorator, and `LockAttributes` on a class. Only they have the first."""
    classes = [one for one in ast.walk(ast.parse(inspect.getsource(decorator))) if isinstance(one, ast.ClassDef)]
    options = next(one for one in classes if one.name == "TaskOptions")
    written = {one.target.id: ast.unparse(one.annotation) for one in options.body if isinstance(one, ast.AnnAssign)}
    read = get_type_hints(type("TaskOptions", (), {"__annotations__": written}), vars(decorator))
    ours = {name: hint for name, hint in read.items() if name.startswith("lock_")}
    assert ours == get_type_hints(LockAttributes)
    assert ours.keys() == ATTRIBUTES
