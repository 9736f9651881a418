"""What is played for each picture, and how the picture is drawn from what was recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from celery_redislock import Lock

from .stage import Stage, wait_until

#: A case: its title, and who plays it.
Case = tuple[str, Callable[[Stage], None]]


def scope(name: str) -> Case:
    """Five calls of one task; all processes are busy at first, so the first two are queued."""

    def play(stage: Stage) -> None:
        stage.start(processes=2)
        for _ in range(2):
            stage.tasks.occupy.delay()
        wait_until(lambda: stage.broker_queue() == 0, "the processes are busy")
        with stage.watched():
            for number, at in enumerate((0.0, 0.2, 1.0, 1.4, 2.4)):
                stage.call(NAMES[number], at, stage.tasks.report, "monday", lock_scope=name)
            stage.finish()
            stage.until(5)

    return f'lock_scope="{name}"', play


def policy(name: str) -> Case:
    """Three calls of one task."""

    def play(stage: Stage) -> None:
        stage.start()
        for number, at in enumerate((0.0, 0.4, 0.8)):
            if name == "replace":
                stage.call(NAMES[number], at, stage.tasks.preview, 7, NAMES[number])
            else:
                stage.call(NAMES[number], at, stage.tasks.report, "monday", lock_on_conflict=name)
        stage.finish()

    return f'lock_on_conflict="{name}"', play


def merged(title: str, task: str) -> Case:
    """A burst of four calls with other arguments."""

    def play(stage: Stage) -> None:
        stage.start()
        for number, at in enumerate((0.0, 0.3, 0.6, 0.9)):
            stage.call(f"({'abcd'[number]})", at, getattr(stage.tasks, task), 7, "abcd"[number])
        stage.finish()

    return title, play


def line(stage: Stage) -> None:
    """Four bills of one account, for two workers in turn."""
    stage.start("a", 1)
    stage.start("b", 1)
    for number in range(4):
        stage.call(NAMES[number], number * 0.3, stage.tasks.bill, 7, number, queue="ab"[number % 2])
    stage.finish()


def rate(stage: Stage) -> None:
    """Eight messages at once, of which three may begin within two seconds."""
    stage.start()
    for number in range(8):
        stage.call(NAMES[number], number * 0.05, stage.tasks.push, 7, number)
    stage.finish()


def several(stage: Stage) -> None:
    """Three transfers: the second needs an account of each of the others."""
    stage.start(processes=3)
    for source, target, at, seconds in (("A", "B", 0.0, 1.5), ("B", "C", 0.2, 1.0), ("C", "D", 0.4, 2.0)):
        stage.call(f"{source} to {target}", at, stage.tasks.transfer, source, target, seconds)
    stage.finish()


def replace(stage: Stage) -> None:
    """Each call comes while the run of the one before goes on."""
    stage.start()
    for number, at in enumerate((0.0, 1.6, 3.2)):
        stage.call(NAMES[number], at, stage.tasks.preview, 7, NAMES[number])
    stage.finish()


def fair(task: str) -> Callable[[Stage], None]:
    """Two hundred messages of A wait, and then B sends ten."""

    def play(stage: Stage) -> None:
        stage.start("a")
        stage.start("b")
        send = getattr(stage.tasks, task).delay
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(Lock(stage.client, "redislock:{imports}", 60, limit=2, renew=True))
            for _ in range(200):
                send("A")
            stage.wait_for("conflict", 200)
            for _ in range(10):
                send("B")
            stage.wait_for("conflict", 210)
        stage.wait_for("end", 210)
        stage.grants = "".join(event["with_"] for event in stage.events() if event["kind"] == "start")

    return play


def renewed(stage: Stage) -> None:
    """A run that takes longer than two leases."""
    stage.start()
    with stage.watched():
        stage.call("run", 0, stage.tasks.long_bill, 7, 1)
        stage.finish()
        stage.until(5)


def orphaned(stage: Stage) -> None:
    """The same run, whose worker is killed."""
    stage.start()
    with stage.watched():
        stage.call("run", 0, stage.tasks.long_bill, 7, 1)
        stage.until(1.6)
        stage.fault("its worker is killed", 1.6)
        stage.kill("a")
        stage.until(5)


def killed_child(stage: Stage) -> None:
    """The process of a run is killed while another call waits."""
    stage.start()
    _two_bills(stage)
    stage.until(1.5)
    (start,) = (event for event in stage.events() if event["kind"] == "start")
    stage.fault("its process is killed", 1.5)
    os.kill(start["pid"], signal.SIGKILL)
    stage.finish()


def killed_worker(stage: Stage) -> None:
    """The whole worker is killed while another call waits in the other worker."""
    stage.start("a")
    stage.start("b")
    _two_bills(stage, "b")
    stage.until(1.5)
    stage.fault("its worker is killed", 1.5)
    stage.kill("a")
    stage.finish(9)


def outage(stage: Stage) -> None:
    """The lock server stands still for a second and a half, while a run goes on and another call comes."""
    stage.start()
    stage.call("1st", 0, stage.tasks.long_bill, 7, 1)
    stage.until(0.7)
    stage.locks.pause()
    stage.call("2nd", 1.0, stage.tasks.long_bill, 7, 2)
    stage.until(2.2)
    stage.locks.go_on()
    stage.fault("the lock server is down", 0.7, 2.2)
    stage.finish()


def shutdown(stage: Stage) -> None:
    """A worker shuts down that has a run and a message that waits."""
    stage.start("a")
    stage.start("b")
    _two_bills(stage)
    stage.until(1.5)
    stage.tasks.app.control.add_consumer("a", destination=["b@w"])
    stage.fault("its worker is told to stop", 1.5)
    stage.stop("a")
    stage.finish()


def _two_bills(stage: Stage, second: str = "a") -> None:
    stage.call("1st", 0, stage.tasks.long_bill, 7, 1, queue="a")
    stage.call("2nd", 0.5, stage.tasks.long_bill, 7, 2, queue=second)


#: How the calls of a case are called.
NAMES = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")

#: What is played for each picture.
SCENES: dict[str, Sequence[Case]] = {
    "scopes": [scope(name) for name in ("run", "job", "queue")],
    "policies": [policy(name) for name in ("skip", "wait", "raise", "join", "replace")],
    "arguments": [
        merged('lock_arguments="first"', "first"),
        merged('lock_arguments="latest"', "latest"),
        merged('lock_arguments="all"', "batch"),
        merged('lock_arguments="latest", lock_debounce=1', "debounced"),
    ],
    "line": [('lock_args=["account"], two workers', line)],
    "rate": [("lock_rate=(3, 2): three in two seconds", rate)],
    "fair-turns": [("by time", fair("by_time")), ('lock_fair="customer"', fair("by_turns"))],
    "replacing": [('lock_on_conflict="replace"', replace)],
    "several-locks": [('lock_key=["account:{source}", "account:{target}"]', several)],
    "lock": [("a run of 4 s with a lease of 3 s", renewed), ("the same run, whose worker dies", orphaned)],
    "failures": [
        ("a process of the pool dies", killed_child),
        ("a worker dies, with a lease of 3 s", killed_worker),
        ("Redis is down for a while", outage),
        ("a worker shuts down", shutdown),
    ],
}
