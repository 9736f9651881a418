"""Holders: who holds a key, in words; and whether the workers of those who hold it answer. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime

from celery_redislock.hold.term import INTERVAL
from celery_redislock.options import LockOptions

from .scan import Row
from .sentences import Say
from .table import duration, moment

#: A key that was not renewed for so many leases is not renewed any more: its holder does so every third of its lease.
OVERDUE = 0.5


def held(row: Row, now: datetime, options: LockOptions | None = None) -> str:
    """Who holds a key, since when and until when, in a sentence.

    Args:
        row: The key.
        now: The time.
        options: The options of the holder's task: they tell when the key was last renewed. None where they are unknown.
    """
    key, info = row.place.key, row.info
    if info.state != "held":
        return Say.KEPT(key=key, who=info.who, since=moment(info.since, now), ttl=duration(row.ttl or 0.0))
    ends = _ends(row, now, options)
    if info.since is None:
        return Say.FOREIGN(key=key, ends=ends)
    return Say.HELD(key=key, who=info.who, since=moment(info.since, now), ends=ends)


def _ends(row: Row, now: datetime, options: LockOptions | None) -> str:
    """When the key ends, and what that tells of its holder's process."""
    if row.ttl is None:
        return Say.NEVER_ENDS()
    ttl = duration(row.ttl)
    if options is None or row.token.since is None or row.ttl > options.lease:
        return Say.ENDS(ttl=ttl)
    if options.max_hold is not None and (now - row.token.since).total_seconds() > options.max_hold:
        return Say.HELD_TOO_LONG(ttl=ttl)
    ago = options.lease - row.ttl
    if ago > OVERDUE * options.lease:
        return Say.NOT_RENEWED(ago=duration(ago), every=duration(INTERVAL * options.lease), ttl=ttl)
    return Say.RENEWED(ago=duration(ago))


def silent(rows: Iterable[Row], answered: Container[str]) -> list[str]:
    """A line for each worker whose run holds one of the keys, and that has not answered.

    Args:
        rows: Who holds the keys.
        answered: The names of the workers that have answered.
    """
    workers = [row.token.hostname or "" for row in rows if row.token.attempt is not None and row.token.state == "held"]
    return [Say.SILENT(worker=one) for one in dict.fromkeys(workers) if "@" in one and one not in answered]
