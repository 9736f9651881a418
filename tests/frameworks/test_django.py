"""docs/django.md: its project with a real worker, and its own tests."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

pytest.importorskip("django")

PAGE = "django.md"

SETUP = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
import django
django.setup()
from celery import shared_task
from celery_redislock import LockedTask, LockKeyError, locked
from django.core.management import call_command
from django.db import connection, transaction
from kombu.exceptions import EncodeError
from shop import services, tasks
from shop.models import Product
call_command("migrate", run_syncdb=True, verbosity=0)
FORM = "application/x-www-form-urlencoded"
"""


@pytest.fixture(autouse=True)
def _package(project):
    """What has no text is no block of the page."""
    (project.folder / "shop" / "__init__.py").touch()


def test_the_project_works_with_a_worker(project):
    """Settings in the namespace, shared tasks, a publish at the commit, and one key with blocks of the web process."""
    project.run("-c", SETUP)
    log = project.start_worker("project")
    program = """
product = services.save("tea", 3)
print(tasks.index.lock_plan.options.lease, tasks.index.AsyncResult)
with tasks.reserve.lock_for(product.pk, 1):
    waits = tasks.reserve.delay(product.pk, 1)
    while not tasks.reserve.lock_info(product.pk).waiting_processes: pass
    services.restock(product.pk, 7)
print(waits.get(timeout=20), services.restock(product.pk, 1))
"""
    printed = project.run("-c", SETUP + program).split()
    assert printed[0] == "12.0"
    assert printed[-2:] == ["9", "10"]
    wait_until(lambda: "'indexed tea'" in log(), "the change is indexed")
    assert "ERROR" not in log()


def test_the_class_may_be_that_of_all_tasks_of_the_app(project):
    file = project.folder / "project" / "celery.py"
    text = file.read_text()
    file.write_text(text.replace('"project")', '"project", task_cls="celery_redislock.django:LockedDjangoTask")'))
    file = project.folder / "shop" / "tasks.py"
    file.write_text(
        f"{file.read_text()}\nfrom celery import shared_task\n\n@shared_task\ndef plain(item):\n    return item\n"
    )
    project.run("-c", SETUP)
    project.start_worker("project")
    program = """
with transaction.atomic():
    tasks.plain.delay_on_commit(1)
with tasks.plain.lock_for(7):
    waits = tasks.plain.delay(7)
    while not tasks.plain.lock_info(7).waiting_processes: pass
print(waits.get(timeout=20))
"""
    assert project.run("-c", SETUP + program) == "7\n"


def test_a_model_that_kombu_can_write_has_one_key_for_its_row(project):
    project.run("-c", SETUP)
    project.start_worker("project")
    program = """
product = Product.objects.create(name="tea")
key = tasks.relabel.lock_for(product).name
print(tasks.relabel.delay(product).get(timeout=20) == f"tea under {key}")
product.name = "green tea"
print(tasks.relabel.lock_for(product).name == key)
print(tasks.relabel.lock_for(Product.objects.create(name="coffee")).name == key)
"""
    assert project.run("-c", SETUP + program).split() == ["True", "True", "False"]


def test_without_that_a_model_is_refused_at_the_publish_or_where_a_key_is_made_of_it(project):
    (project.folder / "shop" / "apps.py").unlink()
    program = """
@shared_task(base=LockedTask, lock_scope="job")
def job(product): ...

@shared_task(base=LockedTask, lock_args=["quantity"])
def other_key(product, quantity): ...

product = Product.objects.create(name="tea")
for error, refused in [
    (EncodeError, lambda: tasks.relabel.delay(product)),
    (LockKeyError, lambda: job.delay(product)),
    (LockKeyError, lambda: tasks.relabel.apply((product,)).get()),
]:
    try:
        refused()
    except error as raised:
        print(raised)
print(other_key.lock_for(product, 1).name == other_key.lock_for(quantity=1).name)
"""
    key = "cannot be part of a lock key: a value of type Product cannot be encoded as JSON; leave the parameter out"
    lines = project.run("-c", SETUP + program).splitlines()
    assert lines[0] == "Object of type Product is not JSON serializable"
    assert [key in line for line in lines[1:3]] == [True, True]
    assert lines[3:] == ["True"]


