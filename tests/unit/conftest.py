"""Unit tests reach no server: their app's broker and lock server are names that nobody connects to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from hypothesis import settings

settings.register_profile("unit", deadline=None, database=None, derandomize=True)
settings.load_profile("unit")


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app that is configured, but never connected."""
    with Celery("unit", broker="redis://nowhere.invalid/0", set_as_current=False) as app:
        yield app
