"""Tasks that come back to the broker, and tell what became of their message."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    for name, acks_late in {"counted": False, "counted_late": True}.items():

        @locked(name, bind=True, lock_args=["key"], acks_late=acks_late)
        def counted(self: Any, key: Any, item: Any, seconds: float | str = 0.0) -> list[Any]:
            """Tells how often it was retried."""
            with ledger.run(key, item):
                spend(seconds)
            return [item, self.request.retries]

    @locked("tells", bind=True, lock_key="{key}", lock_on_conflict="wait", max_retries=2, default_retry_delay=0)
    def tells(self: Any, key: str, what: Any = "", retries: int = 0) -> Any:
        """Retries itself `retries` times, and then writes down what its request holds."""
        with ledger.run(key, self.request.retries):
            if self.request.retries < retries:
                raise self.retry(countdown=0)
        told = {name: value for name, value in vars(self.request).items() if not name.startswith("redislock")}
        told["children"] = len(self.request.children)
        ledger.write({"event": "told", "message": told})
        return "told"

    @locked("own_publish", lock_args=["key"], base=_OwnPublish)
    def own_publish(key: Any, item: Any = "") -> Any:
        """Its class overrides `apply_async`."""
        with ledger.run(key, item):
            pass
        return item


class _OwnPublish(LockedTask):
    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Do as celery-singleton does for a duplicate: answer with another task's id, and send nothing."""
        if self.app.current_worker_task:
            return self.AsyncResult("another")
        return super().apply_async(*args, **options)
