"""Names that others have written, such as task ids and values of keys, made safe for log lines and errors."""

from __future__ import annotations

#: How many characters of a name are shown.
MAX_SHOWN = 200
#: The same of the name of a lock, which people must find again in Redis, and of an error.
LONGEST = 1000


def shown(name: str, longest: int = MAX_SHOWN) -> str:
    """`name`, cut and with unprintable characters escaped, so that it can neither break, forge nor fill a log line.

    It is cut first, to `longest` characters, so that a name of a megabyte costs no time.
    """
    start = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return start if start.isprintable() else start.encode("unicode_escape").decode()


def run_named(task: str, task_id: object) -> str:
    """A run, a message or a job in log lines: ``task shop.bill[<id>]``."""
    return f"task {task}[{shown(str(task_id))}]"


def fields(event: str, **about: object) -> dict[str, str]:
    """What a log line tells, as the fields of its record: ``extra=fields("lost", key=key)`` sets `redislock_key`.

    Args:
        event: What has happened, as a fixed word.
        about: What it concerns: ``task``, ``task_id``, ``key``, ``holder`` (in words), ``holder_id``, ``reason``; what
            is None is left out.
    """
    told = {"event": event, **about}
    return {f"redislock_{name}": shown(str(value), LONGEST) for name, value in told.items() if value is not None}
