"""One acquire and release of an uncontended key: bare calls, the store, `Lock`, and the locks of other libraries."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery
from redis.lock import Lock as RedisPyLock

from celery_redislock import LockedTask
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Token

from .bare import two_calls
from .findings import CYCLE, Findings
from .report import Report
from .server import ONE_CPU, placements, valkey
from .timing import Case, Rounds, interleave

#: What a `Lock` with renewal may cost, relative to two bare calls. With a CPU each, the store's two commands alone are
#: 0.81: most of that time wakes the other CPU, which takes as long for bare calls.
BOUND_ONE_CPU, BOUND = 0.90, 0.95
LOCK = "Lock (task.lock_for), renewal on"
REDIS_PY, REDLOCK = "redis-py's own Lock", "pottery's Redlock"
LEASE = 30.0
#: A lock that starts a thread for each cycle is slow, so there are fewer rounds when all take part.
ROUNDS_OF_ALL = 100


def main(findings: Findings) -> None:
    findings.chapter("A cycle: acquire and release of an uncontended key")
    report = Report(findings, "cycle: acquire + release of an uncontended key")
    with valkey() as url:
        cases = _cases(url, findings.full)
        for placement in placements(url):
            report.section(placement)
            results = interleave(cases, ROUNDS_OF_ALL) if findings.full else interleave(cases)
            baseline, *_ = results.values()
            bound = BOUND_ONE_CPU if placement == ONE_CPU else BOUND
            for case, rounds in results.items():
                report.add(case, rounds, baseline, bound if case == LOCK else None)
    report.show()
    _plot(findings, results)
    findings.say(
        "`Lock` and python-redis-lock with renewal keep the lock alive while its holder works: `Lock` with one thread "
        "for all locks of the process, python-redis-lock with a thread for each hold. The other locks expire at their "
        "timeout. pottery's Redlock got one server, like the others."
    )


def _cases(url: str, full: bool) -> dict[str, Case]:
    app = Celery("cycle", broker=url)

    @app.task(base=LockedTask, lock_lease=LEASE)
    def locked() -> None: ...

    lock = locked.lock_for()
    client = connect(url, {})
    redis_py = RedisPyLock(client, lock.name, timeout=LEASE)
    token = tokens.mint(tokens.mint_nonce(), None, tokens.origin(socket.gethostname(), None))
    cases = {
        "two bare EVALSHA calls": two_calls(client, lock.name, token, LEASE),
        "LockStore.acquire, release": store_cycle(LockStore.of(client), Demand(lock.name), token),
        LOCK: _cycle(lambda: lock),
        REDIS_PY: _cycle(lambda: redis_py),
    }
    return {**cases, **_others(client)} if full else cases


def _others(client: redis.Redis) -> dict[str, Case]:
    import redis_lock
    from pottery import Redlock

    return {
        "python-redis-lock": _cycle(lambda: redis_lock.Lock(client, "theirs", expire=int(LEASE))),
        "python-redis-lock, renewal on": _cycle(
            lambda: redis_lock.Lock(client, "theirs", expire=int(LEASE), auto_renewal=True)
        ),
        REDLOCK: _cycle(lambda: Redlock(key="theirs", masters={client}, auto_release_time=LEASE)),
    }


def _cycle(make: Callable[[], Any]) -> Case:
    def cycle() -> None:
        lock = make()
        lock.acquire()
        lock.release()

    return cycle


class Caller:
    """The owner of a hold, and nothing else."""

    def __init__(self, demand: Demand, token: Token) -> None:
        self.hold = Hold(demand, token)


def store_cycle(store: LockStore, demand: Demand, token: Token) -> Case:
    """Acquire and release the key by the store."""

    def cycle() -> None:
        store.acquire(Caller(demand, token), LEASE)
        store.release(demand, token)

    return cycle


def _plot(findings: Findings, results: dict[str, Rounds]) -> None:
    times = {case: rounds.microseconds() for case, rounds in results.items()}
    bare = results["two bare EVALSHA calls"]
    ratios = {case: rounds.ratio(bare).median for case, rounds in results.items()}
    title = f"A renewed Lock takes {ratios[LOCK]:.2f} times as long as two bare calls"
    label = "µs to acquire and release a free key"
    findings.bars("cycle", title, times, label, first=True)
    if findings.full:
        findings.sum_up(
            CYCLE,
            f"{ratios[LOCK]:.2f} times as long as two bare calls to Redis",
            f"redis-py's lock {ratios[REDIS_PY]:.2f} times, python-redis-lock "
            f"{ratios['python-redis-lock']:.2f} ({ratios['python-redis-lock, renewal on']:.2f} with renewal), "
            f"pottery's Redlock {ratios[REDLOCK]:.2f}",
        )
