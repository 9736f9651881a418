"""LockInfo: who holds a key."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple


class LockInfo(NamedTuple):
    """Who holds a key, as its token tells.

    A tuple of plain values, so that it survives pickle and Celery's JSON result backends.
    """

    key: str
    """The key in Redis."""
    task_id: str | None
    """The id of the task that holds it; None where the holder is no task."""
    task: str | None
    """The name of that task; None where the holder is no task."""
    hostname: str | None
    """The worker or host that holds it; None where another library's lock holds the key."""
    since: datetime | None
    """When it was acquired, by the holder's clock (aware, UTC)."""
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""

    @property
    def who(self) -> str:
        """The holder in words, for messages: its task id and host."""
        host = self.hostname or "an unknown host"
        return f"task {self.task_id} on {host}" if self.task_id else f"a lock outside tasks on {host}"
