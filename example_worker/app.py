"""The app, with three uses of a lock. Copy from this file.

    celery -A example_worker.app worker

Set ``CELERY_BROKER_URL`` and ``CELERY_RESULT_BACKEND``. The locks live on the broker if it is a Redis, otherwise on the
result backend. To use another server, set ``redislock_url``.
"""

from __future__ import annotations

from celery import Celery

from celery_redislock import LockedTask

from . import private
from .ledger import work

app = Celery("example_worker")
app.conf.update(private.SETTINGS)  # only for the demo

# For every locked task of the app. Durations are in seconds.
app.conf.update(
    redislock_lease=10,  # how long a lock outlives a dead worker; a live one renews it
    redislock_client_options={"socket_timeout": 0.5, "socket_connect_timeout": 0.5},  # must fit into the shortest lease
)


# 1. One run for each account. The key is made of all arguments, so an equal call is the same work. While one runs, the
#    others are skipped: they end as REVOKED, "duplicate of <id of the running task>".
@app.task(base=LockedTask)
def sync_account(account: int) -> None:
    """Fetch what is new in one account."""
    work(f"account {account}", seconds=1.5)


# 2. One lock for two tasks. Here the other call is other work, so it waits in line instead of being skipped.
@app.task(base=LockedTask, lock_key="stock:{sku}")
def reserve(sku: str, quantity: int) -> None:
    """Take items out of the stock."""
    work(f"stock {sku}", seconds=1)


@app.task(base=LockedTask, lock_key="stock:{sku}")
def restock(sku: str, quantity: int) -> None:
    """Put items into the stock."""
    work(f"stock {sku}", seconds=1)


# 3. A task that overrides a setting of the app. It runs longer than its lease, because the lock is renewed.
@app.task(base=LockedTask, lock_lease=2)
def build_report(day: str) -> None:
    """Build the report of one day."""
    work(f"report {day}", seconds=6.5)
