"""Locks: reads and releases an app's locks for the command line."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from redis.exceptions import AskError

from celery_redislock.app import keyprefix_of, server_of, settings_of
from celery_redislock.connection.connect import address
from celery_redislock.info import shown
from celery_redislock.options import resolve_settings
from celery_redislock.protocol.names import MAX_CAPACITY, Demand, LockPart, keys_of
from celery_redislock.protocol.tokens import known_as
from celery_redislock.task.plan import LockPlan

from .scan import Row, nodes_of, rooms_of, scan
from .sentences import held
from .workers import Counts

_NEVER = datetime.max.replace(tzinfo=UTC)


class Locks:
    """The locks of an app, as its lock server knows them.

    Args:
        app: The app, with its tasks loaded.

    Attributes:
        prefix: The start of its tasks' keys, up to the opening brace.

    Raises:
        LockConfigError: The app has no lock server.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._server = server_of(app)
        self.prefix = f"{keyprefix_of(app)}{resolve_settings(settings_of(app)).prefix}:{{"

    @property
    def server(self) -> str:
        """The address of the lock server, without a password."""
        return address(self._server.client)

    @property
    def where(self) -> str:
        """The address of the lock server, without a password, and the prefix of the keys."""
        return f"{self.server}, with the prefix {shown(self.prefix.removesuffix(':{'))!r}"

    def all(
        self, match: str | None = None, task: str | None = None, counts: Counts | None = None, *, foreign: bool = False
    ) -> Iterator[Row]:
        """All holders, and all locks that are free while messages wait for them, in no particular order.

        Args:
            match: A pattern of keys, as for Redis' SCAN; None for all locks of the app's tasks.
            task: The name of the holder's task, or of a waiting task if the lock is free; None for any.
            counts: The waiting messages. Without it, each process in line counts as one.
            foreign: Whether to include keys that are not `ours`, whatever they may hold.

        Raises:
            RedisError: Redis did not answer, or refused the command.
        """
        pattern = _literal(self.prefix) + "*" if match is None else match
        name, seen, matches = task and known_as(task), set(), matcher(pattern)
        unseen = {lock for lock in counts.locks if matches(lock)} if counts else set()
        for node in nodes_of(self._server.client):
            for row in scan(node, pattern, self.look):
                unseen.discard(row.part.lock)
                if row.part.key not in seen and (foreign or self.ours(row)) and name in {None, row.token.task}:
                    seen.add(row.part.key)
                    yield counts.add(row) if counts else row
        for lock in sorted(unseen):  # they are free, or were just taken
            for row in self.of(lock, counts):
                tasks = row.waits if row.state == "free" else (row.token.task,)
                if matches(row.part.key) and (name is None or name in tasks):
                    yield row

    def ours(self, row: Row) -> bool:
        """Whether a key belongs to this package: it begins with the app's prefix, or holds a token."""
        return row.part.key.startswith(self.prefix) or row.token.since is not None

    def of(self, key: str, counts: Counts | None = None) -> list[Row]:
        """The holders of the lock `key` (several if it has a limit), and the place in its queue if reserved.

        With `counts`, a free lock has a row too if messages wait for it.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        part = LockPart.of(key)
        if part is None:
            return []
        names = keys_of(part.lock)
        first = self.look(LockPart(names.lock, names.lock))
        queued = self.look(LockPart(names.queued, part.lock, "queued"))
        rows = [row for row in (first, *self._others(part.lock, first), queued) if row is not None]
        return rows if counts is None else [counts.add(row) for row in rows] or counts.free(part.lock)

    def look(self, part: LockPart) -> Row | None:
        """The holder of one key; None if the key is free.

        Raises:
            RedisError: Redis did not answer, or refused the command.
        """
        found = self._server.store.look(Demand(part.key))
        return found and Row(part, found.holder, found.ttl, self._rooms(part.lock))

    def _rooms(self, lock: str) -> dict[str, float]:
        """The rooms in line for `lock`, on whichever node of a Cluster has the line."""
        for node in nodes_of(self._server.client):
            with suppress(AskError):  # the node does not have the lock, or does not have it yet
                return rooms_of(node, lock)
        return {}

    def release(self, row: Row) -> bool:
        """Release the key of `row`, unless its holder has changed by now.

        As after every release, the first in line is called. A run that held the key goes on; its keeper notices the
        loss at the next renewal.

        Returns:
            Whether the key was released.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        demand = Demand(row.part.lock, MAX_CAPACITY) if row.part.kind == "permit" else Demand(row.part.key)
        return self._server.store.release(demand, row.token, exactly=True)

    def held(self, row: Row, now: datetime) -> str:
        """A sentence about the holder in `row`: who it is, and whether its process is alive."""
        plan = plan_of(self._app, row.token.task) if row.token.attempt is not None else None
        return held(row, now, None if plan is None else plan.options)

    def to_json(self, row: Row) -> dict[str, Any]:
        """What ``--json`` prints for `row`."""
        return row.info.to_json(scope_of(self._app, row.token.task), row.waiting)

    def _others(self, lock: str, first: Row | None) -> Iterator[Row]:
        """The holders of the lock's permits, from the second on."""
        whole = self._server.store.look(Demand(lock, MAX_CAPACITY))
        if whole is None or len(whole.holders) == (first is not None):
            return
        names = map(keys_of(lock).permit, range(2, MAX_CAPACITY + 1))
        rows = (self.look(LockPart(name, lock, "permit")) for name in names)
        yield from (row for row in rows if row is not None)


def scope_of(app: Celery, task: str | None) -> str | None:
    """The `lock_scope` of a task; None if the app has no locked task with this name."""
    plan = plan_of(app, task)
    return None if plan is None else str(plan.options.scope)


def plan_of(app: Celery, task: str | None) -> LockPlan | None:
    """The `LockPlan` of a task; None if the app has no locked task with this name."""
    return getattr(app.tasks.get(task), "lock_plan", None) if task else None


def oldest_first(row: Row) -> tuple[datetime, str]:
    """The sort key of rows: the holder that has held its key the longest comes first."""
    return row.token.since or _NEVER, row.part.key


def _literal(text: str) -> str:
    """`text` as a pattern that matches only itself."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)


def matcher(pattern: str) -> Callable[[str], object]:
    """A function that matches keys against `pattern` as Redis' SCAN does."""
    # fnmatch escapes with brackets instead of a backslash, and negates a set with "!" instead of "^".
    like = re.sub(r"\\(.)|\[\^", lambda found: f"[{found[1]}]" if found[1] else "[!", pattern, flags=re.DOTALL)
    return re.compile(fnmatch.translate(like)).match
