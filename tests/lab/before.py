"""The examples of the READMEs of celery-once and celery-singleton, with their slips of the pen mended.

`sleep` lasts until the test wakes everybody; see `tests.lab.moving`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore
from celery_once import QueueOnce
from celery_singleton import Singleton


def define_once(app: Celery, sleep: Callable[[float], None]) -> None:
    """The examples of celery-once 3.0.1."""

    @app.task(shared=False, base=QueueOnce, name="once.slow_task")
    def slow_task():
        sleep(30)
        return "Done!"

    @app.task(shared=False, base=QueueOnce, name="once.graceful", once={"graceful": True})
    def graceful():
        sleep(30)
        return "Done!"

    @app.task(shared=False, base=QueueOnce, name="once.slow_add")
    def slow_add(a, b):
        sleep(30)
        return a + b

    @app.task(shared=False, base=QueueOnce, name="once.add_by_a", once={"keys": ["a"]})
    def add_by_a(a, b):
        sleep(30)
        return a + b

    @app.task(shared=False, base=QueueOnce, name="once.add_alone", once={"keys": []})
    def add_alone(a, b):
        sleep(30)
        return a + b

    @app.task(shared=False, base=QueueOnce, name="once.long_running_task", once={"timeout": 60 * 60 * 10})
    def long_running_task():
        sleep(60 * 60 * 3)

    @app.task(shared=False, base=QueueOnce, name="once.unlocked", once={"unlock_before_run": True})
    def unlocked():
        sleep(30)
        return "Done!"

    class ContextQueueOnce(QueueOnce):
        """As in the README, but the context that it enters is the test's, and not Flask's."""

        def __call__(self, *args, **kwargs):
            with app.conf.lab_context():
                return super().__call__(*args, **kwargs)

    @app.task(shared=False, base=ContextQueueOnce, name="once.example_task")
    def example_task(value):
        sleep(30)
        return value

    define_more(app, "once", QueueOnce, once={"keys": ["b"]})


def define_singleton(app: Celery, sleep: Callable[[float], None]) -> None:
    """The examples of celery-singleton 0.3.1."""

    @app.task(shared=False, base=Singleton, name="singleton.do_stuff")
    def do_stuff(*args, **kwargs):
        sleep(4)
        return "I just woke up"

    @app.task(shared=False, base=Singleton, name="singleton.do_something", unique_on=["username"])
    def do_something(username, otherarg=None):
        sleep(5)

    @app.task(shared=False, base=Singleton, name="singleton.do_or_raise", raise_on_duplicate=True)
    def do_or_raise(username):
        sleep(5)

    @app.task(shared=False, base=Singleton, name="singleton.runs_for_12_seconds", lock_expiry=4)  # README: 10
    def runs_for_12_seconds():
        sleep(12)

    define_more(app, "singleton", Singleton, unique_on=["b"])


def define_more(app: Celery, plugin: str, base: type[Task], **by_b: Any) -> None:
    """Tasks that docs/migrating.md speaks of and the READMEs do not have. The key of `by_default` is made of `b`."""

    @app.task(shared=False, base=base, name=f"{plugin}.retries", bind=True)
    def retries(self: Any) -> str:
        """Fails once."""
        if not self.request.retries:
            raise self.retry(countdown=0.1)
        return "retried"

    @app.task(shared=False, base=base, name=f"{plugin}.defaults")
    def defaults(a, b=2):
        """Has a default."""
        return a

    @app.task(shared=False, base=base, name=f"{plugin}.by_default", **by_b)
    def by_default(a, b=2):
        """Its key is made of an argument that need not be passed."""

    @app.task(shared=False, base=base, name=f"{plugin}.ignores")
    def ignores():
        """Has no outcome."""
        raise Ignore
