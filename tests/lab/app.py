"""The Celery app of the tests: one function makes it, in the test's process and in every worker."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel

from celery_redislock import LockedTask, LockLost
from tests.lab.jobs import define_jobs
from tests.lab.ledger import Ledger


@dataclass
class Config:
    """Where the servers are, and what the test sets besides."""

    broker: str
    backend: str
    locks: str
    ledger: str
    queue: str = "lab"
    settings: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls) -> Config:
        return cls(**json.loads(os.environ["LAB_CONFIG"]))


class Order(BaseModel):
    """An argument of a task with ``pydantic=True``."""

    number: int
    lines: tuple[str, ...]


def make_app(config: Config) -> Celery:
    """A fresh app; its tasks write into the config's ledger."""
    app = Celery("lab", broker=config.broker, backend=config.backend, set_as_current=False)
    app.conf.update(
        redislock_url=config.locks,
        redislock_retry_delay=0.02,
        redislock_retry_max_delay=0.3,
        redislock_client_options={"socket_timeout": 0.5, "socket_connect_timeout": 0.5},
        task_default_queue=config.queue,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        task_publish_retry=False,
        broker_transport_options={"socket_keepalive": True},
    )
    app.conf.update(config.settings, lab_ledger=config.ledger)
    define_tasks(app, Ledger(Path(config.ledger)))
    define_jobs(app, Ledger(Path(config.ledger)))
    return app


