"""The least that scopes ``run`` and ``job`` can cost: their commands alone, sent as LockedTask sends them.

A run of these tasks has no token of its own, is not renewed, and keeps its key if its process dies. What
LockedTask costs beyond them is what its promises cost in Python.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery import Task

from celery_redislock.connection.connect import connect
from celery_redislock.connection.connections import Connections, Late
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import Command, Note
from celery_redislock.protocol.tokens import Attempt

LEASE = 30.0
#: The same in the publisher and in the child: the run finds its own reservation.
TOKEN = tokens.mint("f" * 22, Attempt("floor", 0, 0), tokens.origin("celery@benchmarks", "floor"))


class BareRun(Task):  # type: ignore[type-arg]
    """One command before the body, whose answer is waited for, and one after it, whose answer is read late."""

    abstract = True

    @cached_property
    def connections(self) -> Connections:
        """Those to the lock server."""
        return Connections(connect(self.app.conf.redislock_url, {}))

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Acquire the key."""
        self.reserve(args)

    def after_return(self, status: Any, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Release the key."""
        key = _key(self.name, args)
        note = Note(keys_of(key).note(Attempt(task_id, 0, 0)))
        self.send_late(commands.release(Demand(key), TOKEN.owner, note))

    def reserve(self, args: Any) -> None:
        """Acquire the key, and wait for the answer."""
        self.connections.ask(commands.acquire(Demand(_key(self.name, args)), TOKEN, LEASE))

    def send_late(self, command: Command) -> None:
        """Send a command without waiting for its reply."""
        self.connections.send_late(Late(command, _succeeded, _refused, 0.0))


class BareJob(BareRun):
    """The same; and a publish reserves the key, and then lengthens the reservation."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Reserve the key, and send the message."""
        self.reserve(args)
        result = super().apply_async(args, kwargs, **options)
        self.send_late(commands.renew([(_key(self.name, args), TOKEN, LEASE)]))
        return result


def _key(name: str, args: Any) -> str:
    return f"redislock:{{{name}:{args[0]}}}"


def _succeeded(was_held: bool) -> None:
    if not was_held:
        raise RuntimeError("a key was lost")


def _refused() -> None:
    raise RuntimeError("the server has refused a command")
