"""``python -m mutants``: each mutant is tried out; one that no test finds is an error."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from .mutant import mutants
from .table import PAGE, written
from .trial import passes, try_out

#: So many mutants are tried out at a time: their killers mostly wait for servers and workers.
AT_ONCE = 2


def main() -> int:
    """Try out all mutants, or those that are named; return 1 where one is not found."""
    options = _options()
    if options.table:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    chosen = [mutant for mutant in mutants() if not options.names or mutant.name in options.names]
    print(f"{len(chosen)} mutants; first their killers without them", flush=True)
    if not passes(list(dict.fromkeys(mutant.killer for mutant in chosen))):
        print("these tests must pass before they can find a mutant", flush=True)
        return 1
    alive = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for outcome in pool.map(try_out, chosen):
            alive += not outcome.is_killed
            word = "killed" if outcome.is_killed else "ALIVE "
            print(f"{word} {outcome.seconds:5.1f} s  {outcome.mutant.name}: {outcome.why}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants are killed", flush=True)
    return 1 if alive else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="the mutants to try out; else all")
    parser.add_argument("--table", action="store_true", help="only write the tables in docs/how-it-is-tested.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