def define_tasks(app: Celery, ledger: Ledger) -> None:
    """The tasks of the tests; each writes its runs into the ledger."""

    def locked(name: str, **options: Any) -> Any:
        return app.task(name=f"lab.{name}", shared=False, **{"base": LockedTask, **options})

    @locked("work", lock_args=["key"])
    def work(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """Takes its turn."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return item

    @locked("once", lock_args=["key"], lock_on_conflict="skip")
    def once(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """Is skipped while another runs."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return item

    @locked("step", lock_args=["key"], lock_on_conflict="skip")
    def step(key: Any, item: Any = "", seconds: float = 0.0, fails: bool = False) -> Any:
        """Like once, but another name, and able to fail."""
        with ledger.run(key, item):
            time.sleep(seconds)
            if fails:
                raise ValueError(f"{item} fails")
        return item

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

    @locked("ends", bind=True, lock_args=["key"])
    def ends(self: Any, key: Any, how: str) -> str:
        """Leaves in every way there is."""
        with ledger.run(key, how):
            match how:
                case "failure":
                    raise ValueError(how)
                case "retry" if not self.request.retries:
                    raise self.retry(countdown=0.1)
                case "ignore":
                    raise Ignore(how)
                case "reject":
                    raise Reject(how, requeue=False)
                case "exit":
                    raise SystemExit(1)
                case "slow":
                    time.sleep(30)
        return how

    @locked("own_publish", lock_args=["key"], base=_OwnPublish)
    def own_publish(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """Its class has a word to say at every publish."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return item

    @locked("hooked", lock_args=["key"], base=_FailingHook)
    def hooked(key: Any) -> None:
        """Its own after_return fails before it calls super()."""

    @locked("unhooked", base=_ForgetfulHook)
    def unhooked() -> None:
        """Its own before_start forgets super()."""
        with ledger.run("unhooked"):
            pass

    @locked("bound", bind=True, lock_args=["account"], lock_on_conflict="skip")
    def bound(self: Any, amount: int, account: int, seconds: float = 0.0) -> dict[str, Any]:
        """A bound task that shows its lock."""
        with ledger.run(account, amount):
            lock = self.lock
            lock.check()
            lock.extend()
            time.sleep(seconds)
            seen = {name: getattr(lock, name) for name in ("key", "state", "remaining", "fence")}
            return {**seen, "headers": self.request.headers}

    @locked("keyed", lock_key="stock:{sku}", lock_on_conflict="retry")
    def keyed(sku: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """Shares its key with `keyed_too`."""
        with ledger.run(sku, item):
            time.sleep(seconds)
        return item

    @locked("keyed_too", lock_key="stock:{sku}", lock_on_conflict="retry")
    def keyed_too(quantity: int, sku: Any, seconds: float = 0.0) -> int:
        with ledger.run(sku, quantity):
            time.sleep(seconds)
        return quantity

    @locked("late", lock_args=["key"], acks_late=True, lock_lease=3.0)
    def late(key: Any, item: Any = "", seconds: float = 0.0, fails: bool = False) -> Any:
        """Acked after it ran, with a short lease."""
        with ledger.run(key, item):
            time.sleep(seconds)
            if fails:
                raise ValueError(f"{item} fails")
        return item

    @locked("tracked", lock_args=["key"], acks_late=True, lock_lease=3.0, track_started=True)
    def tracked(key: Any, item: Any = "", seconds: float = 0.0, fails: bool = False) -> Any:
        """As late, and shown as STARTED meanwhile."""
        return late.run(key, item, seconds, fails)

    @locked("mild", lock_args=["key"], soft_time_limit=1)
    def mild(key: Any) -> None:
        """Runs into its soft time limit."""
        with ledger.run(key):
            time.sleep(30)

    @locked("limited", lock_args=["key"], time_limit=1)
    def limited(key: Any, stubborn: bool = False) -> None:
        """Runs into its hard time limit."""
        with ledger.run(key):
            sleep_on(30) if stubborn else time.sleep(30)

    @locked("stubborn", lock_args=["key"])
    def stubborn(key: Any, item: Any, seconds: float) -> Any:
        """Does not end when it is told to."""
        with ledger.run(key, item):
            sleep_on(seconds)
        return item

    @locked("hangs", bind=True, lock_args=["key"], lock_lease=2.0, lock_max_hold=1.0)
    def hangs(self: Any, key: Any, item: Any, seconds: float = 0.0) -> None:
        """Runs for longer than it may, and writes down what becomes of its lock."""
        with ledger.run(key, item):
            watch(self.lock, ledger, item, seconds)

    @locked("watches", bind=True, lock_args=["key"])
    def watches(self: Any, key: Any, item: Any, seconds: float = 0.0) -> None:
        """Writes down what becomes of its lock, and ends soon after it is lost; its options are the app's."""
        with ledger.run(key, item):
            watch(self.lock, ledger, item, seconds, after_loss=0.5)

    @locked("once_late", lock_args=["key"], lock_on_conflict="skip", lock_lease=5.0, acks_late=True)
    def once_late(key: Any, item: Any = "", seconds: float = 0.0) -> Any:
        """Is skipped while another runs, and acked after it ran."""
        return once.run(key, item, seconds)

    @locked("given_back", lock_args=["key"], acks_late=True, reject_on_worker_lost=True)
    def given_back(key: Any, item: Any, first: float = 0.0) -> Any:
        """Is given back to the broker when its process dies; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("restarted", lock_args=["key"], acks_late=True)
    def restarted(key: Any, item: Any, first: float = 0.0) -> Any:
        """Acked after it ran; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("cut_short", lock_args=["key"], acks_late=True, reject_on_worker_lost=True, lock_lease=3.0)
    def cut_short(key: Any, item: Any, first: float = 0.0) -> Any:
        """Is told to go in its first run, when its body has ended and its result is not stored yet."""
        is_first = str(item) not in ledger.items()
        ledger.take(key, item, first)
        return _Leaves() if is_first else item

    @locked("tried_again", lock_args=["key"], retry_on_worker_lost=True, default_retry_delay=0)
    def tried_again(key: Any, item: Any, first: float = 0.0) -> Any:
        """Is retried by the main process when its process dies, from Celery 5.7 on."""
        return ledger.take(key, item, first)

    for policy in ("skip", "retry", "wait", "raise", "join"):
        _define_policy(locked, ledger, policy)

    for policy in ("skip", "raise"):

        @locked(
            f"auto_{policy}", lock_key="{key}", lock_on_conflict=policy, autoretry_for=(Exception,), retry_backoff=0.1
        )
        def auto(key: str) -> None:
            """Retries itself whatever its body raises."""
            with ledger.run(key):
                pass

    @locked("counted", bind=True, lock_args=["key"])
    def counted(self: Any, key: Any, item: Any, seconds: float = 0.0) -> list[Any]:
        """Tells how often it was retried."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return [item, self.request.retries]

    @locked("counted_late", bind=True, lock_args=["key"], acks_late=True)
    def counted_late(self: Any, key: Any, item: Any, seconds: float = 0.0) -> list[Any]:
        """The same, acked after it ran."""
        with ledger.run(key, item):
            time.sleep(seconds)
        return [item, self.request.retries]

    @locked("tells", bind=True, lock_key="{key}", lock_on_conflict="retry", max_retries=2, default_retry_delay=0)
    def tells(self: Any, key: str, what: Any = "", retries: int = 0) -> Any:
        """Tells what its message had, once it has retried itself as often as it shall."""
        with ledger.run(key, self.request.retries):
            if self.request.retries < retries:
                raise self.retry(countdown=0)
        told = {name: value for name, value in vars(self.request).items() if not name.startswith("redislock")}
        told["children"] = len(self.request.children)
        ledger.write({"event": "told", "message": told})
        return "told"

    @locked("aborted", bind=True, lock_args=["key"], lock_lease=2.0, lock_on_lost="abort")
    def aborted(self: Any, key: Any, seconds: float = 30.0) -> str:
        """Is told in mid-work that its lock is lost."""
        with ledger.run(key):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)
        return "not aborted"

    @locked("threaded", bind=True, lock_args=["key"])
    def threaded(self: Any, key: Any, seconds: float) -> tuple[str, str]:
        """Tells which lock it saw before and after its work."""
        before = self.lock.key
        time.sleep(seconds)
        return before, self.lock.key

    @locked("whole")
    def whole(account: Any, full: bool = False, seconds: float = 0.0) -> None:
        """All arguments make its key."""
        with ledger.run(account):
            time.sleep(seconds)

    @locked("model", pydantic=True)
    def model(order: Order) -> int:
        """Takes a pydantic model."""
        with ledger.run(order.number):
            time.sleep(0.5)
        return order.number

    @locked("misdeclared", base=None, lock_args=["key"], lock_lease=5)
    def misdeclared(key: Any) -> None:
        """Its author forgot base=LockedTask."""

    @locked("breaks", base=None)
    def breaks() -> None:
        """Fails, for an errback to run."""
        raise ValueError("broken")

    @locked("plain", base=None)
    def plain(*args: Any) -> str:
        """No lock: the end of a chain, a chord's body, a link."""
        with ledger.run("plain", time.monotonic_ns()):
            return "plain"


def watch(lock: Any, ledger: Ledger, item: Any, seconds: float, after_loss: float = float("inf")) -> None:
    """In a body: write down each new state of its lock, and each new deadline, as the body itself sees them."""
    end, state, deadline = time.monotonic() + seconds, None, 0.0
    while time.monotonic() < end:
        now, remaining = time.monotonic(), lock.remaining
        if lock.state != state:
            state = lock.state
            ledger.write({"event": "lock", "item": item, "state": state, "check": _check(lock)})
            end = min(end, now + after_loss) if state == "lost" else end
        if remaining and now + remaining > deadline + 0.05:
            deadline = now + remaining
            ledger.write({"event": "deadline", "item": item, "at": deadline})
        time.sleep(0.01)


def _check(lock: Any) -> str | None:
    """The name of what ``lock.check()`` raises."""
    try:
        lock.check()
    except LockLost as error:
        return type(error).__name__
    return None


def sleep_on(seconds: float) -> None:
    """Sleep, whatever signals come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BaseException):
            time.sleep(end - time.monotonic())


def _define_policy(locked: Any, ledger: Ledger, policy: str) -> None:
    """The task `lab.on_<policy>`, and `lab.errback_<policy>` with a single parameter; they share their keys."""

    @locked(
        f"on_{policy}",
        bind=True,
        lock_key="{key}",
        lock_on_conflict=policy,
        autoretry_for=(OSError,),
        ignore_result=False,
    )
    def on_conflict(self: Any, key: str, item: Any = "", holds: str = "") -> Any:
        """Where it `holds`, until its conflict has been announced; then it ends so."""
        with ledger.run(key, item):
            if holds:
                ledger.wait_for_conflict(self.request.id)
            if holds == "fails":
                raise ValueError(item)
            if holds == "retries" and not self.request.retries:
                raise self.retry(countdown=0.5)
            if holds == "ignores":
                if self.request.retries:
                    raise Ignore("nothing to do any more")
                raise self.retry(countdown=0.5)
            if holds == "exits":
                raise SystemExit(1)
            if holds == "rejects":
                raise Reject(item, requeue=False)
            if holds == "hangs":
                time.sleep(60)
        return item

    @locked(f"errback_{policy}", lock_key="{key}", lock_on_conflict=policy, ignore_result=False)
    def errback(key: str) -> str:
        with ledger.run(key, "errback"):
            return "errback"


class _Leaves:
    """A result that ends the process which stores it."""

    def __json__(self) -> Any:
        raise SystemExit(1)


class _Linked(LockedTask):
    def before_start(self, *args: Any) -> None:
        """Celery 5.6.0 takes the next step out of the request's list when it publishes it."""
        super().before_start(*args)
        self.request.goes_on = bool(self.request.chain)

    def on_success(self, retval: Any, task_id: str, *args: Any) -> None:
        """Celery has published the next step by now."""
        if self.request.goes_on:
            Ledger(Path(self.app.conf.lab_ledger)).wait_for_conflict(task_id)


class _OwnPublish(LockedTask):
    def apply_async(self, *args: Any, **options: Any) -> Any:
        """As celery-singleton's, for a duplicate: answer with another's id, and send nothing."""
        if self.app.current_worker_task:
            return self.AsyncResult("another")
        return super().apply_async(*args, **options)


class _FailingHook(LockedTask):
    def after_return(self, *args: Any) -> None:
        raise RuntimeError("the user's own hook fails")


class _ForgetfulHook(LockedTask):
    def before_start(self, *args: Any) -> None:
        pass
