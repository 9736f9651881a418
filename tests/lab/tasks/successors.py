"""Tasks whose next attempt, step or page arrives while they still hold their key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("link", base=_Linked, lock_args=["key"], lock_on_conflict="skip")
    def link(key: Any, item: Any) -> Any:
        """A step of a chain that still holds its key when the next step arrives."""
        with ledger.run(key, item):
            return item

    @locked("again", bind=True, lock_args=["key"], max_retries=5, lock_on_conflict="skip")
    def again(self: Any, key: Any, times: int) -> int:
        """Retries itself at once; its next attempt arrives before it has ended."""
        with ledger.run(key, self.request.retries):
            if self.request.retries < times:
                met = sum(line["holder"] == self.request.id for line in ledger.conflicts())
                try:
                    raise self.retry(countdown=0)
                finally:
                    ledger.wait_for_conflict(self.request.id, met)
        return int(self.request.retries)

    @locked("becomes", bind=True, lock_args=["key"], lock_on_conflict="skip")
    def becomes(self: Any, key: Any, nesting: int) -> int:
        """Replaces itself with itself; the replacement arrives before it has ended."""
        with ledger.run(key, nesting):
            if nesting:
                met = sum(line["holder"] == self.request.id for line in ledger.conflicts())
                try:
                    raise self.replace(becomes.si(key, nesting - 1))
                finally:
                    ledger.wait_for_conflict(self.request.id, met)
        return 0

    @locked("page", bind=True, lock_args=["key"], lock_on_conflict="skip")
    def page(self: Any, key: Any, number: int, last: int) -> None:
        """Sends its own next page, which arrives before it has ended."""
        with ledger.run(key, number):
            if number < last:
                self.delay(key, number + 1, last)
                ledger.wait_for_conflict(self.request.id)

    async def send(task: Any, *args: Any) -> None:
        """Sends one message of a task, in the middle of other coroutines."""
        await asyncio.gather(asyncio.sleep(0), task.adelay(*args))

    @locked("async_page", bind=True, lock_args=["key"], lock_on_conflict="skip")
    def async_page(self: Any, key: Any, number: int, last: int) -> Any:
        """Sends its own next page from an event loop."""
        with ledger.run(key, number):
            if number < last:
                asyncio.run(send(self, key, number + 1, last))
                ledger.wait_for_conflict(self.request.id)
        return self.request.parent_id, self.request.root_id, [child.id for child in self.request.children]

    @locked("async_job", bind=True, lock_scope="job", lock_args=["key"])
    def async_job(self: Any, key: Any, number: int, last: int) -> Any:
        """The same, in scope job."""
        with ledger.run(key, number):
            if number < last:
                asyncio.run(send(self, key, number + 1, last))
        return self.request.parent_id, self.request.root_id, [child.id for child in self.request.children]


class _Linked(LockedTask):
    def before_start(self, *args: Any) -> None:
        """Note whether a step follows: Celery 5.6.0 takes that step out of the request's list when it publishes it."""
        super().before_start(*args)
        self.request.goes_on = bool(self.request.chain)

    def on_success(self, retval: Any, task_id: str, *args: Any) -> None:
        """Wait until the next step, which Celery has published by now, has met the lock."""
        if self.request.goes_on:
            Ledger(Path(self.app.conf.lab_ledger)).wait_for_conflict(task_id)
