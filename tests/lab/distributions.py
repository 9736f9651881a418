"""What the installed distributions say of themselves is read once, for it stays the same while the tests run.

redis-py reads its own version from the disk for each connection, and each Celery worker looks for extensions in all
distributions: each of the two takes as long as some dozen commands.
"""

from __future__ import annotations

import functools
import importlib.metadata

#: Under which a worker looks for extensions.
_GROUPS = ("celery.commands", "celery.consumer", "celery.result_backends", "celery.worker")


def read_once() -> None:
    """Read all that is asked for again and again, before any module has taken these functions for its own."""
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.version("redis")
    for group in _GROUPS:
        importlib.metadata.entry_points(group=group)
