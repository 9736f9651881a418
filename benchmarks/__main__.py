"""Run all benchmarks, or those named: ``python -m benchmarks [cycle] [task] [drain] [handover] [waiting] [limits]``."""

from __future__ import annotations

import argparse
import signal

from . import cycle, drain, handover, limits, task, waiting

BENCHMARKS = {
    "cycle": cycle.main,
    "task": task.main,
    "drain": drain.main,
    "handover": handover.main,
    "waiting": waiting.main,
    "limits": limits.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What a cycle, a task, a queue of them, a hand-over and waiting cost."
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of: {', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args().names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends with a run that is stopped
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
