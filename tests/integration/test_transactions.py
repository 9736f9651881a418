"""Publishing in a transaction of Django, in a process of its own: its settings are the process's."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.lab.workers import ROOT

PROGRAM = """
import os

from django.conf import settings

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}})
import django

django.setup()
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from celery_redislock import LockedTask
from tests.lab.app import Config, make_app

app = make_app(Config.from_env())


class LockedDjangoTask(LockedTask, DjangoTask):
    abstract = True


@app.task(base=LockedDjangoTask, lock_scope="job", shared=False)
def index(product): ...


def seen():
    with app.connection_for_read() as connection:
        waiting = connection.default_channel.client.llen(app.conf.task_default_queue)
    return waiting, index.lock_info(7) is not None


with transaction.atomic():
    index.delay_on_commit(7)
    index.apply_async_on_commit((7,), countdown=5)
    transaction.on_commit(lambda: print("duplicate", index.delay(7).duplicate))
    print("before", *seen())
print("after", *seen())

try:
    with transaction.atomic():
        index.delay_on_commit(8)
        raise ValueError
except ValueError:
    print("rolled back", index.lock_info(8), seen()[0])
"""


def test_the_key_is_taken_at_the_commit_and_not_at_all_after_a_rollback(config, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "LAB_CONFIG": config.dump(), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before 0 False",
        "duplicate True",
        "after 1 True",
        "rolled back None 1",
    ]
