"""docs/django.md: its project with a real worker, and its own tests."""

from __future__ import annotations

import pytest

from tests.lab.servers import wait_until

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
    file.write_text(text.replace('"project")', '"project", task_cls="shop.tasks:LockedDjangoTask")'))
    file = project.folder / "shop" / "tasks.py"
    file.write_text(f"{file.read_text()}\n\n@shared_task\ndef plain(item):\n    return item\n")
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
print(tasks.relabel.lock_for(Product.objects.create(name="tea")).name == key)
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
    key = "cannot be part of a lock key: its Product cannot be encoded as JSON; leave the parameter out with lock_args"
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


def test_its_own_tests_pass_without_a_lock_server(project):
    project.env["REDIS_URL"] = "redis://nowhere.invalid:6379/0"
    project.env["DJANGO_SETTINGS_MODULE"] = "project.settings"
    project.run("-m", "django", "test")
