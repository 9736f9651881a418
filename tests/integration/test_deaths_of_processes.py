"""How the worker's main process hears of deaths: of real processes, and from the system where it tells of them."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator

import pytest
from billiard import Process

from celery_redislock.worker.deaths import Deaths, is_dead
from tests.lab.servers import wait_until

Start = Callable[[], "Process"]


@pytest.fixture(params=["told", "looked at"])
def deaths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Deaths:
    """Where the system tells of them; and where it does not, as on macOS."""
    if request.param == "looked at":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("the system tells of no deaths")
    return Deaths()


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


def told_by(deaths: Deaths) -> list[int]:
    """What the next wait tells; it fails where that does not end."""
    told: list[int] = []
    waiting = threading.Thread(target=lambda: told.extend(deaths.wait()), daemon=True)
    waiting.start()
    waiting.join(10)
    assert told
    return told


def test_a_death_is_told_before_anybody_has_waited_for_the_process(deaths: Deaths, start: Start) -> None:
    one, other = start(), start()
    for process in (one, other):
        deaths.watch(process.pid)
        deaths.watch(process.pid)
    assert not is_dead(one.pid)
    os.kill(one.pid, 9)
    assert told_by(deaths) == [one.pid]
    assert is_dead(one.pid)
    os.kill(other.pid, 9)
    assert told_by(deaths) == [other.pid]


def test_one_that_has_died_and_is_gone_before_it_is_watched_is_told_of(deaths: Deaths, start: Start) -> None:
    gone = start()
    os.kill(gone.pid, 9)
    gone.join()
    deaths.watch(gone.pid)
    assert told_by(deaths) == [gone.pid]


def test_one_that_is_watched_while_another_thread_waits_is_told_of(deaths: Deaths, start: Start) -> None:
    told: list[int] = []
    waiting = threading.Thread(target=lambda: told.extend(deaths.wait()), daemon=True)
    waiting.start()
    process = start()
    deaths.watch(process.pid)
    os.kill(process.pid, 9)
    wait_until(lambda: told == [process.pid], "it is told of", 10)


def test_many_deaths_leave_no_descriptor_behind(deaths: Deaths, start: Start) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    processes = {process.pid: process for process in (start() for _ in range(20))}
    for pid in processes:
        deaths.watch(pid)
        os.kill(pid, 9)
    told: set[int] = set()
    while told != processes.keys():
        told.update(told_by(deaths))
    for process in processes.values():
        process.join()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 20  # the pool's own, one for each process


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system tells of no deaths")
def test_where_no_more_files_can_be_opened_a_process_is_looked_at(start: Start) -> None:
    deaths, process = Deaths(), start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        deaths.watch(process.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not deaths.is_heard_of(process.pid)
    os.kill(process.pid, 9)
    assert told_by(deaths) == [process.pid]
