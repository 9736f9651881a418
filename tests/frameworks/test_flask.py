"""docs/flask.md: its project with a real worker."""

from __future__ import annotations

import pytest

pytest.importorskip("flask")

PAGE = "flask.md"

SETUP = """
from celery import shared_task
from celery_redislock import LockedTask, LockKeyError, locked
from celery_redislock.testing import busy
from errors import answer
from flask import current_app
from make_celery import celery_app, flask_app
from shop import FlaskTask, LockedFlaskTask, daily_report, reserve
answer(flask_app)
client = flask_app.test_client()
"""


def test_bodies_have_their_context_and_their_lock(project):
    log = project.start_worker("make_celery")
    program = """
print(daily_report.delay("monday").get(timeout=20))
with reserve.lock_for("7", 1):
    waits = reserve.delay("7", 2)
    while not reserve.lock_info("7").waiting_processes: pass
print(waits.get(timeout=20), reserve.lock_plan.options.lease)
"""
    assert project.run("-c", SETUP + program).splitlines() == ["shop: report of monday", "shop: 2 of 7 12.0"]
    assert "ERROR" not in log()


def test_views_publish_once_and_lock_in_threads_where_no_app_is_current(project):
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as server:
    call = lambda path: server.submit(client.post, path).result()
    print([call("/reports/monday").json["duplicate"] for _ in range(3)])
    print(call("/stock/7").json)
    with busy(reserve.lock_for("7", 1)):
        refused = call("/stock/7")
    print(refused.status_code, "is held by a lock outside tasks on" in refused.json["error"])
"""
    assert project.run("-c", SETUP + program).splitlines() == [
        "[False, True, True]",
        "{'counted': '7'}",
        "409 True",
    ]


def test_an_eager_run_and_a_direct_call_have_the_context_too(project):
    program = """
print(reserve.apply(("7", 1)).get(), "|", reserve("7", 2))

@shared_task(base=LockedFlaskTask, bind=True)
def by_run(self):
    return self.lock.state, self.request.id is None

class BySuper(LockedTask):
    abstract = True
    def __call__(self, *args, **kwargs):
        with self.app.flask_app.app_context():
            return super().__call__(*args, **kwargs)

@shared_task(base=BySuper, bind=True)
def by_super(self):
    return self.lock.state, self.request.id is None

print(by_run.apply().get(), by_super.apply().get())
"""
    assert project.run("-c", SETUP + program).splitlines() == [
        "shop: 1 of 7 | shop: 2 of 7",
        "('held', False) ('held', False)",
    ]


def test_a_key_is_made_outside_of_the_context(project):
    program = """
@shared_task(base=LockedFlaskTask, lock_key=lambda arguments: current_app.name)
def by_name(): ...

try:
    by_name.apply().get()
except LockKeyError as error:
    print(error)
"""
    assert "lock_key raised RuntimeError" in project.run("-c", SETUP + program)


def test_a_task_of_the_typed_decorator_has_the_context_too(project):
    program = """
from celery_redislock import locked_task

@locked_task(base=LockedFlaskTask, lock_args=["sku"])
def count(sku: str) -> str:
    return f"{current_app.name}: {sku}"

print(count.apply(("7",)).get(), count.lock_args, count.lock_lease)
"""
    assert project.run("-c", SETUP + program) == "shop: 7 ['sku'] 12.0\n"
