"""The explorations, made once for all tests: each takes up to a few seconds."""

from __future__ import annotations

import pytest

from .explore import Exploration, explore
from .scenarios import SCENARIOS


@pytest.fixture(scope="session")
def explorations() -> dict[str, Exploration]:
    """All scenarios, by their names, under the true rules."""
    return {scenario.name: explore(scenario) for scenario in SCENARIOS}
