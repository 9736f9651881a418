"""Projects of users: the files of a documentation page, their programs, and their workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lab.pages import write_files
from tests.lab.servers import Valkey, free_port, running, wait_until
from tests.lab.workers import ROOT


class Project:
    """A folder with the files of a page; its programs find this checkout, and the test's server by `REDIS_URL`."""

    def __init__(self, page: str, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
        self._workers = ExitStack()
        write_files(ROOT / "docs" / page, folder)

    def run(self, *arguments: str) -> str:
        """What ``python ARGUMENTS`` prints; it must succeed."""
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_worker(self, app: str, *options: str) -> Callable[[], str]:
        """A worker of the project that is ready; returns what shows its log."""
        log = self.folder / "worker.log"
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-l", "INFO", "-c", "2", *options]
        command += ["--without-gossip", "--without-mingle"]
        process = self._workers.enter_context(running(command, log, self.env, cwd=self.folder))
        wait_until(lambda: " ready." in log.read_text() or process.poll() is not None, "the worker is ready", 60)
        assert process.poll() is None, log.read_text()
        return log.read_text

    def end(self) -> None:
        self._workers.close()


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, frameworks_server: Valkey) -> Iterator[Project]:
    """The project of the page that the test's module names as `PAGE`."""
    frameworks_server.client.flushall()
    made = Project(request.module.PAGE, tmp_path, frameworks_server.url())
    yield made
    made.end()


@pytest.fixture(scope="session")
def frameworks_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A broker, result backend and lock server in one, on a port: its URL is the same for Celery and redis-py."""
    with Valkey(tmp_path_factory.mktemp("frameworks"), free_port()).serve() as server:
        yield server
