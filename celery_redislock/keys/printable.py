"""Printable names: characters that cannot be printed, or that a name must not contain, are escaped."""

from __future__ import annotations

import re

#: Braces are escaped in a name: in Redis the whole name stands between two braces. They make it the hash tag, by which
#: a Cluster chooses the slot of the key. What looks like an escape is escaped too, or else it would be taken for one.
UNSAFE = re.compile("[{}]|%(?=[0-9A-F]{2})")


def printable(text: str, unsafe: re.Pattern[str]) -> str:
    """`text` with the characters that are `unsafe` or cannot be printed escaped as ``%XX``."""
    text = unsafe.sub(_percent, text)
    return text if text.isprintable() else _UNPRINTABLE.sub(_percent_unprintable, text)


_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _percent_unprintable(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else _percent(match)
