"""A worker tells the test that it is ready."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery.signals import worker_ready


def announce() -> None:
    """Have the worker of this process touch the file of ``LAB_READY`` when it is ready."""
    worker_ready.connect(_announce)


def _announce(sender: Any, **_: object) -> None:
    ready, hub = Path(os.environ["LAB_READY"]).touch, sender.hub
    if hub is None:
        ready()
    else:  # on Redis a worker hears what is broadcast, such as a revoke, once its event loop has gone round
        hub.call_soon(lambda: hub.call_later(0.001, ready))
