"""Jobs whose message comes to its end before their body begins."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_redislock import LockedTask
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"])

    @locked("refusing_job", base=_Refusing, lock_scope="job")
    def refusing_job(key: Any) -> None:
        """Is rejected before it starts."""
        with ledger.run(key):
            pass

    @locked("postponing_job", base=_Postponing, lock_scope="job")
    def postponing_job(key: Any) -> None:
        """Is given back to the broker before it starts."""

    @locked("put_off_job", base=_RetryingFirst, lock_scope="job")
    def put_off_job(key: Any, countdown: float) -> None:
        """Its first attempt retries itself before it has asked for the key."""
        with ledger.run(key):
            pass

    @locked("dying_job", base=_Dying, lock_scope="job")
    def dying_job(key: Any) -> None:
        """Its process dies before it has asked for the key."""

    @locked("dying", base=_Dying)
    def dying(key: Any) -> None:
        """The same, in scope run."""

    for name, option in {"killing_key": "lock_key", "killing_limit": "lock_limit"}.items():

        @locked(
            name, **{"lock_args": None, "lock_scope": "run", "lock_fence": False, "lock_cooldown": 0, option: _kill}
        )
        def killing(key: Any) -> None:
            """What names its lock, or limits it, ends the process."""


def _kill(arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class _Dying(LockedTask):
    def before_start(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _RetryingFirst(LockedTask):
    def before_start(self, *args: Any) -> None:
        if not self.request.retries:
            raise self.retry(countdown=self.request.args[1])
        super().before_start(*args)


class _Refusing(LockedTask):
    def before_start(self, *args: Any) -> None:
        raise Reject("not today", requeue=False)


class _Postponing(LockedTask):
    def before_start(self, *args: Any) -> None:
        raise Reject("not yet", requeue=True)
