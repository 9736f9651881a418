"""Tasks whose bodies end in every way there is, and a user's hooks that fail or do not call super()."""

from __future__ import annotations

import time
from asyncio import CancelledError
from contextlib import suppress
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun

from celery_redislock import LockConflict, LockedTask
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("ends", bind=True, lock_args=["key"])
    def ends(self: Any, key: Any, how: str) -> str:
        """Ends in the way that `how` names."""
        with ledger.run(key, how):
            match how:
                case "failure":
                    raise ValueError(how)
                case "retry" if not self.request.retries:
                    raise self.retry(countdown=1.0 if self.app.conf.task_default_queue_type == "quorum" else 0.1)
                case "retry late" if not self.request.retries:
                    raise self.retry(countdown=60.0)
                case "ignore":
                    raise Ignore(how)
                case "reject":
                    raise Reject(how, requeue=False)
                case "exit":
                    raise SystemExit(1)
                case "slow":
                    time.sleep(30)
        return how

    @locked("slow_key", bind=True, lock_scope="job", lock_key=_slow_name, ignore_result=False)
    def slow_key(self: Any, retries: int = 0) -> int:
        """Whoever calls it needs a while to make its key; so does its retry."""
        if self.request.retries < retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)

    @locked("publishes", lock_args=["key"], lock_on_lost="abort", ignore_result=False)
    def publishes(key: Any, task: str, **options: Any) -> str:
        """Calls `task`, and goes on for two seconds, unless something ends it."""
        with ledger.run(key):
            app.tasks[task].apply_async(**options)
            time.sleep(2)
        return "not ended"

    @locked("unstorable", lock_args=["key"], ignore_result=False)
    def unstorable(key: Any) -> object:
        """Returns what no serializer can store."""
        with ledger.run(key):
            return object()

    @locked("reports", bind=True, lock_args=["key"], ignore_result=False)
    def reports(self: Any, key: Any) -> None:
        """Stores a state of its own, and no result."""
        with ledger.run(key):
            self.update_state(state="PROGRESS", meta={"done": "secret"})
        raise Ignore

    @locked("hooked", lock_args=["key"], base=_FailingHook)
    def hooked(key: Any) -> None:
        """Its own after_return fails before it calls super()."""

    @locked("unhooked", base=_ForgetfulHook)
    def unhooked() -> None:
        """Its own before_start forgets super()."""
        with ledger.run("unhooked"):
            pass

    for name, base in {"exits_early": _ExitingHook, "exits_early_unlocked": _PlainExitingHook}.items():

        @locked(name, base=base, ignore_result=False)
        def exits_early(how: str) -> str:
            """Its own before_start exits before it calls super()."""
            return how

    for policy in ("skip", "wait", "raise", "join"):

        @locked(f"swallowing_{policy}", lock_key="swallowing", lock_on_conflict=policy, base=_SwallowingHook)
        def swallowing(item: Any, seconds: Any = 0.0) -> Any:
            """Its own before_start swallows every error of the lock's."""
            with ledger.run("swallowing", item):
                spend(seconds)
            return item

    @locked("polling", bind=True, lock_key="polling", lock_on_conflict="raise", base=_PollingHook)
    def polling(self: Any) -> int:
        """Its own before_start asks again and again; the body retries itself once."""
        with ledger.run("polling", self.request.retries):
            if not self.request.retries:
                raise self.retry(countdown=0)
        return int(self.request.retries)

    @locked("hears", base=Task, ignore_result=False)
    def hears() -> list[str]:
        """Who hears of the end of each task in this process."""
        return [str(receiver) for _, receiver in task_postrun.receivers]


def _slow_name(_: object) -> str:
    time.sleep(2)
    return "slow"


class _FailingHook(LockedTask):
    def after_return(self, *args: Any) -> None:
        raise RuntimeError("the user's own hook fails")


class _PlainExitingHook(Task):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if args == ["exit"]:
            raise SystemExit(1)
        if args == ["cancelled"]:
            raise CancelledError
        super().before_start(task_id, args, kwargs)


class _ExitingHook(_PlainExitingHook, LockedTask):
    pass


class _SwallowingHook(LockedTask):
    def before_start(self, *args: Any) -> None:
        with suppress(Exception):
            super().before_start(*args)


class _PollingHook(LockedTask):
    def before_start(self, *args: Any) -> None:
        while True:
            try:
                return super().before_start(*args)
            except LockConflict:
                time.sleep(0.05)


class _ForgetfulHook(LockedTask):
    def before_start(self, *args: Any) -> None:
        pass
