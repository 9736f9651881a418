"""What LockedTask adds to a traced empty task: its hooks, the key, one acquire and one release."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.app.trace import build_tracer
from celery.utils.imports import symbol_by_name
from kombu.message import Message

from celery_redislock import LockedTask
from celery_redislock.app import server_of
from celery_redislock.connection.connect import connect
from celery_redislock.message.delivery import DELIVERY, Delivery
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.tokens import Attempt, Token

from .bare import two_calls, with_late_answer
from .delay import delayed
from .findings import DUPLICATE, Findings
from .report import Report
from .server import ONE_CPU, placements, valkey
from .timing import Case, Rounds, interleave

#: What LockedTask may add, in units of two bare calls; and where a round trip takes a millisecond longer.
BOUND, BOUND_FAR = 0.95, 0.60
#: What it may add on one CPU, in units of its two commands, sent as it sends them; and with a key of two arguments,
#: which needs a digest. There the kernel runs the server as soon as a command is written, whether or not the client
#: waits for the reply, and each time the code of this process leaves the CPU's caches. So the ratio to two bare calls
#: depends on the machine: it was 1.16 on one day and 1.31 on another, while this one was 1.98 and 2.04.
BOUND_ONE_CPU, BOUND_ONE_CPU_TWO = 2.2, 2.4
FAR, FAR_ROUNDS = 0.001, 30
HOSTNAME = "celery@benchmarks"
ARGUMENTS = (42, "a plain argument")


def main(findings: Findings) -> None:
    findings.chapter("A task: what LockedTask adds to an empty one")
    report = Report(findings, "task: what LockedTask adds to a traced empty task")
    with valkey() as url, _app(url) as app:
        cases = _cases(app, url)
        for placement in placements(url):
            report.section(placement)
            results = interleave(cases)
            _add_rows(report, results, None if placement == ONE_CPU else BOUND)
        with delayed(url, FAR) as far, _app(far) as far_app:
            report.section("1 ms round trip")
            _add_rows(report, interleave(_cases(far_app, far), FAR_ROUNDS), BOUND_FAR)
    report.show()
    findings.say(
        "With client and server on one CPU, the kernel runs the server as soon as a command is written, whether or not "
        "the client waits for the reply, and each time that drives the task's code out of the CPU's caches. How much "
        "that costs depends on the machine, so the bound there is relative to the commands alone."
    )
    added = {
        "two bare EVALSHA calls": results["calls"],
        "empty task, Celery's own base": results["plain"],
        "empty task, LockedTask": results["locked"],
        "added by LockedTask": results["locked"] - results["plain"],
    }
    times = {case: rounds.microseconds() for case, rounds in added.items()}
    title = f"An empty task takes {times['added by LockedTask'].median:.0f} µs longer with LockedTask"
    findings.bars("task", title, times, "µs, client and server with a CPU each")
    findings.sum_up(
        DUPLICATE,
        "1 command and its message; of a job, 1 command and no message "
        "([counted](../tests/acceptance/test_command_budget.py))",
    )


@contextmanager
def _app(url: str) -> Iterator[Celery]:
    """An app whose last run's release is answered before its server ends."""
    app = Celery("task", broker=url, set_as_current=False)
    yield app
    server_of(app).store.look(Demand("any key"))  # reads what is not read yet


def _cases(app: Celery, url: str) -> dict[str, Case]:
    @app.task(ignore_result=True, shared=False)
    def plain() -> None: ...

    @app.task(ignore_result=True, shared=False)
    def plain_two(account_id: int, name: str) -> None: ...

    @app.task(base=LockedTask, ignore_result=True, shared=False)
    def locked() -> None: ...

    @app.task(base=LockedTask, ignore_result=True, shared=False)
    def locked_two(account_id: int, name: str) -> None: ...

    two_bare_calls, one_read_late = _two_bare_calls(url, locked), _one_read_late(url, locked)

    @app.task(ignore_result=True, shared=False)
    def calling() -> None:
        two_bare_calls()

    @app.task(ignore_result=True, shared=False)
    def floor() -> None:
        one_read_late()

    return {
        "calls": two_bare_calls,
        "plain": _traced(plain),
        "calling": _traced(calling),
        "floor": _traced(floor),
        "locked": _traced(locked),
        "plain two": _traced(plain_two, ARGUMENTS),
        "locked two": _traced(locked_two, ARGUMENTS),
    }


