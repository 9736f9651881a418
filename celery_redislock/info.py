"""LockInfo: who holds a key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from .shown import shown


class LockInfo(NamedTuple):
    """Who holds a key, as its token tells."""

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
    state: str = "held"
    """``"queued"``: kept for a task that has not started yet; ``"cooling"``: nobody's until `lock_cooldown` is over."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """From a LockInfo, or from what a serializer has made of its `plain` values."""
        info = cls(*values)
        return info._replace(since=datetime.fromisoformat(info.since)) if isinstance(info.since, str) else info

    @property
    def plain(self) -> tuple[Any, ...]:
        """Its values as every serializer can carry them."""
        return (*self[:4], self.since and self.since.isoformat(), self.ttl, self.state)

    @property
    def who(self) -> str:
        """The holder in words, for messages: its task id and host."""
        host, task = shown(self.hostname or "an unknown host"), f"task {shown(str(self.task_id))}"
        if self.state == "queued":
            return f"{task}, queued by {host}"
        if self.state == "cooling":
            return f"{task}, which has succeeded on {host} and cools down"
        return f"{task} on {host}" if self.task_id else f"a lock outside tasks on {host}"
