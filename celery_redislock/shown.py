"""Names that others have written, as task ids of messages and values of keys, for log lines and errors."""

from __future__ import annotations

#: Characters that are shown of a name.
MAX_SHOWN = 200


def shown(name: str, longest: int = MAX_SHOWN) -> str:
    """`name` so that it can neither break nor forge a log line, nor fill the log: unprintable characters escaped, cut.

    The cut comes first, so that a name of a megabyte costs nothing.
    """
    start = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return start if start.isprintable() else start.encode("unicode_escape").decode()
