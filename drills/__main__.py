"""``python -m drills [name ...]``: run the drills, and print what was seen of each."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from drills.desk import SOON, Desk, Seen
from drills.drills import DRILLS


def main() -> int:
    """Run the drills; return 1 if the cause of one was named too late, or by a sentence that is not true."""
    names = sys.argv[1:] or [*DRILLS]
    if unknown := [name for name in names if name not in DRILLS]:
        print(f"no drill is called {', '.join(unknown)}; there are {', '.join(DRILLS)}")
        return 2
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="drill-") as folder, Desk(name, Path(folder)).open() as desk:
            DRILLS[name](desk)
            failed += report(desk.seen)
    return min(failed, 1)


def report(seen: Seen) -> bool:
    """Print what was seen; return whether it is not good enough."""
    alerts = [f"{name} after {seconds:.1f} s" for name, seconds in seen.alerts.items()]
    print(f"\n## {seen.drill}: {seen.fault}\n")
    print(f"why, after {seen.after:.1f} s:\n{_indented(seen.cause)}")
    print(f"list:\n{_indented(seen.listed)}")
    print(f"on the page, after {seen.on_page:.1f} s")
    print(f"alerts, a minute taken for a second: {', '.join(alerts) or 'none'}", flush=True)
    if seen.untrue:
        print(f"NOT TRUE: {', '.join(seen.untrue)}")
    if max(seen.after, seen.on_page) > SOON:
        print(f"TOO LATE: more than {SOON:.0f} s")
    return bool(seen.untrue) or max(seen.after, seen.on_page) > SOON


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
