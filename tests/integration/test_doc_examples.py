"""Every Python block of the documentation runs: those of a page in their order, as one program.

A page whose blocks are files has a test of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.lab import nursery
from tests.lab.pages import PAGES, files_of, python_of, write_files
from tests.lab.servers import Valkey, free_port
from tests.lab.workers import ROOT


@pytest.fixture
def redis_url(tmp_path):
    """On a port: redis-py and Celery spell the URL of a socket in two ways."""
    with Valkey(tmp_path, free_port()).serve() as server:
        yield server.url()


PROGRAMS = [page for page in PAGES if python_of(page).strip() and not files_of(page)]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_as_they_are(page, redis_url, tmp_path):
    program = tmp_path / f"page_{page.stem.replace('-', '_')}.py"  # its line numbers are those of the page
    program.write_text(python_of(page))
    env = {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    done = nursery.run(program.stem, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_tests_of_the_page_on_testing_pass(tmp_path):
    write_files(ROOT / "docs" / "testing.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout
