"""The app of docs/migrating.md, before and after the switch, in the test's process and in every worker.

A worker is ``celery -A tests.lab.moving worker``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.app import Config
from tests.lab.before import define_more, define_once, define_singleton
from tests.lab.gate import spend
from tests.lab.ledger import Ledger
from tests.lab.pages import python_of
from tests.lab.readiness import announce
from tests.lab.wake_ups import SETTINGS
from tests.lab.workers import ROOT

PAGE = ROOT / "docs" / "migrating.md"


class Alarm:
    """Lets the bodies of tasks sleep until it rings."""

    def __init__(self, config: Config) -> None:
        self._file = Path(f"{config.ledger}.alarm")

    def ring(self) -> None:
        self._file.touch()

    def stop(self) -> None:
        self._file.unlink()

    def sleep(self, seconds: float) -> None:
        """Sleep until the alarm rings, or for so many seconds; but for no less than half a minute.

        A run that is to be met must not end while the test is on its way.
        """
        end = time.monotonic() + max(seconds, 30)
        while not self._file.exists() and time.monotonic() < end:
            time.sleep(0.01)


def make_moving_app(config: Config) -> Celery:
    """The page's own app, with the tasks from before the switch as well, on the test's servers."""
    ledger = Ledger(Path(config.ledger))
    page = load_page()
    app: Celery = page["app"]

    def sleep(seconds: float) -> None:
        with ledger.run(app.current_worker_task.name, seconds):
            Alarm(config).sleep(seconds)

    page["sleep"] = sleep
    configure(app, config)
    define_once(app, sleep)
    define_singleton(app, sleep)
    define_more(app, "shop", LockedTask, lock_args=["b"])
    app.conf.lab_page = page
    return app


def load_page(replace: Callable[[str], str] = str) -> dict[str, Any]:
    """What the page's Python defines, with its tasks in the module ``shop``."""
    page: dict[str, Any] = {"__name__": "shop", "flask_app": _Flask()}
    text = replace(python_of(PAGE)).replace("@app.task(", "@app.task(shared=False, ")  # else later apps get them too
    exec(compile(text, str(PAGE), "exec"), page)  # noqa: S102 - the page is ours
    return page


def make_step_app(config: Config, plugin: str, step: str) -> Celery:
    """The app of one step of the switch, with one task: ``shop.sync(key, seconds)``.

    Args:
        config: Names the test's servers.
        plugin: ``once`` or ``singleton``.
        step: Its base class: ``Before``, ``Both``, ``Moving`` or ``LockedTask``.
    """
    old = "QueueOnce" if plugin == "once" else "Singleton"
    page = load_page(lambda text: text.replace("celery_once", f"celery_{plugin}").replace("QueueOnce", old))
    app = Celery("shop", set_as_current=False)
    configure(app, config)
    app.conf.redislock_scope = "job"  # as on the page
    ledger = Ledger(Path(config.ledger))
    options = {"once": {"keys": ["key"]}} if plugin == "once" else {"unique_on": ["key"]}
    base = page[old if step == "Before" else step]

    @app.task(base=base, bind=True, name="shop.sync", lock_args=["key"], shared=False, **options)
    def sync(self: Any, key: str, seconds: float | str = 0.0) -> str:
        with ledger.run(key, self.request.id):
            spend(seconds)
        return key

    return app


def configure(app: Celery, config: Config) -> None:
    """Let the app use the test's servers."""
    app.conf.update(
        **SETTINGS,
        broker_url=config.broker,
        result_backend=config.backend,
        redislock_url=config.locks,
        redislock_client_options={"socket_timeout": 0.5, "socket_connect_timeout": 0.5},
        ONCE={
            "backend": "celery_once.backends.Redis",
            "settings": {"url": config.locks.replace("unix:", "redis+socket:")},
        },
        singleton_backend_url=config.locks,
        task_default_queue=config.queue,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        lab_context=_Flask().app_context,
    )
    app.conf.update(config.settings)


class _Flask:
    """As much of Flask's app as the examples use."""

    @contextmanager
    def app_context(self):
        yield


if "LAB_CONFIG" in os.environ:  # a worker
    config = Config.from_env()
    step = config.settings.get("lab_step")
    app = make_step_app(config, *step) if step else make_moving_app(config)
    announce()
