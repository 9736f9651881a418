"""Masking: no report of Celery's shows `redislock_url`, which may hold a password."""

from __future__ import annotations

import re

from celery.app import utils


def hide_url() -> None:
    """Add `redislock_url` to the names of settings that Celery shows as asterisks, in whatever namespace.

    Celery knows a secret by the name of its setting, and has no place to register one: ``celery report``,
    ``inspect conf``, and so Flower, would show the URL as it is. A password in `redislock_client_options` has a name
    that Celery knows.
    """
    hidden: re.Pattern[str] | None = getattr(utils, "HIDDEN_SETTINGS", None)
    if hidden is not None and not hidden.search("redislock_url"):
        utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|REDISLOCK_URL", hidden.flags)  # type: ignore[attr-defined]
