"""What `import celery_redislock` adds to a process that has imported Celery, as every publisher has."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from rich.table import Table

from .findings import Findings

#: Milliseconds of CPU time, which other processes of a busy machine disturb less than the time by the clock.
BOUND = 40.0
ROUNDS = 21
#: redis-py imports OpenTelemetry if it is installed, as it is for these benchmarks. A full garbage collection of all
#: that then falls into the import that comes next. The bound is for what the package and its dependencies install.
BARE, WITH = "as the package is installed", "with OpenTelemetry, which redis-py then imports"
_HIDE = "import sys; sys.modules['opentelemetry'] = None"
_IMPORT = """
import celery.app.task, kombu, redis, time
began = time.process_time()
import celery_redislock
print(time.process_time() - began)
"""


def main(findings: Findings) -> None:
    findings.chapter("The import")
    table = Table(title="startup: what the import adds", title_justify="left")
    table.add_column("case")
    for column in ("median ms", "least", "most", "bound", "met"):
        table.add_column(column, justify="right")
    for case, first in ((BARE, _HIDE), (WITH, "")):
        times = _times(f"{first}{_IMPORT}")
        median, bound, met = statistics.median(times), "", ""
        if case == BARE:
            bound, met = f"{BOUND:g}", findings.judge("startup: the import, after Celery's own", median, BOUND, " ms")
        table.add_row(case, f"{median:.1f}", f"{min(times):.1f}", f"{max(times):.1f}", bound, met)
    findings.show(table)
    findings.say(
        "Only a worker imports Celery's worker, and the modules of this package that need it. If much was imported "
        "before, a full garbage collection may happen during the import: the second row shows one."
    )


def _times(code: str) -> list[float]:
    # An installed package is compiled; the first of these runs writes the bytecode, unless this variable forbids it.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = [sys.executable, "-c", code]
    return [1000 * float(subprocess.check_output(run, text=True, env=given)) for _ in range(ROUNDS)][1:]
