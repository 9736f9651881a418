"""Publish time: by it the messages that wait for one key are put in order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_make_aware

_last = 0


def publish_time(options: Mapping[str, Any]) -> int:
    """When a message that is published now is due, in microseconds since the epoch, by this host's clock.

    Of two publishes in one process, the later has the greater number. Options that Celery will refuse count as not
    given.
    """
    global _last
    now = time.time_ns() // 1000
    _last = now = max(now, _last + 1)
    countdown, eta = options.get("countdown"), options.get("eta")
    try:
        if countdown:
            return now + int(countdown * 1_000_000)
        if isinstance(eta, datetime):
            return int(maybe_make_aware(eta, UTC).timestamp() * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        pass
    return now
