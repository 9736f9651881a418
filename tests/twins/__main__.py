"""``python -m tests.twins``: random workflows beside their plain twins, as many as there is time for."""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.twins.stage import open_stage
from tests.twins.verdict import failure


def main() -> int:
    """Play plan after plan; return 1 where one has failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C: no process is left behind
    options = _options()
    folder, end = Path(tempfile.mkdtemp(prefix="twins-")), time.monotonic() + options.seconds
    failed = 0
    with open_stage(folder, options.broker) as stage:
        print(f"seeds from {options.seed} on; ledgers and logs are in {folder}", flush=True)
        for seed in itertools.count(options.seed):
            problem = failure(stage, seed)
            failed += problem is not None
            print(problem or f"seed {seed}: as its twin", flush=True)
            if time.monotonic() > end:
                break
    print(f"{seed - options.seed + 1} plans, {failed} failed")
    return int(failed > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.twins", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="0 for one plan alone (default: 60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the first; default: random")
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis", help="default: redis")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
