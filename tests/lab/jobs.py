"""Tasks that are unique from their publish on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_redislock import LockedTask
from tests.lab.ledger import Ledger


def define_jobs(app: Celery, ledger: Ledger) -> None:
    """Tasks of the scopes ``job`` and ``queue``, with cooldowns, and with their key held across retries."""

    def locked(name: str, **options: Any) -> Any:
        return app.task(name=f"lab.{name}", shared=False, **{"base": LockedTask, "lock_args": ["key"], **options})

    @locked("job", lock_scope="job", lock_on_conflict="skip")
    def job(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """At most one, from its publish to its end."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return item

    @locked("patient_job", lock_scope="job", lock_on_conflict="wait")
    def patient_job(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """As a job; a duplicate that had to be sent waits."""
        return job.run(key, item, seconds)

    @locked("late_job", lock_scope="job", acks_late=True, reject_on_worker_lost=True)
    def late_job(key: Any, item: Any = "", first: float = 0.0) -> Any:
        """Given back to the broker when its process dies; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("queued", lock_scope="queue", lock_retry_delay=0.02, lock_retry_max_delay=0.1)
    def queued(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """At most one that waits, besides one that runs."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return item

    @locked("queued_waits", lock_scope="queue", lock_on_conflict="wait")
    def queued_waits(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """The same, and the one that waits does so in a worker."""
        return queued.run(key, item, seconds)

    for name, options in {
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
        """Leaves in every way there is."""
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

    @locked("refusing_job", base=_Refusing, lock_scope="job")
    def refusing_job(key: Any) -> None:
        """Is rejected before it starts."""
        with ledger.run(key):
            pass

    @locked("postponing_job", base=_Postponing, lock_scope="job")
    def postponing_job(key: Any) -> None:
        """Is given back to the broker before it starts."""

    @locked("dying_job", base=_Dying, lock_scope="job")
    def dying_job(key: Any) -> None:
        """Its process dies before it has asked for the key."""

    @locked("shared_job", lock_args=None, lock_key="shared:{key}", lock_scope="job")
    def shared_job(key: Any) -> str:
        """Shares its key with another task."""
        with ledger.run(key, "shared_job"):
            return "shared_job"

    @locked("shared_job_too", lock_args=None, lock_key="shared:{key}", lock_scope="job")
    def shared_job_too(key: Any, seconds: float = 0.0) -> str:
        with ledger.run(key, "shared_job_too"):
            time.sleep(seconds)
            return "shared_job_too"

    for policy in ("skip", "retry", "wait", "raise", "join"):

        @locked(f"cools_{policy}", lock_on_conflict=policy, lock_cooldown=2.0, ignore_result=False)
        def cools(key: Any, item: Any = "", fails: bool = False) -> Any:
            """Its key cools down after its success."""
            with ledger.run(key, item):
                if fails:
                    raise ValueError(f"{item} fails")
            return item

    for policy in ("skip", "raise", "join", "retry"):

        @locked(f"lingers_{policy}", base=_Lingering, lock_on_conflict=policy, ignore_result=False)
        def lingers(key: Any, item: Any = "", fails: bool = False) -> Any:
            """Keeps its key for a while after its result is stored."""
            with ledger.run(key, item):
                if fails:
                    raise ValueError(f"{item} fails")
            return item

    @locked("lingering_job", base=_Lingering, lock_scope="job", ignore_result=False)
    def lingering_job(key: Any, item: Any = "", fails: bool = False) -> Any:
        """The same, unique from its publish on."""
        return lingers.run(key, item, fails)

    @locked("cooling_job", lock_scope="job", lock_cooldown=2.0)
    def cooling_job(key: Any, item: Any = "") -> Any:
        """At most once in a while."""
        with ledger.run(key, item):
            return item


def _define_again(locked: Any, ledger: Ledger, name: str, options: dict[str, Any]) -> None:
    @locked(name, bind=True, max_retries=10, **options)
    def again(self: Any, key: Any, item: Any = "", times: int = 0, lingers: float = 0.0, countdown: float = 0.0) -> Any:
        """Retries itself so many times, and takes its time after each publish."""
        with ledger.run(key, f"{item}{self.request.retries}"):
            if self.request.retries < times:
                try:
                    raise self.retry(countdown=countdown)
                finally:
                    time.sleep(lingers)
        return item


class _Lingering(LockedTask):
    def on_success(self, *args: Any) -> None:
        time.sleep(0.05)

    def on_failure(self, *args: Any) -> None:
        time.sleep(0.05)


class _Dying(LockedTask):
    def before_start(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _Refusing(LockedTask):
    def before_start(self, *args: Any) -> None:
        raise Reject("not today", requeue=False)


class _Postponing(LockedTask):
    def before_start(self, *args: Any) -> None:
        raise Reject("not yet", requeue=True)
