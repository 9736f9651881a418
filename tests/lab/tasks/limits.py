"""Tasks of which three may run at once under one key, and one that says itself how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from tests.lab.gate import spend, wait_for_file
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    decorate = decorator_of(app)

    def locked(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        # A test may set these for the whole app, and they do not go with a limit.
        return decorate(name, **{"lock_scope": "run", "lock_fence": False, "lock_cooldown": 0, **options})

    @locked("three", lock_args=["key"], lock_limit=3)
    def three(key: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """Waits where three run."""
        with ledger.run(key, item):
            spend(seconds)
        return item

    @locked("three_late", lock_args=["key"], lock_limit=3, acks_late=True, reject_on_worker_lost=True, lock_lease=6.0)
    def three_late(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Acked after it ran; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("three_until", lock_args=["key"], lock_limit=3, acks_late=True, reject_on_worker_lost=True)
    def three_until(key: Any, item: Any, file: str) -> Any:
        """Acked after it ran, and ends once there is a file."""
        with ledger.run(key, item):
            wait_for_file(file)
        return item

    for policy in ("skip", "raise", "join"):

        @locked(f"three_{policy}", lock_key="{key}", lock_limit=3, lock_on_conflict=policy, ignore_result=False)
        def by_policy(key: str, item: str = "", seconds: float | str = 0.0) -> str:
            """Meets its policy where three run."""
            with ledger.run(key, item):
                spend(seconds)
            return item

    @locked("three_pages", bind=True, lock_args=["key"], lock_limit=3, lock_on_conflict="skip")
    def three_pages(self: Any, key: Any, number: int, last: int) -> None:
        """Sends its own next page, which arrives before it has ended."""
        with ledger.run(key, number):
            if number < last:
                self.delay(key, number + 1, last)
                ledger.wait_for_conflict(self.request.id)

    @locked("three_again", bind=True, max_retries=10, lock_args=["key"], lock_limit=3, lock_hold_on_retry=True)
    def three_again(
        self: Any, key: Any, item: Any, times: int = 0, lingers: float | str = 0.0, countdown: float = 0.0
    ) -> Any:
        """Retries itself `times` times, keeps its permit meanwhile, and sleeps after each publish."""
        with ledger.run(key, f"{item}{self.request.retries}"):
            if self.request.retries < times:
                try:
                    raise self.retry(countdown=countdown)
                finally:
                    spend(lingers)
        return item

    @locked(
        "three_tried_again",
        lock_args=["key"],
        lock_limit=3,
        lock_hold_on_retry=True,
        retry_on_worker_lost=True,
        default_retry_delay=60,
    )
    def three_tried_again(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Is retried by the main process a minute after its process has died, and keeps its permit until then."""
        return ledger.take(key, item, first)

    @locked("as_many", lock_args=["key"], lock_limit=_as_many_as_asked_for)
    def as_many(key: Any, limit: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """The caller says how many may run at once."""
        return three.run(key, item, seconds)


def _as_many_as_asked_for(arguments: Any) -> Any:
    if arguments["limit"] == "raises":
        raise RuntimeError("a secret of the user's")
    return arguments["limit"]
