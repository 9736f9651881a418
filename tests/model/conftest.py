"""The explorations, made once for the tests of a module: each takes up to a few seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from .explore import Exploration, explore
from .scenarios import SCENARIOS


@pytest.fixture(scope="module")
def explorations() -> Iterator[dict[str, Exploration]]:
    """All scenarios, by their names, under the true rules.

    They take 500 MB, and have no cycles. So the garbage collector does not look at them: it would take a second each
    time, in which a lease of the real server ends.
    """
    gc.disable()
    try:
        made = {scenario.name: explore(scenario) for scenario in SCENARIOS}
        gc.freeze()
    finally:
        gc.enable()
    yield made
    made.clear()
