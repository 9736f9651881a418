"""The baseline of all benchmarks: two bare EVALSHA calls, with the scripts and arguments that a lock sends."""

from __future__ import annotations

from typing import Any

import redis

from celery_redislock.server import commands
from celery_redislock.server.answers import Note
from celery_redislock.server.scripts import Command
from celery_redislock.server.tokens import Token

from .timing import Case


def two_calls(client: redis.Redis, key: str, token: Token, lease: float, note: str | None = None) -> Case:
    """A case that acquires and releases `key`, and does nothing else.

    Args:
        client: A client of the same kind as the one that locks use.
        key: The key in Redis.
        token: The token that the key is to hold.
        lease: Seconds.
        note: The key of the attempt's note, which a task's release names and a `Lock`'s does not.
    """
    acquire = _arguments(client, commands.acquire(key, token.owner, token, lease))
    release = _arguments(client, commands.release(key, token.owner, None if note is None else Note(note)))

    def cycle() -> None:
        granted, released = client.evalsha(*acquire), client.evalsha(*release)
        if not granted == released == 1:
            raise RuntimeError(f"{key} was contended: acquire {granted}, release {released}")

    return cycle


def _arguments(client: redis.Redis, command: Command) -> tuple[Any, ...]:
    """The arguments of EVALSHA for `command`, whose script is loaded into the server first."""
    client.script_load(command.script.text)
    return command.script.sha, len(command.keys), *command.keys, *command.values
