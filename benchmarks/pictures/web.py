"""Take the pictures of docs/web.md, of a small shop with two workers: ``python -m benchmarks.pictures.web``.

They are not drawn from a record, so they differ a little each time. It takes two minutes, and the system's Chromium.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlencode
from urllib.request import urlopen

from celery import Celery

from benchmarks.pictures.stage import ROOT, wait_until
from benchmarks.server import free_port, valkey
from celery_redislock import LockedTask

URL = os.environ.get("PICTURES_SHOP", "redis://localhost:6379")
app = Celery("shop", broker=URL, backend=URL)
app.conf.worker_prefetch_multiplier = 20

#: How long the shop is open, and the size of a picture.
SECONDS, SIZE = 70.0, {"width": 1000, "height": 540}
THEMES = ("light", "dark")


@app.task(base=LockedTask, name="shop.refresh", lock_key="stock:{sku}", lock_on_conflict="wait")
def refresh(sku: str, seconds: float) -> None:
    """One for each article."""
    time.sleep(seconds)


@app.task(base=LockedTask, name="shop.mail", lock_key="mail", lock_limit=2, lock_on_conflict="wait")
def mail(seconds: float) -> None:
    """Two at a time."""
    time.sleep(seconds)


@app.task(base=LockedTask, name="shop.report", lock_key="report:{day}", lock_scope="job", lock_cooldown=600)
def report(day: str) -> None:
    """One for each day."""
    time.sleep(3.0)


def main() -> None:
    """Open the shop, and take the pictures."""
    with valkey() as url, ExitStack() as stack:
        os.environ["PICTURES_SHOP"] = url
        app.conf.update(broker_url=url, result_backend=url)
        port = free_port()
        for name in ("w1@shop-a", "w2@shop-b"):
            stack.enter_context(_program("celery", "worker", "-E", "-c", "4", "-n", name, "-l", "WARNING"))
        stack.enter_context(_program("celery_redislock", "web", "--port", str(port)))
        wait_until(lambda: _answers(port), "the page answers, and hears events")
        wait_until(lambda: len(app.control.ping(timeout=0.5) or ()) == 2, "the workers answer")
        closes, waiting = threading.Event(), list[str]()
        threading.Thread(target=_trade, args=(closes, waiting)).start()
        try:
            time.sleep(SECONDS)
            _take(f"http://127.0.0.1:{port}", waiting[-1])
        finally:
            closes.set()


@contextmanager
def _program(module: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-W", "ignore", "-m", module, "-A", "benchmarks.pictures.web", *arguments]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/"):
        return True
    return False


def _trade(closes: threading.Event, waiting: list[str]) -> None:
    """Let the shop do its work until it closes; note the ids of messages that wait for a run that hangs."""
    some, number = random.Random(1), 0
    refresh.delay("Z9", 600.0)
    while not closes.wait(some.uniform(1.5, 2.5)):
        number += 1
        refresh.delay(some.choice(["A1", "B2", "C3"]), some.uniform(1.0, 4.0))
        mail.delay(some.uniform(1.0, 5.0))
        if number % 6 == 1:
            waiting.append(str(refresh.delay("Z9", 1.0).id))
        if number % 9 == 1:
            report.delay(["monday", "tuesday", "wednesday", "thursday"][number // 9 % 4])


def _take(url: str, waiting: str) -> None:
    from playwright.sync_api import sync_playwright

    pages = {
        "web-keys": "/?sort=waiting",
        "web-task": f"/task?{urlencode({'id': waiting})}",
        "web-timeline": "/timeline?minutes=1",
    }
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, path in pages.items():
            shots = []
            for theme in THEMES:
                page = browser.new_page(viewport=SIZE, color_scheme=theme)  # type: ignore[arg-type]
                page.goto(url + path)
                shots.append(page.screenshot())
                height = page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
                page.close()
            (ROOT / "docs" / "pictures" / f"{name}.svg").write_text(_both(shots, min(SIZE["height"], int(height))))
        browser.close()


def _both(shots: list[bytes], height: int) -> str:
    """One picture that follows the reader's theme, as those that are drawn do."""
    images = "".join(
        f'<image class="{theme}" width="{SIZE["width"]}" height="{SIZE["height"]}"'
        f' href="data:image/png;base64,{b64encode(shot).decode()}"/>\n'
        for theme, shot in zip(THEMES, shots, strict=True)
    )
    dark = ".dark { display: inline } .light { display: none }"
    style = f".dark {{ display: none }} @media (prefers-color-scheme: dark) {{ {dark} }}"
    box = f"0 0 {SIZE['width']} {height}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n<style>{style}</style>\n{images}</svg>\n'


if __name__ == "__main__":
    main()
