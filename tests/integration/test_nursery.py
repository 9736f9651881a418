"""A worker that was forked from the nursery is told, waited for and killed as any process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess

import celery
import pytest

from tests.lab import nursery


@pytest.fixture
def start(tmp_path):
    """Celery's command line; returns the process and what shows its log."""
    started = []

    def run(*arguments, **env):
        log = tmp_path / f"log{len(started)}"
        started.append(nursery.start(list(arguments), log, env))
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
