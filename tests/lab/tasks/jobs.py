"""Tasks of the scopes ``job`` and ``queue``, unique from their publish on."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"])

    @locked("job", lock_scope="job", lock_on_conflict="skip")
    def job(key: Any, item: Any = "", seconds: float | str = 0.0, file: str = "") -> Any:
        """At most one, from its publish to its end."""
        with ledger.run(key, item):
            spend(seconds, file)
        return item

    @locked("patient_job", lock_scope="job", lock_on_conflict="wait")
    def patient_job(key: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """As `job`, but a duplicate that was sent all the same waits."""
        return job.run(key, item, seconds)

    @locked("queued", lock_scope="queue")
    def queued(key: Any, item: Any = "", seconds: float | str = 0.0, file: str = "") -> Any:
        """At most one that waits, besides one that runs."""
        with ledger.run(key, item):
            spend(seconds, file)
        return item

    for name, options in {
        "run_again": {},
        "job_again": {"lock_scope": "job"},
        "held_again": {"lock_hold_on_retry": True},
        "queued_again": {"lock_scope": "queue"},
        "queued_held_again": {"lock_scope": "queue", "lock_hold_on_retry": True},
    }.items():
        _define_again(locked, ledger, name, options)

    @locked("next_job", bind=True, lock_scope="job")
    def next_job(self: Any, key: Any, number: int, last: int) -> None:
        """Sends its own next page."""
        with ledger.run(key, number):
            if number < last:
                assert self.delay(key, number + 1, last).duplicate is False

    @locked("job_ends", bind=True, lock_scope="job")
    def job_ends(self: Any, key: Any, how: str) -> str:
        """Ends in the way that `how` names."""
        with ledger.run(key, how):
            match how:
                case "failure":
                    raise ValueError(how)
                case "ignore":
                    raise Ignore(how)
                case "reject":
                    raise Reject(how, requeue=False)
                case "exit":
                    raise SystemExit(1)
        return how

    @locked("shared_job", lock_args=None, lock_key="shared:{key}", lock_scope="job")
    def shared_job(key: Any, seconds: float | str = 0.0) -> str:
        """Shares its key with another task."""
        with ledger.run(key, "shared_job"):
            spend(seconds)
            return "shared_job"

    @locked("shared_job_too", lock_args=None, lock_key="shared:{key}", lock_scope="job")
    def shared_job_too(key: Any, seconds: float | str = 0.0) -> str:
        with ledger.run(key, "shared_job_too"):
            spend(seconds)
            return "shared_job_too"


def _define_again(locked: Any, ledger: Ledger, name: str, options: dict[str, Any]) -> None:
    @locked(name, bind=True, max_retries=10, **options)
    def again(
        self: Any,
        key: Any,
        item: Any = "",
        times: int = 0,
        lingers: float | str = 0.0,
        countdown: float = 0.0,
        before: str = "",
        file: str = "",
    ) -> Any:
        """Retries itself `times` times, and sleeps for `lingers` seconds after each publish.

        Where the files are named, it waits for `before` until each publish, and for `file` after it.
        """
        with ledger.run(key, f"{item}{self.request.retries}"):
            if self.request.retries < times:
                spend(0.0, before)
                try:
                    raise self.retry(countdown=countdown)
                finally:
                    spend(lingers, file)
        return item
