"""``python -m fuzz``: lives of random apps, one after the other, as many as there is time for."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.facts import Facts
from fuzz.oracle import Verdict, judge
from fuzz.plan import random_life
from fuzz.play import play
from tests.lab.ledger import Ledger

#: How many lines of the ledger are shown for one violation.
MOST_LINES = 60


def main() -> int:
    """Play life after life; return 1 if one has broken a promise."""
    options = _options()
    if options.recheck:
        facts = Facts(random_life(options.seed), Ledger(options.recheck))
        return int(_report(facts, judge(facts)) > 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C: no process is left behind
    folder, end = Path(tempfile.mkdtemp(prefix="fuzz-")), time.monotonic() + options.seconds
    print(f"seeds from {options.seed} on, broker {options.broker}; ledgers and logs are in {folder}", flush=True)
    broken, counts = 0, Counter[str]()
    for seed in itertools.count(options.seed):
        life = random_life(seed)
        facts = Facts(life, play(life, options.broker, folder / str(seed)))
        verdict = judge(facts)
        counts.update(lives=1, calls=len(facts.calls), runs=len(facts.bodies), excused=verdict.excused.total())
        counts.update(operations=len(life.operations))
        broken += _report(facts, verdict)
        if not verdict.violations:
            shutil.rmtree(folder / str(seed))
        if time.monotonic() > end:
            break
    print(f"{dict(counts)}; {broken} violations", flush=True)
    return int(broken > 0)


def _report(facts: Facts, verdict: Verdict) -> int:
    """Print what came of a life, with its plan where something is wrong; return the number of broken promises."""
    excused = ", ".join(f"{count} {name}" for name, count in verdict.excused.items() if count)
    seed = facts.life.seed
    print(f"seed {seed}: {len(verdict.violations)} violations; excused: {excused or 'nothing'}", flush=True)
    if verdict.violations:
        print(facts.life.shown())
    for violation in verdict.violations:
        print(f"BROKEN {violation.promise.name} ({violation.promise.value}): {violation.what}")
        lines = facts.around(violation.task_ids)
        print(*(f"   {json.dumps(line)}" for line in lines[:MOST_LINES]), sep="\n", flush=True)
    return len(verdict.violations)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="0 for one life alone (default: 60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the first; default: random")
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis", help="default: redis")
    parser.add_argument("--recheck", type=Path, metavar="LEDGER", help="play nothing; judge the ledger of this seed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
