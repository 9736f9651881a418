"""What the command line can tell where no worker answers: by the result backend and the lock server alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import states
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_redislock import LockConflict, LockInfo
from celery_redislock.cli import deadline
from celery_redislock.cli.commands import locks as group
from celery_redislock.server import tokens
from celery_redislock.server.tokens import Attempt
from tests.lab.app import make_app

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery

Cli = Callable[..., str]


@pytest.fixture
def cli(app) -> Cli:
    """Runs a command in this process, and returns all that it prints: ``cli("why", task_id)``."""

    def run(*arguments: str, of: Any = app, code: int = 0) -> str:
        context = CLIContext(of, no_color=True, workdir=None)
        result = CliRunner().invoke(group, [*arguments, "--timeout", "0.1"], obj=context)
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.mark.parametrize(
    ("state", "value", "text"),
    [
        (states.STARTED, None, "STARTED, and no worker that answers runs it"),
        (states.RETRY, ValueError("secret"), "HAS RUN, and is to run again: `self.retry()`, by ValueError."),
        (states.REVOKED, ValueError(), "nobody has said why."),
        ("PROGRESS", {"done": "secret"}, "has the state PROGRESS."),
    ],
)
def test_a_state_that_no_lock_has_made_is_told_without_what_the_body_has_stored(app, cli, state, value, text):
    task_id = str(uuid4())
    app.backend.store_result(task_id, value, state)
    said = cli("why", task_id)
    assert text in said
    assert "secret" not in said


def test_one_that_waits_for_a_key_that_nobody_holds_is_told_that_its_turn_should_come(app, cli):
    task_id = str(uuid4())
    error = LockConflict("redislock:{k}", LockInfo("redislock:{k}", "another", "lab.work", "w0@lab", None, None))
    app.backend.store_result(task_id, error, states.RETRY)
    said = cli("why", task_id)
    assert "WAITS: the lock redislock:{k} is held by task another" in said
    assert "Nobody holds it now" in said


def test_a_task_whose_result_is_not_stored_is_known_by_the_key_that_cools_down_after_it(app, cli, deliver, config):
    config.settings["task_ignore_result"] = True
    silent = make_app(config)
    task_id = str(uuid4())
    deliver(silent, "lab.cooling_job", "k", id=task_id)
    said = cli("why", task_id)
    assert "The task HAS RUN with success." in said
    assert f"is kept for task {task_id}" in said


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_an_app_whose_results_nobody_else_can_read_is_told_so(config, cli, backend):
    config.backend = backend
    said = cli("why", str(uuid4()), of=make_app(config), code=1)
    assert f"The app has no result backend that could be asked ({backend.removesuffix('://')})." in said


def test_a_broker_or_a_result_backend_that_is_away_is_named_and_what_the_lock_server_knows_is_told(
    config, cli, tasks, locks, monkeypatch
):
    monkeypatch.setattr(deadline, "PATIENCE", 0.3)  # Celery goes on trying
    away = "redis://127.0.0.1:1/0"
    config.broker = config.backend = away
    app = make_app(config)
    task_id = str(uuid4())
    said = cli("why", task_id, of=app, code=1)
    assert "The result backend could not be asked: " in said
    assert "The workers could not be asked: " in said
    with tasks.keyed.lock_for("A1") as lock:
        shown = cli("show", lock.name, of=app)
    assert f"{lock.name} is held by a lock outside tasks" in shown
    assert "The workers could not be asked: " in shown
    held = tokens.mint(tokens.mint_nonce(), Attempt("an-id", 0, 0), tokens.origin("w@host", "lab.work"))
    locks.client.set("redislock:{k}", held.value)
    released = cli("release", "redislock:{k}", "--dry-run", of=app)
    assert re.search(r"Its worker w@host does NOT ANSWER: .* \(.+\)\.", released)
