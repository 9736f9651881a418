"""The web page with 10,000 locks and viewers: how long each of its pages takes from the snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from statistics import median, quantiles
from urllib.parse import urlencode

import redis
from celery import Celery
from rich.table import Table

from .cli import fill
from .findings import Findings
from .server import free_port, valkey

LOCKS, REQUESTS, BOUND = 10_000, 100, 150.0
KEY = f"redislock:{{shop.tasks.export:{7:032x}}}"
PAGES = {
    "keys": "/",
    "keys, the last page by key": "/?sort=key&page=200",
    "keys, a search": "/?q=0000042",
    "one key": f"/key?{urlencode({'key': KEY})}",
    "waiting": "/waiting",
    "time line": "/timeline",
}
#: The app of the page, which `celery -A benchmarks.web` finds.
app = Celery("shop", broker=os.environ.get("BENCHMARK_LOCKS", "memory://"), set_as_current=False)


def main(findings: Findings) -> None:
    findings.chapter("The web page")
    table = Table(
        title=f"web: {LOCKS:,} locks, each page {REQUESTS} times while snapshots are taken", title_justify="left"
    )
    for column in ("page", "median ms", "p95 ms", f"p95 at most {BOUND:g} ms"):
        table.add_column(column, justify="left" if column == "page" else "right")
    with valkey() as url, redis.Redis.from_url(url) as client:
        fill(client, LOCKS)
        with _page(url) as port:
            times = {name: _times(port, path) for name, path in PAGES.items()}
    for name, taken in times.items():
        slowest = quantiles(taken, n=20)[-1]
        verdict = findings.judge(f"web page with {LOCKS:,} locks, p95: {name}", slowest, BOUND, " ms")
        table.add_row(name, f"{median(taken):.1f}", f"{slowest:.1f}", verdict)
    findings.show(table)


@contextmanager
def _page(url: str) -> Iterator[int]:
    """The page's port, once it has a snapshot; someone looks all the time."""
    port = free_port()
    program = [sys.executable, "-m", "celery_redislock", "-A", "benchmarks.web", "web", "--port", str(port)]
    with subprocess.Popen(program, env={**os.environ, "BENCHMARK_LOCKS": url}, stderr=subprocess.DEVNULL) as process:
        try:
            while f"{LOCKS} keys" not in _get(port, "/"):
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()


def _times(port: int, path: str) -> list[float]:
    """How long the page took each time, in milliseconds."""
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        assert "</html>" in _get(port, path)
        times.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.02)  # so that some snapshots are taken meanwhile
    return times


def _get(port: int, path: str) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except ConnectionRefusedError:  # it is starting
        return ""
    finally:
        connection.close()
