"""How the worker's main process hears of deaths: of real processes, and from the system where it tells of them."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from billiard import Process

from celery_redislock.worker.children import is_dead, wait_for_end
from tests.lab.servers import wait_until

Start = Callable[[], "Process"]


@pytest.fixture(params=["told", "looked at"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that tells of them; and one that does not, as macOS."""
    if request.param == "looked at":
        monkeypatch.delattr(os, "waitid", raising=False)
    elif not hasattr(os, "waitid"):
        pytest.skip("the system tells of no deaths")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that lives until it is killed."""
    ready, tell = os.pipe()
    started = []

    def start_one() -> Process:
        process = Process(target=os.read, args=(ready, 1))
        process.start()
        started.append(process)
        return process

    yield start_one
    for process in started:
        if process.is_alive():
            os.kill(process.pid, 9)
        process.join()
    for end in (ready, tell):
        os.close(end)


def awaited(process: Process) -> threading.Thread:
    """A thread that waits for the end of a process."""
    waiting = threading.Thread(target=wait_for_end, args=(process.pid,), daemon=True)
    waiting.start()
    return waiting


def kill(process: Process) -> None:
    os.kill(process.pid, 9)
    if not hasattr(os, "waitid"):
        process.join()  # nothing but its parent knows that it has ended


def test_a_death_is_told_of_that_process_alone(start: Start) -> None:
    one, other = start(), start()
    one_ends, other_ends = awaited(one), awaited(other)
    assert not is_dead(one.pid)
    kill(one)
    one_ends.join(10)
    assert not one_ends.is_alive()
    assert (is_dead(one.pid), is_dead(other.pid)) == (True, False)
    assert other_ends.is_alive()
    kill(other)
    other_ends.join(10)
    assert not other_ends.is_alive()


def test_a_death_is_told_before_anybody_has_waited_for_the_process(start: Start) -> None:
    if not hasattr(os, "waitid"):
        pytest.skip("the system tells of no deaths")
    process = start()
    os.kill(process.pid, 9)
    wait_for_end(process.pid)
    assert is_dead(process.pid)
    process.join()
    assert process.exitcode == -9, "its end was left to the pool"


def test_one_that_is_gone_before_it_is_waited_for_is_told_of(start: Start) -> None:
    gone = start()
    os.kill(gone.pid, 9)
    gone.join()
    wait_for_end(gone.pid)
    assert is_dead(gone.pid)


def test_one_that_the_pool_buries_while_it_is_waited_for_is_told_of(start: Start) -> None:
    buried = start()
    ends = awaited(buried)
    os.kill(buried.pid, 9)
    buried.join()
    ends.join(10)
    assert not ends.is_alive()


def test_a_process_of_another_parent_is_looked_at() -> None:
    """As the children of a fork server."""
    ready, tell = os.pipe()
    if not (parent := os.fork()):
        if child := os.fork():
            os.write(tell, b"%d" % child)
            os.waitpid(child, 0)
        else:
            time.sleep(30)
        os._exit(0)
    pid = int(os.read(ready, 20))
    assert not is_dead(pid)
    waiting = threading.Thread(target=wait_for_end, args=(pid,), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    os.kill(pid, 9)
    waiting.join(10)
    assert not waiting.is_alive()
    os.waitpid(parent, 0)
    for end in (ready, tell):
        os.close(end)


def test_where_no_more_files_can_be_opened_a_death_is_told(start: Start) -> None:
    process = start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        ends = awaited(process)
        assert not is_dead(process.pid)
        kill(process)
        wait_until(lambda: not ends.is_alive(), "it is told of", 10)
        assert is_dead(process.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_id_of_a_greenlet_is_no_dead_process() -> None:
    assert not is_dead(2**63)