def _add_rows(report: Report, results: Mapping[str, Rounds], bound: float | None) -> None:
    calls, plain = results["calls"], results["plain"]
    in_body, commands = results["calling"] - plain, results["floor"] - plain
    added, added_two = results["locked"] - plain, results["locked two"] - results["plain two"]
    report.add("two bare EVALSHA calls", calls, calls)
    report.add("empty task, Celery's own base", plain, calls)
    report.add("empty task, LockedTask", results["locked"], calls)
    report.add("added by LockedTask", added, calls, bound)
    report.add("added with a key of two arguments", added_two, calls, bound)
    # The two calls cost more inside a task, whose code has to return into the CPU's caches each time.
    report.add("the two bare calls in a task's body", in_body, calls)
    report.add("the commands of a run alone, sent as LockedTask does", commands, calls)
    relative, relative_two = (None, None) if bound is not None else (BOUND_ONE_CPU, BOUND_ONE_CPU_TWO)
    report.add("added by LockedTask, relative to its commands alone", added, commands, relative)
    report.add("added with a key of two arguments, relative to its commands alone", added_two, commands, relative_two)


def _two_bare_calls(url: str, task: Any) -> Case:
    """A case of the two calls that a run of `task` without arguments sends."""
    key, token, note = _sent_by(task)
    return two_calls(connect(url, {}), key, token, task.lock_for().timeout, note=note)


def _one_read_late(url: str, task: Any) -> Case:
    """A case of the same two calls, sent as LockedTask sends them: without waiting for the second reply."""
    key, token, note = _sent_by(task)
    return with_late_answer(connect(url, {}), key, token, task.lock_for().timeout, note=note)


def _sent_by(task: Any) -> tuple[str, Token, str]:
    """The key, the token, and the key of the note, of a run of `task` without arguments."""
    request = _request(task, ())
    key, attempt = task.lock_for().name, Attempt(request["id"], 0, 0)
    token = tokens.mint(Delivery._make(request[DELIVERY]).nonce, attempt, tokens.origin(HOSTNAME, task.name))
    return key, token, keys_of(key).note(attempt)


def _traced(task: Any, args: tuple[Any, ...] = ()) -> Case:
    """A case that runs `task` as a pool child does."""
    task = task.app.tasks[task.name]  # the task itself, not the proxy that the decorator returns
    request = _request(task, args)
    uuid, kwargs = request["id"], request["kwargs"]
    task.__trace__ = build_tracer(task.name, task, app=task.app, hostname=HOSTNAME)  # as a worker does at its start
    trace = task.__trace__

    def run() -> None:
        info = trace(uuid, args, kwargs, request).info
        if info is not None:  # the run has failed: its time would say nothing
            raise RuntimeError(f"{task.name} ended as {info.state}: {info.retval!r}")

    return run


def _request(task: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """What the worker's main process gives to the pool child for a message of `task`."""
    sent = task.app.amqp.as_task_v2(str(uuid4()), task.name, args, {}, ignore_result=True)
    message = Message(
        body=json.dumps(sent.body),
        content_type="application/json",
        content_encoding="utf-8",
        headers=sent.headers,
        properties=sent.properties,
        delivery_info={"exchange": "", "routing_key": "celery", "redelivered": False},
    )
    request_class = symbol_by_name(task.Request)
    if isinstance(task, LockedTask):  # as a worker does at its start
        request_class = task.request_class(task.name, request_class)
    request: dict[str, Any] = request_class(message, app=task.app, task=task, hostname=HOSTNAME).request_dict
    return request
