"""The app, with six uses of a lock. Copy from this file.

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
    work(f"stock {sku}", seconds=0.5)


@app.task(base=LockedTask, lock_key="stock:{sku}")
def restock(sku: str, quantity: int) -> None:
    """Put items into the stock."""
    work(f"stock {sku}", seconds=0.5)


# 3. A task that overrides a setting of the app. It runs longer than its lease, because the lock is renewed.
@app.task(base=LockedTask, lock_lease=2)
def build_report(day: str) -> None:
    """Build the report of one day."""
    work(f"report {day}", seconds=4.5)


# 4. A burst of calls is merged into the one message that waits. It runs half a second after the last of them, with that
#    one's arguments. The other calls send nothing.
@app.task(base=LockedTask, lock_args=["shop"], lock_scope="queue", lock_arguments="latest", lock_debounce=0.5)
def index_shop(shop: int, settings: str) -> str:
    """Make a shop's products searchable."""
    work(f"shop {shop}", seconds=1)
    return settings


# 5. The newest call ends the running one. Its body gets LockReplaced, and cleans up with the lock still held.
@app.task(base=LockedTask, lock_args=["page"], lock_scope="queue", lock_arguments="latest", lock_on_conflict="replace")
def render_preview(page: int, text: str) -> str:
    """Show how a page will look."""
    work(f"page {page}", seconds=2)
    return text


# 6. Customers that share a key take turns, however many calls one of them has made.
@app.task(base=LockedTask, lock_key="imports", lock_fair="customer")
def import_file(customer: str, number: int) -> None:
    """Read one file of a customer."""
    work("imports", seconds=0.25)
