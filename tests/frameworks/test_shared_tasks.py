"""Shared tasks where Celery has made an app of its own before the user's, as it does under gevent and eventlet."""

from __future__ import annotations

import pytest

from tests.lab.servers import need_pool

SHOP = """
import os

from celery import Celery, shared_task
from celery_redislock import LockedTask

REDIS_URL = os.environ["REDIS_URL"]
app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL)
app.set_default()


@shared_task(base=LockedTask, bind=True, lock_scope="job")
def report(self, day):
    return f"{day}: {self.lock.state}"


@shared_task(base=LockedTask, bind=True, lock_on_conflict="join")
def rate(self, currency):
    return f"{currency}: {self.lock.state}"
"""


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_a_worker_with_shared_tasks_starts_and_locks_in_every_pool(project, pool):
    need_pool(pool)
    log = project.start_worker("shop", "-P", pool)
    program = """
from shop import rate, report
print(report.delay("monday").get(timeout=20), rate.delay("euro").get(timeout=20))
"""
    assert project.run("-c", program) == "monday: held euro: held\n"
    assert "ERROR" not in log()


def test_a_task_of_the_app_that_nobody_has_set_up_is_refused_when_it_is_used(project):
    program = """
from celery import current_app, shared_task
from celery_redislock import LockConfigError, LockedTask
current_app.conf.update(broker_connection_retry=False)
current_app.tasks  # now it binds every shared task at once

@shared_task(base=LockedTask)
def report(day): ...

for use in (report.delay, report.lock_for, report.lock_info, lambda day: report.apply((day,)).get()):
    try:
        use("monday")
    except LockConfigError as error:
        print(error)
"""
    refused = 'set redislock_url, for instance "redis://localhost:6379/0"'
    assert [refused in line for line in project.run("-c", program).splitlines()] == [True] * 4
