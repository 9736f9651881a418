"""What a policy did is seen where people look: in Flower."""

from __future__ import annotations

import json
import sys
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.lab.servers import free_port, running, wait_until
from tests.lab.workers import ROOT

pytest.importorskip("flower")


@pytest.fixture
def flower(config, tmp_path, start_worker):
    """Asks a Flower of its own, which listens to a worker's events."""
    start_worker(2, "-E")
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", "tests.lab.worker", "flower", "--address=127.0.0.1"]
    env = {"LAB_CONFIG": config.dump(), "LAB_READY": str(tmp_path / "ready"), "PYTHONPATH": str(ROOT)}
    env["FLOWER_UNAUTHENTICATED_API"] = "true"

    def ask(what):
        with urlopen(f"http://127.0.0.1:{port}/api/{what}", timeout=10) as answer:
            return json.load(answer)

    def listens():
        try:
            return ask("workers?refresh=false") and ask("tasks") is not None
        except (URLError, ConnectionError):
            return False

    with running([*command, f"--port={port}"], tmp_path / "flower.log", env):
        wait_until(listens, "Flower has heard of the worker", 60)
        yield ask


@pytest.fixture
def seen(flower):
    """What Flower shows of a task: its state and its reason."""
    return lambda result: flower("tasks").get(result.id, {})


def test_flower_shows_what_a_policy_did_and_why(seen, tasks, ledger):
    with tasks.on_skip.lock_for("k"):
        skipped = tasks.on_skip.delay("k", "skipped")
        wait_until(lambda: seen(skipped).get("state") == "REVOKED", "Flower shows REVOKED")
        assert seen(skipped)["name"] == "lab.on_skip"
    with tasks.on_wait.lock_for("k"):
        waits = tasks.on_wait.delay("k", "waits")
        wait_until(lambda: seen(waits).get("retried"), "Flower has seen that it waits")
        assert "redislock:{k} is held by a lock outside tasks" in seen(waits)["exception"]
    with tasks.on_raise.lock_for("k"):
        refused = tasks.on_raise.delay("k", "refused")
        wait_until(lambda: seen(refused).get("state") == "FAILURE", "Flower shows FAILURE")
        assert "redislock:{k} is held by a lock outside tasks" in seen(refused)["exception"]
    wait_until(lambda: seen(waits).get("state") == "SUCCESS", "Flower shows SUCCESS")
    assert ledger.items() == ["waits"]


def test_flower_does_not_show_the_lock_servers_url_which_may_hold_a_password(flower):
    shown = {}

    def has_asked():
        """Flower waits a second for the worker."""
        (worker,) = flower("workers?refresh=true").values()
        shown.update(worker.get("conf", {}))
        return shown

    wait_until(has_asked, "the worker has answered in time")
    assert shown["redislock_url"] == "********"
