"""Celery's own task classes and canvas with real workers: `task_cls` for a whole app, and abortable tasks."""

from __future__ import annotations

from tests.lab.servers import wait_until

SHOP = """
import os
import time

from celery import Celery
from celery.contrib.abortable import AbortableTask
from celery_redislock import LockedTask

REDIS_URL = os.environ["REDIS_URL"]
app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL, task_cls="celery_redislock:LockedTask")
app.conf.update(redislock_on_conflict="wait", result_extended=True)


class LockedAbortableTask(LockedTask, AbortableTask):
    abstract = True


@app.task
def add(a, b):
    time.sleep(0.05)
    return a + b


@app.task
def total(numbers):
    return sum(numbers)


@app.task
def fail():
    raise ValueError("on purpose")


@app.task(bind=True)
def told_the_id(self, task_id):
    print(f"the errback of one parameter has its lock: {self.lock.state}")


@app.task
def told_the_error(request, error, traceback):
    print(f"the errback of three parameters has its lock: {told_the_error.lock.state}")


class DatabaseTask(LockedTask):
    abstract = True

    @property
    def database(self):
        return os.missing_module.connect()


@app.task(base=DatabaseTask, bind=True)
def count(self):
    return self.database


class Remote:
    def __getattr__(self, name):
        if name.startswith("remote_"):
            return f"{name} of the mixin"
        raise AttributeError(f"no {name} here")


class RemoteTask(LockedTask, Remote):
    abstract = True


@app.task(base=RemoteTask, bind=True)
def ask(self):
    return self.remote_stock, self.lock_lease, getattr(self, "other", "nothing else")


@app.task(base=LockedAbortableTask, bind=True, lock_scope="job")
def rebuild(self, index):
    while not self.is_aborted():
        self.lock.check()
        time.sleep(0.01)
    return "stopped"


@app.task(base=LockedAbortableTask, bind=True, lock_args=["index"])
def clean(self, index, item):
    return "stopped" if self.is_aborted() else "cleaned"
"""

SETUP = """
import time
from celery import chain, chord, group
from celery.contrib.abortable import AbortableAsyncResult
from shop import add, app, clean, fail, rebuild, told_the_error, told_the_id, total
"""


def test_a_whole_app_of_locked_tasks_runs_every_canvas_and_celerys_own_tasks(project):
    log = project.start_worker("shop")
    program = """
assert isinstance(add.lock_for(1, 2).name, str)
print(chain(add.s(1, 2), add.s(3), add.s(4))().get(timeout=30))
print(group(add.s(1, 1) for _ in range(4))().get(timeout=30))
print(chord([add.s(2, 2) for _ in range(4)], total.s())().get(timeout=30))
print(add.chunks([(1, 1), (2, 2)], 1).apply_async().get(timeout=30), add.starmap([(3, 3)]).delay().get(timeout=30))
print(app.send_task("celery.backend_cleanup").get(timeout=30), app.send_task("shop.add", (5, 5)).get(timeout=30))
"""
    assert project.run("-c", SETUP + program).splitlines() == [
        "10",
        "[2, 2, 2, 2]",
        "16",
        "[[2], [4]] [6]",
        "None 10",
    ]
    assert "ERROR" not in log()


def test_an_errback_has_its_lock_where_celery_sends_it_and_none_where_celery_calls_it_as_a_function(project):
    log = project.start_worker("shop")
    project.run("-c", SETUP + "fail.apply_async(link_error=[told_the_id.s(), told_the_error.s()])")
    wait_until(lambda: log().count("has its lock") == 2, "both errbacks have run")
    assert "the errback of one parameter has its lock: held" in log()
    assert "the errback of three parameters has its lock: none" in log()


def test_an_attribute_error_in_a_property_of_the_task_is_the_one_that_is_shown(project):
    log = project.start_worker("shop")
    program = """
import shop
print(repr(shop.count.delay().get(timeout=30, propagate=False)))
"""
    expected = "module 'os' has no attribute 'missing_module'"
    assert project.run("-c", SETUP + program) == f'AttributeError("{expected}")\n'
    assert "return os.missing_module.connect()" in log()


def test_what_only_a_mixin_behind_the_locked_task_knows_is_found_as_with_celerys_own(project):
    project.start_worker("shop")
    program = "import shop\nprint(shop.ask.delay().get(timeout=30))"
    assert project.run("-c", SETUP + program) == "['remote_stock of the mixin', 30.0, 'nothing else']\n"


def test_the_caller_of_a_duplicate_aborts_the_job_that_is_there(project):
    project.start_worker("shop")
    program = """
first = rebuild.delay("products")
while (info := rebuild.lock_info("products")) is None or info.state != "held": pass
second = rebuild.delay("products")
print(second.duplicate, isinstance(second, AbortableAsyncResult), second.id == first.id)
second.abort()
print(second.get(timeout=30))
while rebuild.lock_info("products"): pass
third = rebuild.delay("products")
print(third.duplicate, third.id == first.id)
third.abort()
print(third.get(timeout=30))
"""
    assert project.run("-c", SETUP + program).splitlines() == ["True True True", "stopped", "False False", "stopped"]


def test_a_message_that_waits_in_line_can_be_aborted(project):
    project.start_worker("shop")
    program = """
with clean.lock_for("products"):
    waits = clean.delay("products", 1)
    while not (clean.lock_info("products").waiting_processes and waits.state == "RETRY"): pass
    waits.abort()
print(waits.get(timeout=30))
"""
    assert project.run("-c", SETUP + program) == "stopped\n"


def test_an_abort_before_the_message_finds_its_key_held_is_overwritten(project):
    """As Celery's own STARTED overwrites it with `track_started`. docs/options.md says so."""
    program = """
waits = clean.delay("products", 1)
waits.abort()
with clean.lock_for("products"):
    print(waits.state, flush=True)
    open("held", "w").close()
    while not (clean.lock_info("products").waiting_processes and waits.state == "RETRY"): pass
print(waits.get(timeout=30))
"""
    (project.folder / "program.py").write_text(SETUP + program)
    with project.program("program.py") as ended:
        project.wait_for("held")
        project.start_worker("shop")
        assert ended() == "ABORTED\ncleaned\n"
