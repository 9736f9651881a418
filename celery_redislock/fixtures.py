"""A pytest fixture for the tests of an app: a real lock server, empty for each test.

To use it, install the extra ``testing``, and put ``pytest_plugins = ["celery_redislock.fixtures"]`` into a
`conftest.py`.
No other module of the package imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from celery import Celery

from .task.binding import REFUSED
from .testing import embedded_server, empty, moved


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let tasks be checked at their first use.

    pytest looks at everything in a plugin or a test module, tasks too, before a fixture gives their app its lock
    server.
    """
    collecting = REFUSED.set({})
    yield
    REFUSED.reset(collecting)


pytest_sessionstart = pytest_collection  # when it looks at the plugins


@pytest.fixture(scope="session")
def _redislock_url() -> Iterator[str]:
    """The URL of a server that runs for the whole session."""
    with embedded_server() as url:
        yield url


@pytest.fixture
def redislock_server(_redislock_url: str) -> Iterator[Callable[[Celery], str]]:
    """An empty lock server: ``redislock_server(app)`` puts the locks of `app` there until the test ends.

    The call returns the server's URL, for workers that the test starts as separate processes. You may call it for
    several apps. After the test, the app's own settings apply again.
    """
    empty(_redislock_url)
    with ExitStack() as end:

        def use(app: Celery) -> str:
            return end.enter_context(moved(app, _redislock_url))

        yield use
