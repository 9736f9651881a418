"""The first page of the site: what it shows is what comes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.lab.pages import python_of
from tests.lab.workers import ROOT

PAGE = ROOT / "docs" / "index.md"


def test_the_second_delay_returns_what_the_first_page_says(broker_server, tmp_path):
    """Its Python and what is typed after it, as one program. No worker runs: the job is queued."""
    broker_server.client.flushall()
    (typed,) = re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "typed.txt").write_text(typed)
    program = python_of(PAGE) + "\nimport doctest; print(doctest.testfile('typed.txt', False, globs=globals()))\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CELERY_BROKER_URL": broker_server.celery_url(0),
            "CELERY_RESULT_BACKEND": broker_server.celery_url(1),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "TestResults(failed=0, attempted=3)\n", done.stdout + done.stderr
