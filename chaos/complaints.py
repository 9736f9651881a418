"""What a worker's log must not hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_TRACEBACK = re.compile(
    r"^[^\n]*\nTraceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n(?=[ \t]))*[^\n]*", re.MULTILINE
)
#: How a traceback ends that Celery logs where the broker is away while `Task.retry` publishes the next attempt, or a
#: message that has to wait is published again.
_BROKER_AWAY = (
    "kombu.exceptions.OperationalError: ",
    "celery.exceptions.Reject: (OperationalError(",
    "celery.exceptions.Reject: ('OperationalError: ",
    "celery.exceptions.Reject: ('OSError: Server unexpectedly closed connection'",  # before RabbitMQ has confirmed it
)


def error_that_ended(log: Path) -> str:
    """The traceback by which a worker ended that nobody told to; empty where it wrote none."""
    _, _, last = log.read_text(errors="replace").rpartition("Unrecoverable error: ")
    found = _TRACEBACK.search(last)
    return found.group() if found else ""


def complaints_in(log: Path, allowed: str = "") -> Iterator[str]:
    """A failed keeper, and tracebacks that come out of the package, but for records that match this expression."""
    text = log.read_text(errors="replace")
    if allowed:
        text = re.sub(rf"^\[[^\n]*(?:{allowed})[^\n]*\n(?:(?!\[)[^\n]*\n)*", "", text, flags=re.MULTILINE)
    if "the keeper failed" in text:
        yield f"the keeper failed: {log}"
    for match in _TRACEBACK.finditer(text):
        traceback = match.group()
        is_of_celery = traceback.rpartition("\n")[2].startswith(_BROKER_AWAY)
        if "/celery_redislock/" in traceback and not is_of_celery:
            yield f"a traceback from celery_redislock in {log}:\n{traceback}"
