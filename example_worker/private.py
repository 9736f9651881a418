"""Private: what keeps the demo apart from other users of the same servers: its queue and keys begin with its name."""

from __future__ import annotations

import os
from typing import Any

#: The demo's name. ``python -m example_worker`` gives every run another one, so that two can use one server.
NAME = os.environ.get("EXAMPLE_NAME", "redislock-example")
PREFIX = f"{NAME}:"
#: Where the task bodies write down what they do.
LEDGER = f"{NAME}:ledger"
LOCKS = f"{NAME}:lock"

SETTINGS: dict[str, Any] = {
    "task_default_queue": NAME,
    "redislock_prefix": LOCKS,
    "broker_transport_options": {"global_keyprefix": PREFIX},  # Redis only; RabbitMQ's transport ignores it
    "result_backend_transport_options": {"global_keyprefix": PREFIX},
    "result_expires": 600,  # seconds; for the results of a demo that was interrupted
    "broker_connection_retry_on_startup": True,
}
