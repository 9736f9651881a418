"""One acquire and release of an uncontended key: bare calls, the store, `Lock`, and redis-py's own lock."""

from __future__ import annotations

import socket

from celery import Celery
from redis.lock import Lock as RedisPyLock

from celery_redislock import LockedTask
from celery_redislock.server import tokens
from celery_redislock.server.connect import connect
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import Token

from .bare import two_calls
from .report import Report
from .server import placements, valkey
from .timing import Case, interleave

#: What a `Lock` with renewal may cost, two bare calls being 1.00.
BOUND = 1.10
LOCK = "Lock (task.lock_for), renewal on"
LEASE = 30.0


def main() -> None:
    with valkey() as url:
        app = Celery("cycle", broker=url)

        @app.task(base=LockedTask, lock_lease=LEASE)
        def locked() -> None: ...

        lock = locked.lock_for()
        client = connect(url, {})
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin(socket.gethostname(), None))
        redis_py = RedisPyLock(client, lock.name, timeout=LEASE)

        def lock_cycle() -> None:
            lock.acquire()
            lock.release()

        def redis_py_cycle() -> None:
            redis_py.acquire()
            redis_py.release()

        cases = {
            "two bare EVALSHA calls": two_calls(client, lock.name, token, LEASE),
            "LockStore.acquire, release": store_cycle(LockStore(client), lock.name, token),
            LOCK: lock_cycle,
            "redis-py's own Lock": redis_py_cycle,
        }
        report = Report("cycle: acquire + release of an uncontended key")
        for placement in placements(url):
            report.section(placement)
            results = interleave(cases)
            baseline, *_ = results.values()
            for case, rounds in results.items():
                report.add(case, rounds, baseline, BOUND if case == LOCK else None)
    report.show()


def store_cycle(store: LockStore, key: str, token: Token) -> Case:
    """Acquire and release `key` by the store."""

    def cycle() -> None:
        store.acquire(key, token, LEASE)
        store.release(key, token)

    return cycle
