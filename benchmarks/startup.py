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
_IMPORT = """
import celery.app.task, kombu, redis, time
began = time.process_time()
import celery_redislock
print(time.process_time() - began)
"""


def main(findings: Findings) -> None:
    findings.chapter("The import")
    run = [sys.executable, "-c", _IMPORT]
    # An installed package is compiled; the first of these runs writes the bytecode, unless this variable forbids it.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = [1000 * float(subprocess.check_output(run, text=True, env=given)) for _ in range(ROUNDS)][1:]
    table = Table(title="startup: what the import adds", title_justify="left")
    for column in ("median ms", "least", "most", "bound", "met"):
        table.add_column(column, justify="right")
    median = statistics.median(times)
    met = findings.judge("startup: the import, after Celery's own", median, BOUND, " ms")
    table.add_row(f"{median:.1f}", f"{min(times):.1f}", f"{max(times):.1f}", f"{BOUND:g}", met)
    findings.show(table)
    findings.say("Only a worker imports Celery's worker, and the modules of this package that need it.")
