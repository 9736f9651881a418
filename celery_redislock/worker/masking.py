"""Masking: `redislock_url`, which may hold a password, is shown as asterisks in Celery's reports."""

from __future__ import annotations

import re

from celery.app import utils


def hide_url() -> None:
    """Have Celery show `redislock_url` as asterisks, whatever namespace the app's settings have.

    ``celery report``, ``inspect conf`` and Flower would show the URL as it is. Celery knows a secret by the name of its
    setting and has no way to register one, so this extends its pattern, `celery.app.utils.HIDDEN_SETTINGS`. A password
    in `redislock_client_options` needs nothing: its name is in that pattern.
    """
    hidden: re.Pattern[str] | None = getattr(utils, "HIDDEN_SETTINGS", None)
    if hidden is not None and not hidden.search("redislock_url"):
        utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|REDISLOCK_URL", hidden.flags)  # type: ignore[attr-defined]
