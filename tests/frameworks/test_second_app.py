"""A second app in a process. Celery gives it the tasks of the first: they are no reason for it to fail."""

from __future__ import annotations

import pytest

SHOP = """
import os

from celery import Celery
from celery_redislock import LockedTask

REDIS_URL = os.environ["REDIS_URL"]
app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL)


@app.task(base=LockedTask, lock_on_conflict="join")
def rate(currency):
    return f"rate of {currency}"


@app.task(base=LockedTask, lock_scope="queue", lock_lease=5.0)
def report(day):
    return f"report of {day}"
"""
WITH_SHARED_TASKS = SHOP.replace("import Celery", "import Celery, shared_task").replace("@app.task", "@shared_task")
NO_REDIS = 'Celery("second", broker="memory://", set_as_current=IS_CURRENT)'
SECOND = """
import sys
from celery import Celery
from celery_redislock import LockConfigError, LockedTask

IS_CURRENT = sys.argv[1:] != ["library"]


def refusals(task):
    for use in (task.delay, task.lock_for, task.lock_info, lambda day: task.apply((day,)).get()):
        try:
            print(use("monday"))
        except LockConfigError as error:
            print(error)
"""
#: What is wrong with the second app, which of the tasks cannot be used there, and why.
UNFIT = {
    "no result backend": (
        'Celery("second", broker=shop.REDIS_URL, set_as_current=IS_CURRENT)',
        {"rate": "lock_on_conflict = 'join' needs the holder's result"},
    ),
    "no Redis": (NO_REDIS, dict.fromkeys(("rate", "report"), "so there is no server for the locks: set redislock_url")),
    "time-outs": (
        """Celery("second", broker=shop.REDIS_URL, backend=shop.REDIS_URL, set_as_current=IS_CURRENT)
second.conf.redislock_client_options = {"socket_timeout": 4.0}""",
        {"report": "lock_lease = 5.0 is too short"},
    ),
    "its policy": (
        """Celery("second", broker=shop.REDIS_URL, backend=shop.REDIS_URL, set_as_current=IS_CURRENT)
second.conf.redislock_on_conflict = "skip\"""",
        {"report": "lock_scope = 'queue' with redislock_on_conflict = 'skip' is not allowed"},
    ),
    "its lease": (
        """Celery("second", broker=shop.REDIS_URL, backend=shop.REDIS_URL, set_as_current=IS_CURRENT)
second.conf.redislock_lease = 0.5""",
        {"rate": "redislock_lease = 0.5 is too short"},
    ),
}


@pytest.mark.parametrize("kind", ["current", "library"])
@pytest.mark.parametrize("begin", ["shop.app.finalize()", ""], ids=["the first is finalized first", "the second is"])
def test_it_is_checked_for_the_tasks_of_the_first_when_it_uses_them(project, begin, kind):
    program = f"""
{SECOND}
import shop
{begin}
for how, (made, refused) in {UNFIT}.items():
    exec("second = " + made)
    second.finalize()
    for name in refused:
        print(how, name, sep=":")
        refusals(second.tasks["shop." + name])
shop.app.finalize()
print(shop.rate.lock_for("euro").name, shop.report.lock_for("monday").name)
"""
    *lines, last = project.run("-c", program, kind).splitlines()
    for how, (_, refused) in UNFIT.items():
        for name, why in refused.items():
            assert lines[0] == f"{how}:{name}"
            for line in lines[1:5]:
                assert why in line
                assert "in the app 'second', which has this task because Celery shares tasks" in line
            del lines[:5]
    assert lines == []
    assert last.startswith("redislock:{shop.rate:")


def test_once_it_is_set_up_it_uses_them(project):
    program = f"""
{SECOND}
import shop
second = {NO_REDIS}
second.finalize()
refusals(second.tasks["shop.rate"])
second.conf.update(redislock_url=shop.REDIS_URL, result_backend=shop.REDIS_URL)
print(second.tasks["shop.rate"].apply(("euro",)).get())
"""
    assert project.run("-c", program).splitlines()[4:] == ["rate of euro"]


def test_the_tasks_of_an_app_that_is_gone_are_its_own_no_more(project):
    program = f"""
{SECOND}
import gc
import weakref

def test():
    app = Celery("gone", broker="memory://")

    @app.task(base=LockedTask, name="gone.rate")
    def rate(currency): ...

    return weakref.ref(app)

gone = test()
second = {NO_REDIS}
gc.collect()
print(gone() is None)
second.finalize()
refusals(second.tasks["gone.rate"])
"""
    first, *lines = project.run("-c", program).splitlines()
    assert first == "True"
    assert ["in the app 'second'" in line for line in lines] == [True] * 4


