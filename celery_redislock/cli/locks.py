"""Locks: all that the command line asks of the locks of one app, and the one thing that it does to them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery_redislock.app import keyprefix_of, server_of, settings_of
from celery_redislock.options import MAX_LIMIT, resolve_settings
from celery_redislock.server.connect import address
from celery_redislock.server.names import Place, keys_of, limited
from celery_redislock.server.tokens import known_as
from celery_redislock.shown import shown

from .holders import held
from .scan import Row, nodes_of, scan

if TYPE_CHECKING:
    from celery import Celery

    from celery_redislock.task.plan import LockPlan

_NEVER = datetime.max.replace(tzinfo=UTC)


class Locks:
    """The locks of an app, as its lock server knows them.

    Args:
        app: The app; its tasks are loaded.

    Raises:
        LockConfigError: The app has no lock server.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._server = server_of(app)
        self._prefix = f"{keyprefix_of(app)}{resolve_settings(settings_of(app)).prefix}:{{"

    @property
    def server(self) -> str:
        """Which server it asks, without a password."""
        return address(self._server.client)

    @property
    def where(self) -> str:
        """Which server it asks, without a password, and what the keys begin with."""
        return f"{self.server}, with the prefix {shown(self._prefix.removesuffix(':{'))!r}"

    def all(self, match: str | None = None, task: str | None = None) -> Iterator[Row]:
        """Who holds locks, in no order.

        Args:
            match: A pattern of keys, as Redis' SCAN takes it; None for all locks of the app's tasks.
            task: The name of the holders' task; None for any.

        Raises:
            RedisError: Redis did not answer or refused.
        """
        pattern = _literal(self._prefix) + "*" if match is None else match
        name, seen = task and known_as(task), set()
        for node in nodes_of(self._server.client):
            for row in scan(node, pattern, self._prefix, self.look):
                if row.place.key not in seen and (name is None or row.token.task == name):
                    seen.add(row.place.key)
                    yield row

    def of(self, key: str) -> list[Row]:
        """Who holds the lock `key`: several where it has a limit; and for whom the place in its queue is kept.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        place = Place.of(key)
        if place is None:
            return []
        names = keys_of(place.lock)
        first, queued = self.look(Place(names.lock, names.lock)), self.look(Place(names.queued, place.lock, "queued"))
        return [row for row in (first, *self._others(place.lock, first), queued) if row is not None]

    def look(self, place: Place) -> Row | None:
        """Who holds one key; None where it is free.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        found = self._server.store.look(place.key)
        if found is None:
            return None
        waiting = found.waiting
        if place.part == "slot":  # the line is that of the whole lock
            whole = self._server.store.look(limited(place.lock, MAX_LIMIT))
            waiting = 0 if whole is None else whole.waiting
        return Row(place, found.holder, found.ttl, waiting)

    def release(self, row: Row) -> bool:
        """Release what `row` shows; whoever holds the key otherwise by now keeps it.

        The first in line is called, as after every release. A run that held the key goes on, and its keeper tells it of
        the loss at its next renewal.

        Returns:
            Whether it was released.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        place = row.place
        key = limited(place.lock, MAX_LIMIT) if place.part == "slot" else place.key
        return self._server.store.release(key, row.token, exactly=True)

    def held(self, row: Row, now: datetime) -> str:
        """Who holds what `row` shows, and whether that one is alive, as a sentence."""
        plan = plan_of(self._app, row.token.task) if row.token.attempt is not None else None
        return held(row, now, None if plan is None else plan.options)

    def scope_of(self, row: Row) -> str | None:
        """The `lock_scope` of the holder's task; None where the app has no such task, or the holder is none."""
        return scope_of(self._app, row.token.task)

    def told(self, row: Row) -> dict[str, Any]:
        """What JSON tells of `row`."""
        return row.info.told(self.scope_of(row))

    def _others(self, lock: str, first: Row | None) -> Iterator[Row]:
        """Who holds the slots of the lock, but for the first."""
        whole = self._server.store.look(limited(lock, MAX_LIMIT))
        if whole is None or len(whole.holders) == (first is not None):
            return
        for number in range(2, MAX_LIMIT + 1):
            key = keys_of(lock).slot(number)
            found = self._server.store.look(key)
            if found is not None:
                yield Row(Place(key, lock, "slot"), found.holder, found.ttl, whole.waiting)


def scope_of(app: Celery, task: str | None) -> str | None:
    """The `lock_scope` of a task; None where the app has no locked task of that name."""
    plan = plan_of(app, task)
    return None if plan is None else str(plan.options.scope)


def plan_of(app: Celery, task: str | None) -> LockPlan | None:
    """The lock of a task; None where the app has no locked task of that name."""
    return getattr(app.tasks.get(task), "lock_plan", None) if task else None


def oldest_first(row: Row) -> tuple[datetime, str]:
    """The order in which rows are shown: who has held its key for longest comes first."""
    return row.token.since or _NEVER, row.place.key


def _literal(text: str) -> str:
    """`text` as a pattern that matches nothing else."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)
