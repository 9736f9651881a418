"""The baseline of all benchmarks: two bare EVALSHA calls, with the scripts and arguments that a lock sends.

And the least that such a pair can cost if the client does not wait for the second reply.
"""

from __future__ import annotations

from typing import Any

import redis

from celery_redislock.connection.connections import Connection, Late
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Command, Note
from celery_redislock.protocol.tokens import Token

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
    acquire = _arguments(client, commands.acquire(Demand(key), token, lease))
    release = _arguments(client, commands.release(Demand(key), token.owner, None if note is None else Note(note)))

    def cycle() -> None:
        granted, released = client.evalsha(*acquire), client.evalsha(*release)
        if (granted, released) != (b"granted", b"released"):
            raise RuntimeError(f"{key} was contended: acquire {granted}, release {released}")

    return cycle


def with_late_answer(client: redis.Redis, key: str, token: Token, lease: float, note: str) -> Case:
    """As `two_calls`, but the release's answer is read together with that of the next acquire."""
    acquire = commands.acquire(Demand(key), token, lease)
    release = commands.release(Demand(key), token.owner, Note(note))
    for command in (acquire, release):
        client.script_load(command.script.text)
    connection = Connection(client.client())  # type: ignore[no-untyped-call]
    late = Late(release, _released, _refused, 0.0)

    def cycle() -> None:
        granted = connection.ask(acquire)
        connection.send_late(late)
        if granted != [b"granted"]:
            raise RuntimeError(f"{key} was contended: acquire {granted}")

    return cycle


def _released(was_held: bool) -> None:
    if not was_held:
        raise RuntimeError("the key was lost before its release")


def _refused() -> None:
    raise RuntimeError("the server has refused a release")


def _arguments(client: redis.Redis, command: Command) -> tuple[Any, ...]:
    """The arguments of EVALSHA for `command`, whose script is loaded into the server first."""
    client.script_load(command.script.text)
    return command.script.sha, len(command.keys), *command.keys, *command.values
