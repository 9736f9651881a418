"""The explorations, made once for the tests of a module: each takes up to a few seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def explorations(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the module's `explore` makes of each of its `SCENARIOS`, by their names, under the true rules.

    They take 500 MB, and have no cycles. So the garbage collector does not look at them: it would take a second each
    time, in which a lease of the real server ends.
    """
    gc.disable()
    try:
        made = {scenario.name: request.module.explore(scenario) for scenario in request.module.SCENARIOS}
        gc.freeze()
    finally:
        gc.enable()
    yield made
    made.clear()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """The garbage collector would look at all states again and again."""
    gc.disable()
    yield
    gc.enable()
