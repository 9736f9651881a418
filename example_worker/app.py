"""The app: the three uses that people have of a lock. This is the file to copy from.

    celery -A example_worker.app worker

``CELERY_BROKER_URL`` and ``CELERY_RESULT_BACKEND`` say where. The locks live on the broker if that is a Redis, else
on the result backend; the setting ``redislock_url`` names another server.
"""

from __future__ import annotations

from celery import Celery

from celery_redislock import LockedTask

from . import private
from .ledger import work

app = Celery("example_worker")
app.conf.update(private.SETTINGS)  # only the demo needs them

# For every locked task of the app. Durations are seconds.
app.conf.update(
    redislock_lease=10,  # how long a lock outlives a dead worker; a living one renews it
    redislock_client_options={"socket_timeout": 0.5, "socket_connect_timeout": 0.5},  # must fit into every lease
)


# 1. One run per argument. All arguments make the key, so the same call is the same work: while it runs, another one
#    is skipped. Its result says REVOKED, "duplicate of <the running task's id>".
@app.task(base=LockedTask)
def sync_account(account: int) -> None:
    """Fetch the news of one account."""
    work(f"account {account}", seconds=1.5)


# 2. One lock for two tasks. Here a conflict is other work, so it waits in line instead of being skipped.
@app.task(base=LockedTask, lock_key="stock:{sku}")
def reserve(sku: str, quantity: int) -> None:
    """Take pieces out of the stock."""
    work(f"stock {sku}", seconds=1)


@app.task(base=LockedTask, lock_key="stock:{sku}")
def restock(sku: str, quantity: int) -> None:
    """Put pieces into the stock."""
    work(f"stock {sku}", seconds=1)


# 3. A task that overrides what is set for the app. It runs longer than its lease, which is renewed meanwhile.
@app.task(base=LockedTask, lock_lease=2)
def build_report(day: str) -> None:
    """Add up a day."""
    work(f"report {day}", seconds=6.5)
