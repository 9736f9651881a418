"""What `celery_redislock.celery_port` needs of Celery."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import trace_task
from celery.app.utils import Settings, bugreport
from celery.exceptions import Ignore
from pydantic import BaseModel

from celery_redislock import celery_port


class Order(BaseModel):
    number: int


@pytest.fixture
def app():
    app = Celery("contracts", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


def test_a_thread_without_an_app_has_none(app, monkeypatch):
    monkeypatch.setattr("celery._state.default_app", None)  # a worker that ran in this process has set its own
    found = []
    thread = threading.Thread(target=lambda: found.append(celery_port.app_of_this_thread()))
    thread.start()
    thread.join()
    assert found == [None]


def test_the_current_app_is_that_of_the_thread_that_has_set_it(app):
    found = []

    def set_and_look() -> None:
        app.set_current()
        found.append(celery_port.app_of_this_thread())

    thread = threading.Thread(target=set_and_look)
    thread.start()
    thread.join()
    assert found == [app]


def test_apps_that_may_be_current_are_listed_and_others_are_not(app):
    other = Celery("other", broker="memory://")
    assert other in celery_port.current_apps()
    assert app not in celery_port.current_apps()
    other.close()


def test_there_is_an_app_of_last_resort_and_it_is_no_proxy():
    assert type(celery_port.app_of_last_resort()) is Celery


def test_bound_tasks_are_those_that_were_bound_and_asking_binds_none(app):
    @app.task(name="contracts.lazy", shared=False)
    def lazy() -> None: ...

    assert "contracts.lazy" not in celery_port.bound_tasks(app)
    assert "contracts.lazy" in app.tasks
    assert "contracts.lazy" in celery_port.bound_tasks(app)


def test_a_task_is_among_the_bound_ones_by_the_time_it_is_bound(app):
    class Base(Task):
        abstract = True

        @classmethod
        def on_bound(cls, app: Celery) -> None:
            seen.append([name for name, task in celery_port.bound_tasks(app).items() if type(task) is cls])

    class Own(Base):
        def __init__(self, name: str) -> None:
            self.name = name

    seen: list[list[str]] = []
    app.finalize()
    app.register_task(Own("contracts.first"))
    app.register_task(Own("contracts.second"))

    @app.task(name="contracts.third", base=Base, shared=False)
    def third() -> None: ...

    assert seen == [["contracts.first"], ["contracts.first", "contracts.second"], ["contracts.third"]]


def test_a_hidden_setting_is_shown_as_asterisks(app):
    celery_port.hide_setting("contracts_word")
    app.conf.contracts_word = "secret"
    assert isinstance(app.conf, Settings)
    assert "secret" not in str(app.conf.humanize(with_defaults=False))
    assert "secret" not in bugreport(app)


def test_a_task_is_bound_when_its_app_is_asked_for(app):
    @app.task(name="contracts.bound", shared=False)
    def bound() -> None: ...

    assert celery_port.bind(bound) is app


def test_the_tasks_of_this_thread_are_those_that_run_in_it(app):
    @app.task(name="contracts.inner", shared=False)
    def inner() -> list[str]:
        return [task.name for task in celery_port.tasks_of_this_thread()]

    @app.task(name="contracts.outer", shared=False)
    def outer() -> list[str]:
        return inner.apply().get(disable_sync_subtasks=False)

    assert outer.apply().get() == ["contracts.outer", "contracts.inner"]
    assert [*celery_port.tasks_of_this_thread()] == []


def test_the_requests_of_a_task_are_those_of_all_threads(app):
    @app.task(name="contracts.threaded", shared=False, bind=True)
    def threaded(self: Any) -> list[str]:
        with ThreadPoolExecutor(1) as threads:
            return [one.id for one in threads.submit(celery_port.requests_of, self).result()]

    task = app.tasks["contracts.threaded"]
    assert celery_port.requests_of(task) == []
    assert task.apply(task_id="runs").get() == ["runs"]


def test_the_body_that_autoretry_calls_can_be_replaced(app):
    @app.task(name="contracts.retried", shared=False, autoretry_for=(OSError,))
    def retried() -> str:
        return "before"

    task = app.tasks["contracts.retried"]
    body = celery_port.retried_body(task)
    assert body is not None
    assert body() == "before"
    celery_port.set_retried_body(task, lambda: "after")
    assert task.apply().get() == "after"


def test_a_tracer_is_kept_in_the_task_called_by_what_is_there_and_tells_the_state(app):
    @app.task(name="contracts.traced", shared=False, bind=True)
    def traced(self: Any, how: type[Exception] | None) -> str:
        if how is not None:
            raise how
        return "done"

    task = app.tasks["contracts.traced"]
    assert task.__trace__ is None
    assert trace_task(task, "id", (None,), {}, {"id": "id"}, app=app).info is None
    tracer, seen = task.__trace__, []
    task.__trace__ = lambda *args: seen.append(tracer(*args)) or seen[-1]
    trace_task(task, "id", (Ignore,), {}, {"id": "id"}, app=app)
    trace_task(task, "id", (KeyError,), {}, {"id": "id"}, app=app)
    assert [one.info.state for one in seen] == ["IGNORED", "FAILURE"]
    assert isinstance(seen[0].info.retval, Ignore)


def test_a_task_without_autoretry_has_no_such_body(app):
    @app.task(name="contracts.plain", shared=False)
    def plain() -> None: ...

    assert celery_port.retried_body(app.tasks["contracts.plain"]) is None


def test_arguments_are_those_that_are_sent(app):
    @app.task(name="contracts.model", shared=False, pydantic=True)
    def model(order: Order) -> None: ...

    task = app.tasks["contracts.model"]
    positional, _ = celery_port.as_sent(task, [Order(number=7)], {})
    _, named = celery_port.as_sent(task, [], {"order": Order(number=7)})
    if hasattr(task, "_dump_pydantic_arguments"):  # from Celery 5.7 on
        assert ([*positional], dict(named)) == ([{"number": 7}], {"order": {"number": 7}})
    assert celery_port.as_sent(object(), ["a"], {}) == (["a"], {})


def test_system_checks_that_celery_runs_are_told_from_others(app, monkeypatch):
    checks = pytest.importorskip("django.core.checks")
    fixups = pytest.importorskip("celery.fixups.django")
    found = []
    monkeypatch.setattr(checks, "run_checks", lambda: found.append(celery_port.runs_system_checks()))
    monkeypatch.setattr("django.setup", lambda: None)
    fixups.DjangoWorkerFixup(app).validate_models()
    checks.run_checks()
    assert found == [True, False]


def test_another_thread_finds_the_running_tasks_and_their_requests(app):
    @app.task(name="contracts.inner", shared=False, bind=True)
    def inner(self):
        return in_a_thread(celery_port.as_in_this_thread(look))

    @app.task(name="contracts.outer", shared=False, bind=True)
    def outer(self):
        return inner.apply(task_id="inner").get(disable_sync_subtasks=False)

    def look():
        task = app.current_worker_task
        ids = [one.request_stack.top.id for one in celery_port.tasks_of_this_thread()]
        return ids, task.request.id, task.request.parent_id

    def in_a_thread(function):
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(function).result()
            assert threads.submit(lambda: [*celery_port.tasks_of_this_thread()]).result() == []
            assert threads.submit(lambda: inner.request_stack.top).result() is None
        return found

    ids, own, _ = outer.apply(task_id="outer").get(disable_sync_subtasks=False)
    assert (ids, own) == (["outer", "inner"], "inner")
    assert in_a_thread(celery_port.as_in_this_thread(lambda: [*celery_port.tasks_of_this_thread()])) == []
