"""The report: a table for the terminal."""

from __future__ import annotations

import json
from collections import Counter

from chaos.calls import CALLS, MERGED, REPLACED, SUPERSEDED
from chaos.check import ANSWERED, CONTENDED, CRASHED, FINISHED, HUNG, LIMITED, SKIPPED, Verdict
from chaos.faults import FAULTS
from chaos.stalls import LEFT_FREE
from chaos.turns import CHECKED, PASSES, WAITED

WIDTH = 88
#: How many lines of the ledger are shown for one offence.
MOST_LINES = 60


def table(title: str, verdict: Verdict) -> str:
    """What struck, and what came of it."""
    again, overlaps, losses = (sum(counts.values()) for counts in (verdict.again, verdict.overlaps, verdict.losses))
    outcomes = verdict.outcomes
    lines = [title, "=" * WIDTH]
    lines += [_line("faults", sum(verdict.faults.values()))]
    lines += [_line(f"  {name}", verdict.faults[name]) for name in FAULTS]
    lines += [_line("messages sent", outcomes["messages sent"])]
    lines += [_line(f"  {outcome}", outcomes[outcome]) for outcome in (FINISHED, SKIPPED, LIMITED)]
    lines += [_line(f"  lost, excused: {name}", count) for name, count in verdict.missing.most_common()]
    lines += [_line(ANSWERED, outcomes[ANSWERED]), _line("runs", outcomes["runs"])]
    lines += _block("runs again, excused", again, verdict.again)
    lines += _block("overlaps, excused", overlaps, verdict.overlaps)
    lines += [_line(CONTENDED, outcomes[CONTENDED])]
    lines += _block("jobs beside an equal one, excused", sum(verdict.pairs.values()), verdict.pairs)
    lines += _block("losses told to their holders", losses, verdict.losses)
    lines += [_line(name, verdict.calls[name]) for name in (CALLS, MERGED, REPLACED, SUPERSEDED)]
    lines += _block("calls lost or overtaken, excused", sum(verdict.lost_calls.values()), verdict.lost_calls)
    lines += _block("times with more runs than a rate allows, excused", sum(verdict.rates.values()), verdict.rates)
    lines += [_line(name, verdict.turns[name]) for name in (WAITED, CHECKED, PASSES, LEFT_FREE)]
    lines += [_line(name, outcomes[name]) for name in (HUNG, CRASHED)]
    lines += [_line("keys left one lease after the end", outcomes["keys left"])]
    lines += [_line("broken promises", len(verdict.offences)), "=" * WIDTH]
    return "\n".join(lines)


def offences(verdict: Verdict) -> str:
    """Every broken promise with the lines of the ledger that show it."""
    text = []
    for number, offence in enumerate(verdict.offences, start=1):
        text.append(f"\n{number}. {offence.promise.name}: {offence.what}")
        text += [f"   {json.dumps(line)}" for line in offence.lines[:MOST_LINES]]
        if len(offence.lines) > MOST_LINES:
            text.append(f"   ... and {len(offence.lines) - MOST_LINES} more lines")
    return "\n".join(text)


def _block(name: str, total: int, counts: Counter[str]) -> list[str]:
    return [_line(name, total), *(_line(f"  {each}", count) for each, count in counts.most_common() if count)]


def _line(name: str, count: int) -> str:
    """A dotted line; a name too long for it is broken at a space."""
    room = WIDTH - 8
    if len(name) > room:
        head, _, tail = name[:room].rpartition(" ")
        indent = len(name) - len(name.lstrip()) + 2
        return f"{head}\n{_line(' ' * indent + tail + name[room:], count)}"
    return f"{name} {'.' * (WIDTH - len(name) - len(str(count)) - 2)} {count}"
