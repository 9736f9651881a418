"""A process that was forked from the nursery is told, waited for and killed as any process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import celery
import psutil
import pytest

from tests.lab import nursery
from tests.lab.servers import wait_until


@pytest.fixture
def start(tmp_path):
    """Celery's command line; returns the process and what shows its log."""
    started = []

    def run(*arguments, **env):
        log = tmp_path / f"log{len(started)}"
        with log.open("w") as file:
            out = file.fileno()
            started.append(nursery.start("celery", arguments, env={**os.environ, **env}, stdout=out, stderr=out))
        return started[-1], log.read_text

    yield run
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.close()


@pytest.mark.parametrize(("arguments", "code", "said"), [(["--version"], 0, celery.__version__), (["no-such"], 2, "")])
def test_it_does_what_the_command_line_says_and_its_exit_code_is_known(start, arguments, code, said):
    process, output = start(*arguments)
    assert process.wait(20) == process.poll() == code
    assert said in output()


def test_it_has_its_own_environment_and_a_group_of_its_own(start):
    process, output = start("report", CELERY_BROKER_URL="memory://")
    assert os.getpgid(process.pid) == process.pid
    assert process.wait(20) == 0
    assert "transport:memory" in output()


def test_who_waits_too_short_is_told_and_a_signal_ends_it(start):
    process, _ = start("-b", "memory://", "worker", "-P", "solo")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # as with Popen: nothing happens


def test_a_child_that_the_tests_fork_leaves_the_nursery_where_it_is(start):
    """From Python 3.13 on such a child drops what `atexit` has registered, and so what only that refers to."""
    first, _ = start("--version")
    assert first.wait(20) == 0
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20)
    second, _ = start("--version")
    assert second.wait(20) == 0


PROGRAM = """
import os, sys
print(sys.argv[1:], os.getcwd(), sys.path[:2], dict(os.environ), sys.stdin.read())
print("done", file=sys.stderr)
sys.exit(3)
"""


def test_it_prints_what_the_same_program_prints_that_python_starts(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"PYTHONPATH": "/nowhere", "LC_CTYPE": "C.UTF-8"}
    ours = nursery.run("program", "one", "two", env=env, cwd=tmp_path)
    command = [sys.executable, "-m", "program", "one", "two"]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    pythons = subprocess.run(command, env=env, cwd=tmp_path, **options)
    assert (ours.returncode, ours.stdout, ours.stderr) == (3, pythons.stdout, "done\n")
    assert (pythons.returncode, pythons.stderr) == (3, "done\n")


def test_what_does_not_end_in_time_is_killed(tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(60)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        nursery.run("hangs", env={}, cwd=tmp_path, timeout=1)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid), "it is gone")