def test_a_lock_inside_a_transaction_is_given_back_before_the_commit(project):
    """Which the page warns of; and `base=LockedTask` alone has no `delay_on_commit`."""
    program = """
@shared_task(base=LockedTask)
def alone(): ...

with transaction.atomic():
    with locked("stock:7"):
        pass
    print(connection.in_atomic_block, tasks.reserve.lock_info(7))
print(hasattr(alone, "delay_on_commit"), hasattr(tasks.index, "delay_on_commit"))
"""
    assert project.run("-c", SETUP + program).split() == ["True", "None", "False", "True"]


def test_a_blocking_function_is_called_from_an_async_view_in_a_thread(project):
    program = """
import asyncio
from asgiref.sync import sync_to_async

product = Product.objects.create(name="tea", stock=3)
print(asyncio.run(sync_to_async(services.restock)(product.pk, 1)))
print(type(asyncio.run(sync_to_async(tasks.index.delay)(product.pk))).__name__)
"""
    assert project.run("-c", SETUP + program).split() == ["4", "AsyncResult"]


def test_its_own_tests_pass_and_need_no_server_but_their_own(project):
    project.env["REDIS_URL"] = "redis://nowhere.invalid:6379/0"
    project.run("manage.py", "test")


def test_data_set_up_for_a_class_has_its_locks_on_the_tests_own_server_and_eager_adelay_has_the_tests_database(project):
    (project.folder / "shop" / "tests.py").write_text("""
from celery_redislock.testing import LockServerTestCase
from django.test import TestCase, override_settings
from .models import Product
from .tasks import reserve

@override_settings(CELERY_TASK_ALWAYS_EAGER=True)
class EagerTest(LockServerTestCase, TestCase):
    @classmethod
    def setUpTestData(cls):
        cls.product = Product.objects.create(name="tea", stock=9)
        cls.left = reserve.delay(cls.product.pk, 1).get()

    def test_of_a_client(self):
        self.assertEqual(self.left, 8)
        self.client.post(f"/products/{self.product.pk}/orders/", {"quantity": 2})
        self.product.refresh_from_db()
        self.assertEqual(self.product.stock, 6)

    async def test_of_an_async_client(self):
        await self.async_client.post(f"/products/{self.product.pk}/orders/", {"quantity": 3})
        await self.product.arefresh_from_db()
        self.assertEqual(self.product.stock, 5)
""")
    project.env["REDIS_URL"] = "redis://127.0.0.1:1/0"  # where nobody listens
    project.run("manage.py", "test", "shop.tests")


def test_a_webhook_publishes_at_the_commit_and_a_report_once(project):
    project.run("-c", SETUP)
    log = project.start_worker("project")
    program = """
from django.test import Client
from shop.views import signature_of
web = Client()
form = "reference=A1&name=tea&quantity=3"
for _ in range(2):
    headers = {"Signature": signature_of(form.encode())}
    print(web.post("/webhooks/delivered/", form, content_type=FORM, headers=headers).json()["product"])
while Product.objects.get().stock != 3: pass
print(web.post("/products/1/count/").json()["stock"])
with tasks.daily_report.lock_for():
    answers = [web.post("/reports/").json() for _ in range(3)]
print(*[answer["duplicate"] for answer in answers], len({answer["id"] for answer in answers}))
print(tasks.daily_report.AsyncResult(answers[0]["id"]).get(timeout=20))
"""
    printed = project.run("-c", SETUP + program).splitlines()
    assert printed == ["1", "1", "4", "False True True 1", "1 products"]
    wait_until(lambda: "'indexed tea'" in log(), "the delivered product is indexed")


def test_async_views_publish_and_lock_while_a_worker_runs_the_orders(project):
    project.run("-c", SETUP)
    project.start_worker("project")
    program = """
import asyncio
from django.test import AsyncClient

async def main(product):
    web = AsyncClient()
    async with tasks.reserve.alock_for(product.pk):
        taken = [await web.post(f"/products/{product.pk}/orders/", {"quantity": 2}) for _ in range(2)]
        busy = await asyncio.create_task(web.post(f"/products/{product.pk}/correct/", {"stock": 9}))
        print(busy.status_code)
    states = [await state_of(web, answer.json()["id"]) for answer in taken]
    corrected = await web.post(f"/products/{product.pk}/correct/", {"stock": 9})
    print(*states, corrected.json())

async def state_of(web, id):
    while True:
        state = (await web.get(f"/jobs/{id}/")).json()["state"]
        if state in ("SUCCESS", "FAILURE"):
            return state

asyncio.run(main(services.save("tea", 3)))
"""
    assert project.run("-c", SETUP + program).splitlines() == ["409", "SUCCESS FAILURE {'stock': 9}"]


