"""``python -m tests.celery_suite CHECKOUT``: Celery's own integration suite, plain and with every task locked."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.celery_suite.outcomes import read
from tests.lab.servers import Valkey, free_port, running

PROJECT = Path(__file__).parents[2]
#: For each way, the plugins that make it.
WAYS = {"plain": [], "locked": ["tests.celery_suite.every_task_locked"]}
#: How often a test whose outcomes differ is run again, in both ways. Celery's own CI runs its tests up to six times.
AGAIN = 3


class Suite:
    """The suite of a checkout; servers, logs and outcomes are in `folder`."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout, self._folder, self._runs = checkout, folder, 0

    def run(self, way: str, tests: Sequence[str] = ("t/integration",)) -> dict[str, str]:
        """Run these tests on an empty server of their own; return the outcome of each."""
        self._runs += 1
        folder = self._folder / f"{self._runs}-{way}"
        folder.mkdir()
        outcomes, port = folder / "outcomes", free_port()
        plugins = ["celery.contrib.pytest", "no:cacheprovider", "tests.celery_suite.outcomes", *WAYS[way]]
        command = [sys.executable, "-m", "pytest", "-v", "-rA", "--continue-on-collection-errors", "--timeout=300"]
        command += [f"--outcomes={outcomes}", *(word for plugin in plugins for word in ("-p", plugin)), *tests]
        with (
            Valkey(folder, port).serve(),
            running(command, folder / "log", self._environment(port), cwd=self._checkout) as process,
        ):
            process.wait()
        return read(outcomes)

    def _environment(self, port: int) -> dict[str, str]:
        server = f"redis://127.0.0.1:{port}"  # database 0, where the tests look for results
        return {
            "TEST_BROKER": server,
            "TEST_BACKEND": server,
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(port),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # has the command `celery`
            "PYTHONPATH": os.pathsep.join([str(self._checkout), str(PROJECT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def main() -> int:
    """Run the suite in both ways; return 1 if a difference has no explanation."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C: no process is left behind
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="celery-suite-"))
    print(f"logs and outcomes are in {folder}", flush=True)
    suite, outcomes = Suite(options.checkout, folder), {}
    for way in WAYS:
        start = time.monotonic()
        outcomes[way] = suite.run(way, options.tests or ["t/integration"])
        print(f"{way}: {_counts(outcomes[way])} in {time.monotonic() - start:.0f} s", flush=True)
    for _ in range(AGAIN):
        if tests := _differing(**outcomes):
            for way in WAYS:
                _correct(way, outcomes[way], suite.run(way, tests))
    return _report(**outcomes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", description=__doc__)
    parser.add_argument("checkout", type=_checkout, help="a folder with the source code of Celery")
    parser.add_argument("tests", nargs="*", help="files or tests of the checkout (default: t/integration)")
    return parser.parse_args()


def _checkout(name: str) -> Path:
    checkout = Path(name).resolve()
    if not (checkout / "t" / "integration").is_dir():
        raise argparse.ArgumentTypeError(f"{name} is no checkout of Celery: it has no t/integration")
    return checkout


def _counts(outcomes: dict[str, str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(outcomes.values()).items()))


def _differing(plain: dict[str, str], locked: dict[str, str]) -> list[str]:
    return sorted(name for name in plain.keys() | locked.keys() if plain.get(name) != locked.get(name))


def _correct(way: str, outcomes: dict[str, str], again: dict[str, str]) -> None:
    """A test that has failed, or did not run, counts as passed if it passes when it is run again."""
    for name, outcome in again.items():
        if outcome == "passed" and outcomes.get(name) != outcome:
            print(f"{way}: {name} passed when it was run again", flush=True)
            outcomes[name] = outcome


def _report(plain: dict[str, str], locked: dict[str, str]) -> int:
    failed = sorted(name for name, outcome in plain.items() if outcome == locked.get(name) == "failed")
    print(f"{len(failed)} fail in both ways:", *failed, sep="\n  ")
    explained = tomllib.loads((Path(__file__).parent / "explained.toml").read_text())
    differing = _differing(plain, locked)
    print(f"{len(differing)} differ:")
    for name in differing:
        print(f"  {name}: plain {plain.get(name)}, locked {locked.get(name)}: {explained.get(name, 'NOT EXPLAINED')}")
    return int(not explained.keys() >= set(differing))


if __name__ == "__main__":
    sys.exit(main())
