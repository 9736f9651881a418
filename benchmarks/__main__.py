"""Run all benchmarks, or those named: ``python -m benchmarks [--full] [name ...]``."""

from __future__ import annotations

import argparse
import signal

from . import (
    capacity,
    cli,
    cluster,
    crowd,
    cycle,
    drain,
    event_loop,
    fair,
    handover,
    limits,
    memory,
    renewal,
    several,
    startup,
    task,
    waiting,
    web,
)
from .findings import Findings

BENCHMARKS = {
    "task": task.main,
    "drain": drain.main,
    "cycle": cycle.main,
    "waiting": waiting.main,
    "handover": handover.main,
    "crowd": crowd.main,
    "renewal": renewal.main,
    "memory": memory.main,
    "event_loop": event_loop.main,
    "startup": startup.main,
    "limits": limits.main,
    "fair": fair.main,
    "several": several.main,
    "capacity": capacity.main,
    "cluster": cluster.main,
    "cli": cli.main,
    "web": web.main,
}
#: These have no bound, or take long: they are measured in a full run, and where they are named.
ONLY_IN_FULL = {"limits", "fair", "several", "capacity", "cluster", "cli", "web"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What locks cost, next to bare calls and other packages."
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of: {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument(
        "--full", action="store_true", help="measure everything, and write the page of benchmarks in docs/"
    )
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends with a run that is stopped
    findings = Findings(full=given.full)
    left = given.names or [name for name in BENCHMARKS if given.full or name not in ONLY_IN_FULL]
    try:
        while left:
            BENCHMARKS[left[0]](findings)
            left = left[1:]
    finally:  # also what was measured before a run failed, or was stopped
        findings.conclude(left)


if __name__ == "__main__":
    main()
