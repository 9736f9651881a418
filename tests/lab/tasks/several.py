"""Tasks that need several locks at once."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_redislock import Also
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    task = decorator_of(app)
    late = {"acks_late": True, "reject_on_worker_lost": True}
    # A test may set these for the whole app, and they do not go with several keys.
    accounts = partial(task, lock_key=["account:{source}", "account:{target}"], lock_scope="run", bind=True)

    for name, options in {
        "transfer": late,
        "transfer_early": {},
        "transfer_skips": {**late, "lock_on_conflict": "skip"},
        "transfer_raises": {"lock_on_conflict": "raise"},
        "transfer_aborts": {"lock_on_lost": "abort", "lock_lease": 2.0},
        "transfer_cools": {"lock_cooldown": 60.0},
        "transfer_unlocked": {"lock_on_outage": "run"},
        "transfer_refuses": {"lock_on_outage": "raise"},
        "transfer_fenced": {"lock_fence": True},
        "transfer_briefly": {"lock_lease": 1.5, "lock_max_hold": 1.0},
    }.items():

        @accounts(name, **options)
        def transfer(
            self: Any, source: Any, target: Any, item: Any = "", seconds: float | str = 0.0, how: str = ""
        ) -> Any:
            """Spend some time with two accounts, and then end as `how` says."""
            with ExitStack() as both:
                for account in dict.fromkeys((source, target)):
                    both.enter_context(ledger.run(f"account:{account}", item))
                if how == "tells":
                    parts = [[part.key, part.fence, part.state] for part in self.lock.parts]
                    ledger.write({"event": "parts", "parts": parts, "fence": self.lock.fence})
                if how == "publishes":
                    self.delay(target, "elsewhere", f"{item}'s successor")
                    ledger.wait_for_conflict(self.request.id)
                spend(seconds)
                first = not self.request.retries and not self.request.replaced_task_nesting
                match how:
                    case "checks":
                        self.lock.check()
                    case "fails":
                        raise ValueError(item)
                    case "retries" if first:
                        raise self.retry(countdown=0.1)
                    case "ignores":
                        raise Ignore(item)
                    case "rejects":
                        raise Reject(item, requeue=False)
                    case "requeues" if ledger.items().count(str(item)) < 3:  # two accounts, once
                        raise Reject(item, requeue=True)
                    case "replaces" if first:
                        raise self.replace(self.s(source, target, item))
            return item

    @task("computed_key", lock_key=lambda call: f"computed:{call['account']}", **late)
    def computed_key(account: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """A task whose callable may return several keys, and returns one."""
        with ledger.run(f"computed:{account}", item):
            spend(seconds)
        return item

    @task("account_only", lock_key="account:{account}", lock_scope="run", **late)
    def account_only(account: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """Another task with one of these keys."""
        with ledger.run(f"account:{account}", item):
            spend(seconds)
        return item

    @task("of_list", lock_key=lambda arguments: arguments["keys"])
    def of_list(keys: Any, item: Any = "") -> Any:
        """Its caller names the keys."""
        with ledger.run(str(keys), item):
            return item

    for name, also, policy in (
        ("job_of_customer", [Also("farm", limit=5)], "wait"),
        ("job_with_rate", [Also("api", rate=(5, 2.0))], "wait"),
        ("job_of_machine", [Also("machine:{item}")], "skip"),
        ("job_with_wrong_limit", [Also("farm", limit=lambda call: call["item"])], "wait"),
        ("job_with_wrong_rate", [Also("api", rate=lambda call: call["item"])], "wait"),
        ("job_with_two_rates", [Also("rate-a", rate="2/h"), Also("rate-b", rate=(1, 3.0))], "wait"),
    ):

        @task(name, lock_key="customer:{customer}", lock_also=also, lock_on_conflict=policy, lock_scope="run", **late)
        def job(customer: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
            """A job of one customer, with something that all share."""
            with ledger.run(f"customer:{customer}", item), ledger.run("all", item):
                spend(seconds)
            return item
