"""The web page on real servers and workers, in headless Chromium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest
from celery import Celery

from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import keys_of
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger
from tests.lab.servers import Valkey, missing, need, wait_until
from tests.lab.web import page as serve
from tests.lab.workers import Worker, kept, waiting_in, worker

need("playwright")
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright  # noqa: E402

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser. While it is there, this thread has a running event loop, which other modules' tests must not meet."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        missing("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Makes a visitor: ``context(color_scheme="dark")``. An error on its console fails the test."""
    with ExitStack() as stack:
        said: list[str] = []

        def make(**options: Any) -> BrowserContext:
            made = browser.new_context(**options)
            stack.callback(made.close)
            made.set_default_timeout(15_000)
            made.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
            made.on("weberror", lambda error: said.append(str(error.error)))
            made.on("dialog", lambda dialog: said.append(dialog.message))
            return made

        yield make
    assert [text for text in said if "status of" not in text and "ERR_" not in text] == []


@pytest.fixture
def visit(context: Callable[..., BrowserContext]) -> Callable[..., Page]:
    """Opens a page: ``visit(url)``, with options for its visitor."""

    def open_(url: str, **options: Any) -> Page:
        page = context(**options).new_page()
        page.goto(url)
        return page

    return open_


class Scene:
    """A broker, a lock server with many locks, an app and its workers."""

    def __init__(self, folder: Path, broker: Valkey, locks: Valkey, stack: ExitStack) -> None:
        self.folder, self.locks, self._stack = folder, locks, stack
        settings = {"worker_prefetch_multiplier": 100}
        urls = broker.celery_url(0), broker.celery_url(1), locks.url()
        self.config = Config(*urls, str(folder / "ledger"), settings=settings, tasks=["once", "work", "debounced_long"])
        self.ledger = Ledger(folder / "ledger")
        self.app: Celery = make_app(self.config)
        self.workers: list[Worker] = []

    def task(self, name: str) -> Any:
        return self.app.tasks[f"lab.{name}"]

    def start_worker(self, *options: str) -> Worker:
        self.workers.append(self._stack.enter_context(worker(self.config, self.folder, 4, *options)))
        return self.workers[-1]

    def serve(self, **options: Any) -> str:
        return self._stack.enter_context(serve(self.app, **options))

    def hold(self, key: str) -> str:
        """The id of a task that runs, and holds the key until its worker is killed."""
        task_id = str(self.task("work").delay(key, f"holds {key}", 300.0).id)
        wait_until(lambda: f"holds {key}" in self.ledger.items(), f"{key} is held")
        return task_id

    def gather(self, number: int) -> tuple[str, list[str]]:
        """A key that a run holds, and the ids of the messages that wait for it in two workers, in their order."""
        self.hold("crowd")
        for one in range(number):
            self.task("work").delay("crowd", str(one))
        wait_until(lambda: waiting_in(*self.workers) >= number, "they wait", 60)  # asking the workers would keep them
        wait_until(lambda: kept(self.app, 2) == number, "the main processes keep them")
        replies = self.app.control.broadcast("redislock_waiting", reply=True, limit=2, timeout=5)
        told = sorted((one["rank"], one["id"]) for reply in replies for found in reply.values() for one in found)
        return self.task("work").lock_for("crowd").name, [task_id for _, task_id in told]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("web")
    with ExitStack() as stack:
        servers = []
        for name in ("broker", "locks"):
            (folder / name).mkdir()
            servers.append(stack.enter_context(Valkey(folder / name).serve()))
        made = Scene(folder, *servers, stack)
        stack.callback(made.app.close)
        yield made


def hold(locks: Valkey, key: str | bytes, task_id: str, host: str = "w9@lab", task: str = "lab.gone") -> None:
    """Let a task hold a key, as its run would."""
    attempt = tokens.Attempt(task_id, 0, 0, tokens.mint_publish())
    token = tokens.mint(tokens.mint_nonce(), attempt, tokens.origin(host, task))
    locks.client.set(key, token.value, px=3_600_000)


def fill(locks: Valkey, number: int) -> None:
    """Let so many tasks hold a key each."""
    origin = tokens.origin("a-publisher", "lab.filled")
    with locks.client.pipeline(transaction=False) as pipe:
        for one in range(number):
            attempt = tokens.Attempt(str(UUID(int=one << 64 | one)), 0, 0, tokens.mint_publish())
            key = keys_of(f"redislock:{{lab.filled:{one:06}}}").lock
            pipe.set(key, tokens.mint(tokens.mint_nonce(), attempt, origin).value, px=3_600_000)
        pipe.execute()


def number_of(page: Page) -> int:
    """The number of the snapshot that a page shows."""
    return int(page.get_attribute("main", "data-number") or 0)


def see(page: Page, condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Wait until a page shows something. Unlike `wait_until`, this lets the page's events in."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"the page does not show: {what}\n{page.inner_text('main')}"
        page.wait_for_timeout(50)


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"main tbody td:nth-child({number})").all_inner_texts()


def address_of(url: str, path: str, /, **query: str) -> str:
    return f"{url}{path}?{urlencode(query)}"
