"""Projects of users: their files, which may be those of a documentation page, their programs, and their workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.lab.pages import write_files
from tests.lab.servers import Valkey, free_port, running, wait_until
from tests.lab.workers import ROOT

#: A warning of redis-py, to Celery's result backend.
CELERYS_OWN = "ignore:Call to deprecated setex:DeprecationWarning"


class Project:
    """A folder of files. Its programs find this checkout, and the test's server by `REDIS_URL`."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
        self._workers = ExitStack()

    def run(self, *arguments: str) -> str:
        """What ``python ARGUMENTS`` prints; it must succeed."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", CELERYS_OWN, *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def program(self, file: str) -> Iterator[Callable[[], str]]:
        """A program that runs beside the block; what it yields waits for the end, and returns what it has printed."""
        printed = self.folder / f"{file}.out"
        with running([sys.executable, file], printed, self.env, cwd=self.folder) as process:

            def end() -> str:
                assert process.wait(60) == 0, printed.read_text()
                return printed.read_text()

            yield end

    def wait_for(self, file: str) -> None:
        wait_until((self.folder / file).exists, f"{file} is there")

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
    """The project of the page that the test's module names as `PAGE`, or of its `SHOP`, the text of one module."""
    frameworks_server.client.flushall()
    made = Project(tmp_path, frameworks_server.url())
    if hasattr(request.module, "PAGE"):
        write_files(ROOT / "docs" / request.module.PAGE, tmp_path)
    else:
        (tmp_path / "shop.py").write_text(request.module.SHOP)
    yield made
    made.end()


@pytest.fixture(scope="session")
def frameworks_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A broker, result backend and lock server in one, on a port: its URL is the same for Celery and redis-py."""
    with Valkey(tmp_path_factory.mktemp("frameworks"), free_port()).serve() as server:
        yield server
