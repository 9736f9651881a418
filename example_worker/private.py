"""Private settings: the demo's queue and keys start with its name, apart from other users of the same servers."""

from __future__ import annotations

import os
from typing import Any

#: The demo's name. ``python -m example_worker`` uses a new one each time, so two demos can share a server.
NAME = os.environ.get("EXAMPLE_NAME", "redislock-example")
PREFIX = f"{NAME}:"
#: The list in which task bodies record their runs.
LEDGER = f"{NAME}:ledger"
LOCKS = f"{NAME}:lock"

SETTINGS: dict[str, Any] = {
    "task_default_queue": NAME,
    "redislock_prefix": LOCKS,
    "broker_transport_options": {"global_keyprefix": PREFIX},  # Redis only; RabbitMQ's transport ignores it
    "result_backend_transport_options": {"global_keyprefix": PREFIX},
    "result_expires": 600,  # seconds, in case a demo is interrupted
    "broker_connection_retry_on_startup": True,
}