def test_beat_sends_the_report(project):
    program = """
from celery.beat import ScheduleEntry, Scheduler
from project import app
beat = Scheduler(app, lazy=True)
entry = ScheduleEntry(app=app, name="report", **app.conf.beat_schedule["report"])
sent = [beat.apply_async(entry, advance=False) for _ in range(2)]
print(*[one.duplicate for one in sent], sent[0].id == sent[1].id)
"""
    assert project.run("-c", SETUP + program).split() == ["False", "True", "True"]


def test_its_tasks_are_those_of_celerys_own_decorator_and_class(project):
    program = """
from celery.contrib.django.task import DjangoTask
from celery_redislock.django import LockedDjangoTask, locked_task

@shared_task(base=LockedDjangoTask[[int], None], lock_args=["a"])
def celerys(a): ...

@locked_task(lock_args=["a"], base=LockedTask)
def plain(a): ...

print(isinstance(tasks.index, DjangoTask), isinstance(celerys, LockedDjangoTask))
print(celerys.lock_args, tasks.index.lock_lease)
print(hasattr(plain, "delay_on_commit"), tasks.reserve.lock_for(7).name)
"""
    assert project.run("-c", SETUP + program).splitlines() == [
        "True True",
        "['a'] 12.0",
        "False redislock:{stock:7}",
    ]


def failing_check(project, *arguments):
    """What ``manage.py check`` prints on standard error, which must fail."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=project.folder,
        env={**project.env, "REDIS_URL": "redis://nowhere.invalid:6379/0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_a_check_passes_where_nothing_is_wrong_and_asks_no_server(project):
    project.env["REDIS_URL"] = "redis://nowhere.invalid:6379/0"
    assert project.run("manage.py", "check") == "System check identified no issues (0 silenced).\n"


def test_a_check_reports_every_wrong_task_as_the_page_shows(project):
    file = project.folder / "shop" / "tasks.py"
    text = file.read_text().replace('lock_scope="queue"', 'lock_scop="queue"')
    text = text.replace("stock:{product_id}", "stock:{sku}", 1)
    file.write_text(f"{text}\nfrom celery import shared_task\n\n@shared_task(lock_scope='job')\ndef no_lock(): ...\n")
    said = failing_check(project, "check")
    page = (ROOT / "docs" / PAGE).read_text()
    shown = re.search(r"^ERRORS:\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)[1]
    assert shown in said
    assert "shop.tasks.no_lock: (celery_redislock.W001)" in said
    assert "System check identified 3 issues" in said


def test_a_check_tells_of_a_wrong_setting_once_and_of_a_project_without_an_app(project):
    settings = project.folder / "project" / "settings.py"
    settings.write_text(f"{settings.read_text()}\nCELERY_REDISLOCK_LEAS = 5\n")
    said = failing_check(project, "check")
    assert said.count("redislock_leas is not known; did you mean redislock_lease?") == 1
    assert "1 issue" in said
    (project.folder / "project" / "__init__.py").write_text("")
    assert "(celery_redislock.W002) the project has no Celery app" in failing_check(
        project, "check", "--fail-level", "WARNING"
    )


def test_a_worker_refuses_a_wrong_task_as_without_the_checks(project):
    file = project.folder / "shop" / "tasks.py"
    file.write_text(file.read_text().replace('lock_scope="queue"', 'lock_scop="queue"'))
    command = [sys.executable, "-m", "celery", "-A", "project", "worker", "-c", "1"]
    done = subprocess.run(
        command, cwd=project.folder, env=project.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "LockConfigError: shop.tasks.index: lock_scop is not known" in done.stderr


def test_celery_locks_check_reports_it_too(project):
    file = project.folder / "shop" / "tasks.py"
    file.write_text(file.read_text().replace('lock_scope="queue"', 'lock_scop="queue"'))
    command = [sys.executable, "-m", "celery_redislock", "-A", "project", "check"]
    done = subprocess.run(
        command, cwd=project.folder, env=project.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (
        1,
        "error: shop.tasks.index: lock_scop is not known; did you mean lock_scope?\n",
    )
