"""What Prometheus sees of real workers, whose children count in files of prometheus_client's multi-process mode."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from celery.exceptions import TaskRevokedError
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.servers import free_port, wait_until
from tests.lab.workers import kept

CHILDREN = 50


@pytest.fixture
def folder(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the workers of the test count."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    config.settings["lab_metrics"] = True
    return folder


@pytest.fixture
def scrape(folder: Path) -> Callable[..., float]:
    """What a scrape shows now: ``scrape("acquired_total", task="lab.work")``; 0.0 where there is no such sample."""

    def look(name: str, **labels: str) -> float:
        full = f"celery_redislock_{name}"
        return sum(one.value for one in samples(folder) if (one.name, one.labels) == (full, labels))

    return look


def samples(folder: Path) -> list[Any]:
    """What a scrape shows. A file that was just made is empty, and prometheus_client then fails: it is tried again."""
    while True:
        with suppress(struct.error):
            registry = CollectorRegistry()
            MultiProcessCollector(registry, str(folder))
            return [sample for metric in registry.collect() for sample in metric.samples]


def seen(scrape: Callable[..., float], expected: Mapping[str, float], **labels: str) -> None:
    """Wait until a scrape shows what is expected: a child counts its release after its result is stored."""

    def now() -> dict[str, float]:
        return {name: scrape(name, **labels) for name in expected}

    wait_until(lambda: now() == expected, f"{expected} are counted")


def test_totals_are_exact_over_fifty_recycled_children_whose_files_do_not_pile_up(
    config, tasks, start_worker, ledger, folder, scrape
):
    config.settings["worker_max_tasks_per_child"] = 1
    start_worker(2)
    results = [tasks.work.delay(number, number) for number in range(CHILDREN)]
    totals = []
    while not all(result.ready() for result in results):
        totals.append(scrape("acquired_total", task="lab.work"))
    assert totals == sorted(totals), "a counter never falls, whoever ends while it is read"
    seen(scrape, {"acquired_total": CHILDREN, "hold_seconds_count": CHILDREN}, task="lab.work")
    assert len({run.pid for run in ledger.runs()}) == CHILDREN
    kinds = sorted(file.name.split("_")[0] for file in folder.iterdir())
    assert kinds == ["counter"] * 2 + ["histogram"] * 2, "two for each child of the pool"


def test_a_killed_child_leaves_what_it_has_counted_and_its_successor_counts_on(tasks, start_worker, running, scrape):
    worker = start_worker(1, "--prefetch-multiplier", "1")
    result = tasks.work.delay("k", "killed", 60)
    running("killed")
    worker.kill_child()
    wait_until(result.ready, "Celery has noticed")
    assert tasks.work.delay("k", "next").get(timeout=20) == "next"
    seen(scrape, {"acquired_total": 2, "hold_seconds_count": 1}, task="lab.work")


def test_a_conflict_is_counted_by_its_policy_and_a_wait_by_its_length(
    tasks, app, start_worker, scrape, running, gate, tmp_path
):
    start_worker(2)
    tasks.until.delay("a", 1, str(tmp_path / "a"))
    running("1")
    with pytest.raises(TaskRevokedError):
        tasks.until.delay("a", 2, str(tmp_path / "a")).get(timeout=10)
    (tmp_path / "a").touch()
    assert scrape("conflicts_total", task="lab.until", policy="skip") == 1
    assert scrape("wait_seconds_count", task="lab.until") == 0, "who does not wait is not among those who waited"
    first = tasks.work.delay("b", "first", gate)
    running("first")
    began = time.monotonic()
    second = tasks.work.delay("b", 2)
    wait_until(lambda: kept(app) == 1, "the second waits")
    held = time.monotonic() - began
    gate.open()
    assert [first.get(timeout=10), second.get(timeout=10)] == ["first", 2]
    seen(scrape, {"conflicts_total": 1}, task="lab.work", policy="wait")
    seen(scrape, {"wait_seconds_count": 1, "acquired_total": 2}, task="lab.work")
    assert 0 < scrape("wait_seconds_sum", task="lab.work") < 60
    seen(scrape, {"hold_seconds_count": 2}, task="lab.work")
    assert scrape("hold_seconds_sum", task="lab.work") >= held


def test_a_loss_is_counted_under_a_fixed_word(tasks, start_worker, scrape, ledger, locks):
    start_worker(1)
    tasks.aborted.delay("k")
    wait_until(ledger.runs, "it runs")
    locks.client.delete(tasks.aborted.lock_for("k").name)
    seen(scrape, {"lost_total": 1}, task="lab.aborted", reason="gone")


def test_what_cannot_ask_is_counted(tasks, start_worker, scrape, lock_proxy):
    start_worker(1)
    lock_proxy.refuse()
    result = tasks.work.delay("k", "item")
    wait_until(lambda: scrape("unavailable_total", task="lab.work") >= 1, "it is counted")
    lock_proxy.mend()
    assert result.get(timeout=20) == "item"


@pytest.fixture
def served(config: Any, folder: Path) -> Callable[..., float | None]:
    """What the only worker serves now: ``served("waiting", task="lab.work")``; None where there is no such sample."""
    port = config.settings["lab_metrics_port"] = free_port()

    def scraped() -> str:
        """As for `samples`: a scrape fails while a file is made, and is tried again."""
        while True:
            with suppress(HTTPError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                return answer.read().decode()

    def look(name: str, **labels: str) -> float | None:
        found = text_string_to_metric_families(scraped())
        full = f"celery_redislock_worker_{name}"
        values = [one.value for family in found for one in family.samples if (one.name, one.labels) == (full, labels)]
        return values[0] if values else None

    return look


def test_a_hanging_holder_and_what_waits_for_it_are_seen_while_nothing_else_moves(
    tasks, app, start_worker, served, running, gate
):
    start_worker(2)
    assert served("waiting", task="lab.work") == 0, "a task of which nothing waits is there too"
    first = tasks.work.delay("k", "first", gate)
    running("first")
    others = [tasks.work.delay("k", number) for number in range(5)]
    wait_until(lambda: served("waiting", task="lab.work") == 5, "all others wait")
    wait_until(lambda: served("oldest_wait_seconds", task="lab.work") > 1, "the wait grows")
    wait_until(lambda: served("longest_hold_seconds", task="lab.work") > 2, "the hold grows")
    assert served("waiting", task="lab.once") == served("longest_hold_seconds", task="lab.once") == 0
    gate.open()
    assert [one.get(timeout=20) for one in (first, *others)] == ["first", *range(5)]
    wait_until(lambda: served("waiting", task="lab.work") == 0, "nothing waits")
    wait_until(lambda: served("longest_hold_seconds", task="lab.work") == 0, "nothing is held")
    assert served("oldest_wait_seconds", task="lab.work") == 0
    assert served("overflow_total", task="lab.work") == 0


def test_messages_that_a_full_worker_sends_back_are_counted(config, tasks, start_worker, served, running, gate):
    config.settings["redislock_waiting_limit"] = 1
    start_worker(2)
    first = tasks.work.delay("k", "first", gate)
    running("first")
    others = [tasks.work.delay("k", number) for number in range(3)]
    wait_until(lambda: served("overflow_total", task="lab.work"), "one of them did not find room")
    assert served("waiting", task="lab.work") >= 1
    gate.open()
    assert [one.get(timeout=60) for one in (first, *others)] == ["first", *range(3)]


def test_a_scrape_tells_whether_the_lock_server_answers(start_worker, served, lock_proxy):
    start_worker(1)
    assert served("server_up") == 1
    lock_proxy.refuse()
    assert served("server_up") == 0
    lock_proxy.mend()
    assert served("server_up") == 1


def test_the_apps_own_metrics_and_its_gauges_of_living_children_go_on(
    config, tasks, start_worker, ledger, folder, scrape
):
    config.settings.update({"worker_max_tasks_per_child": 1, "lab_gauge": True})
    worker = start_worker(1)
    for number in range(3):
        assert tasks.work.delay(number, number).get(timeout=20) == number
    wait_until(lambda: len(ledger.runs()) == 3 and living(folder) == [0.0, 1.0], "one child lives")
    worker.stop()
    assert living(folder) == [0.0], "no child lives"
    assert scrape("acquired_total", task="lab.work") == 3, "what they have counted stays"


def living(folder: Path) -> list[float]:
    """The values of the app's own gauge: the main process has one too, which it has not set."""
    return sorted(sample.value for sample in samples(folder) if sample.name == "lab_living")
