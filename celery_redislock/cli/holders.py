"""Holders: who holds a key, in words; and whether the workers of those who hold it answer. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime

from celery_redislock.shown import shown

from .scan import Row
from .table import duration, moment

#: Of a worker that has not answered.
SILENT = "does NOT ANSWER: it is too busy, cut off, or dead"


def held(row: Row, now: datetime) -> str:
    """Who holds a key, since when and until when, in words."""
    key, info = shown(row.place.key), row.info
    if info.state != "held":
        return f"{key} is kept for {info.who}, since {moment(info.since, now)}, for {duration(row.ttl or 0.0)} yet"
    ends = "it never ends by itself" if row.ttl is None else f"it ends in {duration(row.ttl)} unless it is renewed"
    if info.since is None:
        return f"{key} is held by a lock of another library, or of a `Lock` with a token of its own; {ends}"
    return f"{key} is held by {info.who}, since {moment(info.since, now)}; {ends}"


def silent(rows: Iterable[Row], answered: Container[str]) -> list[str]:
    """A line for each worker whose run holds one of the keys, and that has not answered.

    Args:
        rows: Who holds the keys.
        answered: The names of the workers that have answered.
    """
    workers = [
        shown(row.token.hostname or "") for row in rows if row.token.attempt is not None and row.token.state == "held"
    ]
    return [
        f"Its worker {worker} {SILENT}. If it is dead, nobody renews the key, and it is free when that time is over."
        for worker in dict.fromkeys(workers)
        if "@" in worker and worker not in answered
    ]
