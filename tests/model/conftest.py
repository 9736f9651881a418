"""The explorations, made once for the tests of a module: each takes up to a few seconds."""

from __future__ import annotations

import gc

import pytest

from .explore import Exploration, explore
from .scenarios import SCENARIOS


@pytest.fixture(scope="module")
def explorations() -> dict[str, Exploration]:
    """All scenarios, by their names, under the true rules.

    The explorations take 500 MB, and while they live every garbage collection takes a second. So they live no longer
    than their module: else each later test in the same process would pay for them. While they are made nothing is
    collected, for they leave no garbage.
    """
    gc.disable()
    try:
        return {scenario.name: explore(scenario) for scenario in SCENARIOS}
    finally:
        gc.enable()
