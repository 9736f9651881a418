"""The app of the tests with Sentry's own Celery integration; its events go into a file instead of over the network."""

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


class _ToFile(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        for item in envelope.items:
            event = item.get_event()
            if event is not None:
                with EVENTS.open("a") as file:  # a line at a time, so that processes do not mix theirs
                    file.write(json.dumps(event, default=str) + "\n")


sentry_sdk.init("http://key@127.0.0.1:9/1", transport=_ToFile, integrations=[CeleryIntegration()])