OWN = {
    "decorated": "@second.task(base=LockedTask)",
    "decorated at once": "@second.task(base=LockedTask, lazy=False)",
    "unshared": "@second.task(base=LockedTask, shared=False)",
    "defined when the app is finalized": "second.finalize()\n@second.task(base=LockedTask)",
    "registered": "@second.register_task\n@lambda run: type('own', (LockedTask,), {'name': 'own', 'run': run})()",
}


@pytest.mark.parametrize("how", OWN)
def test_its_own_tasks_fail_early(project, how):
    program = f"""
{SECOND}
import shop
shop.app.finalize()
second = {NO_REDIS}
try:
    {OWN[how].replace(chr(10), chr(10) + "    ")}
    def own(day): ...
    second.finalize()
    second.tasks
except LockConfigError as error:
    print(error)
"""
    (line,) = project.run("-c", program).splitlines()
    assert "so there is no server for the locks: set redislock_url" in line
    assert "second" not in line


def test_a_shared_task_may_be_defined_after_an_app_that_is_none_of_its_own_was_finalized(project):
    """pytest-celery makes such an app, ``celery_test_app``, in each process of pytest that it is installed for."""
    program = """
import os
from celery import Celery, shared_task
plugins = Celery("celery_test_app")
plugins.finalize()
from celery_redislock import LockConfigError, LockedTask

@shared_task(base=LockedTask, bind=True, name="report")
def report(self, day):
    return self.lock.state

try:
    plugins.tasks["report"].delay("monday")
except LockConfigError as error:
    print("in the app 'celery_test_app'" in str(error))
app = Celery("shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.set_default()
print(report.apply(("monday",)).get())
"""
    assert project.run("-c", program).splitlines() == ["True", "held"]


def test_shared_tasks_fail_early_in_the_only_app_and_in_the_default_one(project):
    (project.folder / "shop.py").write_text(WITH_SHARED_TASKS.replace("broker=REDIS_URL, backend=REDIS_URL", ""))
    project.env["REDIS_URL"] = ""
    only = """
from celery_redislock import LockConfigError
import shop
try:
    {begin}shop.app.finalize()
except LockConfigError as error:
    print(error)
"""
    for begin in ("", "from celery import Celery; other = Celery('other'); shop.app.set_default(); "):
        assert "so there is no server for the locks" in project.run("-c", only.format(begin=begin))


@pytest.mark.parametrize("setting", ["broker_url", "broker_write_url"])
def test_shared_tasks_fail_early_in_the_only_app_though_it_was_finalized_before(project, setting):
    (project.folder / "shop.py").write_text(WITH_SHARED_TASKS.replace('app = Celery("shop", ', "dict("))
    program = f"""
from celery import Celery
from celery_redislock import LockConfigError
app = Celery("early", {setting}="memory://")
app.finalize()
try:
    import shop
except LockConfigError as error:
    print(error)
"""
    assert "so there is no server for the locks" in project.run("-c", program)


@pytest.mark.parametrize("kind", ["current", "library"])
@pytest.mark.parametrize("begin", ["shop.app.finalize()", ""], ids=["finalized", "not finalized"])
def test_a_second_app_is_checked_for_shared_tasks_when_it_uses_them(project, begin, kind):
    (project.folder / "shop.py").write_text(WITH_SHARED_TASKS)
    program = f"""
{SECOND}
import shop
from celery import shared_task
{begin}
second = {NO_REDIS}
second.finalize()
shop.app.finalize()

@shared_task(base=LockedTask)
def late(day): ...

refusals(second.tasks["shop.rate"])
print(shop.app.tasks["shop.rate"].apply(("euro",)).get())
"""
    *lines, last = project.run("-c", program, kind).splitlines()
    assert ["in the app 'second'" in line for line in lines] == [True] * 4
    assert last == "rate of euro"


def test_a_worker_of_the_second_app_runs_none_of_them_without_its_lock(project):
    (project.folder / "library.py").write_text("""
import shop
from celery import Celery
from celery_redislock import LockedTask

app = Celery("library", broker=shop.REDIS_URL, backend=shop.REDIS_URL)
app.conf.update(task_default_queue="library", redislock_client_options={"socket_timeout": 4.0})


@app.task(base=LockedTask)
def own(day):
    return f"own of {day}"
""")
    log = project.start_worker("library")
    program = """
import shop
from celery_redislock import LockConfigError
print(shop.app.send_task("library.own", ("monday",), queue="library").get(timeout=20))
print(shop.rate.apply_async(("euro",), queue="library").get(timeout=20))
try:
    print(shop.report.apply_async(("monday",), queue="library").get(timeout=20))
except LockConfigError as error:
    print(error)
"""
    own, rate, report = project.run("-c", program).splitlines()
    assert (own, rate) == ("own of monday", "rate of euro")
    assert "shop.report: lock_lease = 5.0 is too short" in report
    assert "in the app 'library'" in report
    assert "its body did not run: LockConfigError: shop.report: lock_lease = 5.0 is too short" in log()
