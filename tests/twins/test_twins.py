"""Twenty random workflows end as their plain twins, or as their policies say. `make twins` plays others, and more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.lab.app import Config, make_app
from tests.lab.servers import wait_until
from tests.twins.stage import Stage, open_stage
from tests.twins.tasks import define_tasks, ledger_of
from tests.twins.verdict import failure

#: In these, policies end parts of nearly every kind: members, first and last steps, links, errbacks, what bodies send.
SEEDS = (1, 2, 3, 5, 9, 11, 15, 17, 20, 27, 32, 33, 37, 40, 43, 44, 46, 47, 61, 68)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("twins")) as stage:
        yield stage


@pytest.mark.parametrize("seed", SEEDS)
def test_a_locked_workflow_ends_as_its_plain_twin_or_as_its_policies_say(stage, seed):
    problem = failure(stage, seed)
    if problem is not None:
        pytest.fail(problem, pytrace=False)


def test_the_body_of_a_retry_waits_until_celery_has_stored_the_retry(tmp_path):
    """Celery stores it after it has sent the next attempt: else it could be stored over the end of that one."""
    node = {"name": "n1", "side": "side", "does": "returns", "times": 1, "seconds": 0, "ending": None, "becomes": None}
    with make_app(
        Config("memory://", "redis://127.0.0.1:1/1", "redis://127.0.0.1:1/0", str(tmp_path / "ledger"))
    ) as app:
        define_tasks(app)
        ledger = ledger_of(app, "side")
        with ThreadPoolExecutor() as threads:
            ran = threads.submit(app.tasks["twins.plain"].apply, kwargs={"key": "a", "node": node}, retries=1)
            wait_until(lambda: len(ledger.lines()) == 2, "the body runs")
            ledger.write({"event": "retried", "name": "n1", "retries": 0})
            assert ran.result(20).get() == ["n1"]
    assert [line["event"] for line in ledger.lines()] == ["start", "node", "retried", "end"]
