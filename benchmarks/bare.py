"""The baseline of all benchmarks: two bare EVALSHA calls, with the scripts and arguments that a lock sends."""

from __future__ import annotations

from typing import Any

import redis

from celery_redislock.server.names import keys_of
from celery_redislock.server.scripts import ACQUIRE, RELEASE

from .timing import Case


def two_calls(client: redis.Redis, key: str, token: str, lease: float, note: str | None = None) -> Case:
    """Acquire and release `key`, and nothing else.

    Args:
        client: Of the same kind as the store's.
        key: The key in Redis.
        token: Begins with its nonce and a space.
        lease: Seconds.
        note: The key of the attempt's note; given by a task's release.
    """
    client.script_load(ACQUIRE.text)
    client.script_load(RELEASE.text)
    nonce = token.split(" ")[0]
    acquire = (ACQUIRE.sha, 1, key, nonce, token, int(lease * 1000))
    names = keys_of(key)
    keys = [key, names.waiters, names.wake, *([] if note is None else [note])]
    release: tuple[Any, ...] = (RELEASE.sha, len(keys), *keys, nonce, "86400000", 0)

    def cycle() -> None:
        granted, released = client.evalsha(*acquire), client.evalsha(*release)
        if not granted == released == 1:
            raise RuntimeError(f"{key} was contended: acquire {granted}, release {released}")

    return cycle
