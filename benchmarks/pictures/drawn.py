"""From what was recorded to what is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .svg import LINE, MARGIN, WIDTH, Drawing
from .timeline import MEANINGS, Bar, Panel, Row, draw

Record = Mapping[str, Any]

#: What the pictures show, for those who do not see them; a page says it in its own words.
TITLES = {
    "scopes": "The scopes run, job and queue: five calls in each",
    "policies": "The five policies: three calls with each",
    "arguments": "A burst of four calls: the first, the latest and all arguments, and a debounce",
    "line": "Four messages in one line, on two workers",
    "rate": "Eight messages, of which three may begin in two seconds",
    "fair-turns": "Two customers that share a key, by time and in turns",
    "several-locks": "Three transfers, each of which holds two accounts or none",
    "replacing": "Each newer call ends the run before it",
    "lock": "How long a lock has left, while its run goes on and after its worker has died",
    "failures": "What a dead process, a dead worker, an outage and a shutdown do to a run and to the next one",
}
#: How many grants of each case of fair turns are shown.
SHOWN = 44


def picture(name: str, cases: Sequence[Record]) -> Drawing:
    """The picture of a scene."""
    if name == "fair-turns":
        return _grants(TITLES[name], cases)
    queued = {"waits": "queued or waiting", "held": "held, taken"} if name == "scopes" else {}
    return draw(TITLES[name], [_panel(name, case) for case in cases], {**MEANINGS, **queued})


def _panel(name: str, case: Record) -> Panel:
    rows = [_row(case, call) for call in case["calls"]]
    if name == "scopes":
        for kind, what in (("lock", "the key"), ("queued", "its slot")):
            spans = case["held"].get(kind, ())
            rows += [Row(what, [Bar("held", *span) for span in spans])] if spans else []
    fault = next(iter(case["faults"]), None)
    down = (fault["what"], fault["at"], fault["until"]) if fault and fault["until"] else None
    event = (fault["what"], fault["at"]) if fault and not fault["until"] else None
    curve = ("ends in", 3, case["left"]) if name == "lock" else None
    return Panel(case["title"], rows, down, event, curve)


def _row(case: Record, call: Record) -> Row:
    if not call["sent"]:
        first = next(one["name"] for one in case["calls"] if one["id"] == call["id"])
        merged = any(event.get("with_") for event in case["events"])
        return Row(call["name"], [], [("sent", call["at"])], f"merged into {first}" if merged else f"{first}'s result")
    bars, is_killed = _bars(case, call)
    killed = [("killed", bars[-1].end)] if is_killed else []
    return Row(call["name"], bars, [("sent", call["at"]), *killed], _outcome(case, call, is_killed))


def _bars(case: Record, call: Record) -> tuple[list[Bar], bool]:
    """What happens to a message, and whether its run was killed."""
    events = [event for event in case["events"] if event["id"] == call["id"]]
    start, stop, end, conflict = (
        next((event["at"] for event in events if event["kind"] == kind), None)
        for kind in ("start", "stop", "end", "conflict")
    )
    if start is None:
        until = _ended(case) if call["state"] == "SUCCESS" else conflict  # it joined, or was refused
        return [Bar("waits", call["at"], until or call["at"])], False
    waits = [Bar("waits", call["at"], start)] if start - call["at"] > 0.1 else []
    if end is None:
        return [*waits, Bar("runs", start, case["faults"][0]["at"])], True
    if stop is None:
        return [*waits, Bar("runs", start, end)], False
    return [*waits, Bar("runs", start, stop), Bar("ends", stop, end)], False


def _ended(case: Record) -> float:
    return float(next(event["at"] for event in case["events"] if event["kind"] == "end"))


def _outcome(case: Record, call: Record, is_killed: bool) -> str:
    by = {one["id"]: one["name"] for one in reversed(case["calls"])}
    start = next((event for event in case["events"] if event["id"] == call["id"] and event["kind"] == "start"), None)
    match call.get("state"), call.get("says", "").split():
        case "REVOKED", ["replaced", "by", task]:
            return f"replaced by {by[task]}"
        case "REVOKED", _:
            return "skipped"
        case "FAILURE", [error]:
            return f"fails: {error}"
        case _ if is_killed:
            return "lost: it was acked early"
        case _ if start is None:
            return f"{case['calls'][0]['name']}'s result"
        case _ if start["with_"] and start["with_"] not in by.values():
            return f"runs with {start['with_']}"
        case _ if len({event["worker"] for event in case["events"]}) > 1:
            return f"runs in worker {start['worker'][0]}"
    return "runs"


def _grants(title: str, cases: Sequence[Record]) -> Drawing:
    """A cell for each run, in the order in which they begin."""
    drawing = Drawing(title)
    cell = (WIDTH - 2 * MARGIN) / SHOWN
    for case in cases:
        drawing.top += LINE
        drawing.text(MARGIN, drawing.top - 4, case["title"], "text code bold")
        for place, customer in enumerate(case["grants"][:SHOWN]):
            kind = "second" if customer == "B" else "held"
            drawing.rect(MARGIN + place * cell, drawing.top + 2, cell - 1.5, 18, kind)
        drawing.top += 30
    for kind, meaning, left in (("held", "a run of A", MARGIN), ("second", "a run of B", MARGIN + 110)):
        drawing.rect(left, drawing.top + 3, 9, 9, kind)
        drawing.text(left + 15, drawing.top + 12, meaning, "quiet small")
    begin = cases[0]["grants"].index("B")
    drawing.text(WIDTH - MARGIN, drawing.top + 12, f"by time, {begin} of A go first", "quiet small", "end")
    drawing.top += 14
    return drawing
