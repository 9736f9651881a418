"""Names that others have written, such as task ids and values of keys, made safe for log lines and errors."""

from __future__ import annotations

#: How many characters of a name are shown.
MAX_SHOWN = 200


def shown(name: str, longest: int = MAX_SHOWN) -> str:
    """`name`, cut and with unprintable characters escaped, so that it can neither break, forge nor fill a log line.

    It is cut first, so that a name of a megabyte costs no time.

    Args:
        name: Any text.
        longest: Characters that are left at most, before some are escaped.
    """
    start = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return start if start.isprintable() else start.encode("unicode_escape").decode()
