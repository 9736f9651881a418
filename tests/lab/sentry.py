"""The app of the tests with Sentry's own Celery integration; what it sends goes into files, not over the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentry_sdk
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from tests.lab.worker import app, config

__all__ = ["app"]

EVENTS = Path(config.ledger).with_name("sentry")
CHECK_INS = EVENTS.with_name("sentry-check-ins")


class _ToFile(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        for item in envelope.items:
            sent, to = (item.payload.json, CHECK_INS) if item.type == "check_in" else (item.get_event(), EVENTS)
            if sent is not None:
                with to.open("a") as file:  # a line at a time, so that processes do not mix theirs
                    file.write(json.dumps(sent, default=str) + "\n")


sentry_sdk.init(
    "http://key@127.0.0.1:9/1", transport=_ToFile, integrations=[CeleryIntegration(monitor_beat_tasks=True)]
)
