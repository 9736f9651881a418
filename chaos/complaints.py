"""What a worker's log must not hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_TRACEBACK = re.compile(
    r"^[^\n]*\nTraceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n(?=[ \t]))*[^\n]*", re.MULTILINE
)


def complaints_in(log: Path) -> Iterator[str]:
    """A failed keeper, and tracebacks that come out of the package."""
    text = log.read_text(errors="replace")
    if "the keeper failed" in text:
        yield f"the keeper failed: {log}"
    for match in _TRACEBACK.finditer(text):
        traceback = match.group()
        if "/celery_redislock/" in traceback:
            yield f"a traceback from celery_redislock in {log}:\n{traceback}"
