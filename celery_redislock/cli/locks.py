"""Locks: all that the command line asks of the locks of one app, and the one thing that it does to them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from redis.exceptions import AskError

from celery_redislock.app import keyprefix_of, server_of, settings_of
from celery_redislock.connection.connect import address
from celery_redislock.info import shown
from celery_redislock.options import resolve_settings
from celery_redislock.protocol.names import MAX_LIMIT, LockPart, keys_of, limited
from celery_redislock.protocol.tokens import known_as

from .scan import Row, nodes_of, rooms_of, scan
from .sentences import held
from .workers import Counts

if TYPE_CHECKING:
    from celery import Celery

    from celery_redislock.task.plan import LockPlan

_NEVER = datetime.max.replace(tzinfo=UTC)


class Locks:
    """The locks of an app, as its lock server knows them.

    Args:
        app: The app; its tasks are loaded.

    Attributes:
        prefix: What the keys of its tasks' locks begin with.

    Raises:
        LockConfigError: The app has no lock server.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._server = server_of(app)
        self.prefix = f"{keyprefix_of(app)}{resolve_settings(settings_of(app)).prefix}:{{"

    @property
    def server(self) -> str:
        """Which server it asks, without a password."""
        return address(self._server.client)

    @property
    def where(self) -> str:
        """Which server it asks, without a password, and what the keys begin with."""
        return f"{self.server}, with the prefix {shown(self.prefix.removesuffix(':{'))!r}"

    def all(
        self, match: str | None = None, task: str | None = None, counts: Counts | None = None, *, foreign: bool = False
    ) -> Iterator[Row]:
        """Who holds locks, in no order; and the locks that nobody holds while messages wait for them.

        Args:
            match: A pattern of keys, as Redis' SCAN takes it; None for all locks of the app's tasks.
            task: The name of the holder's task; of a lock that nobody holds, a task that waits. None for any.
            counts: The messages that wait. None counts one for each process in line.
            foreign: Whether to list the keys that are not `ours` too: anything may be stored there.

        Raises:
            RedisError: Redis did not answer or refused.
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
        """Whether a key is one of this package's: it begins with the app's prefix, or holds a token."""
        return row.part.key.startswith(self.prefix) or row.token.since is not None

    def of(self, key: str, counts: Counts | None = None) -> list[Row]:
        """Who holds the lock `key`: several where it has a limit; and for whom the place in its queue is kept.

        With `counts`, a lock that nobody holds while messages wait for it has a row too.

        Raises:
            LockUnavailable: Redis did not answer or refused.
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
        """Who holds one key; None where it is free.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        found = self._server.store.look(part.key)
        return found and Row(part, found.holder, found.ttl, self._rooms(part.lock))

    def _rooms(self, lock: str) -> dict[str, float]:
        """The rooms that stand in line for `lock`, wherever in a Cluster that is."""
        for node in nodes_of(self._server.client):
            with suppress(AskError):  # the node is not, or not yet, the lock's
                return rooms_of(node, lock)
        return {}

    def release(self, row: Row) -> bool:
        """Release what `row` shows; whoever holds the key otherwise by now keeps it.

        The first in line is called, as after every release. A run that held the key goes on, and its keeper tells it of
        the loss at its next renewal.

        Returns:
            Whether it was released.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        key = limited(row.part.lock, MAX_LIMIT) if row.part.kind == "permit" else row.part.key
        return self._server.store.release(key, row.token, exactly=True)

    def held(self, row: Row, now: datetime) -> str:
        """Who holds what `row` shows, and whether that one is alive, as a sentence."""
        plan = plan_of(self._app, row.token.task) if row.token.attempt is not None else None
        return held(row, now, None if plan is None else plan.options)

    def scope_of(self, row: Row) -> str | None:
        """The `lock_scope` of the holder's task; None where the app has no such task, or the holder is none."""
        return scope_of(self._app, row.token.task)

    def to_json(self, row: Row) -> dict[str, Any]:
        """What JSON tells of `row`."""
        return row.info.to_json(self.scope_of(row), row.waiting)

    def _others(self, lock: str, first: Row | None) -> Iterator[Row]:
        """Who holds the permits of the lock, but for the first."""
        whole = self._server.store.look(limited(lock, MAX_LIMIT))
        if whole is None or len(whole.holders) == (first is not None):
            return
        names = map(keys_of(lock).permit, range(2, MAX_LIMIT + 1))
        rows = (self.look(LockPart(name, lock, "permit")) for name in names)
        yield from (row for row in rows if row is not None)


def scope_of(app: Celery, task: str | None) -> str | None:
    """The `lock_scope` of a task; None where the app has no locked task of that name."""
    plan = plan_of(app, task)
    return None if plan is None else str(plan.options.scope)


def plan_of(app: Celery, task: str | None) -> LockPlan | None:
    """The lock of a task; None where the app has no locked task of that name."""
    return getattr(app.tasks.get(task), "lock_plan", None) if task else None


def oldest_first(row: Row) -> tuple[datetime, str]:
    """The order in which rows are shown: who has held its key for longest comes first."""
    return row.token.since or _NEVER, row.part.key


def _literal(text: str) -> str:
    """`text` as a pattern that matches nothing else."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)


def matcher(pattern: str) -> Callable[[str], object]:
    """Whether a key matches `pattern`, as Redis' SCAN matches it."""
    # fnmatch has brackets instead of the backslash, and "!" in them instead of "^".
    like = re.sub(r"\\(.)|\[\^", lambda found: f"[{found[1]}]" if found[1] else "[!", pattern, flags=re.DOTALL)
    return re.compile(fnmatch.translate(like)).match
