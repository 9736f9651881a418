"""Workers: what the app's workers answer over Celery's remote control, such as how many messages wait in them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from celery import Celery

from celery_redislock.errors import describe
from celery_redislock.info import shown
from celery_redislock.protocol.names import LockPart
from celery_redislock.protocol.tokens import known_as

from .console import counted
from .scan import FREE, Row, Waits

Answer = TypeVar("Answer")

#: How many seconds a broker or a result backend has to answer. Celery's own commands wait forever for a silent one.
PATIENCE = 4.0


class Workers:
    """Asks an app's workers over Celery's remote control.

    Args:
        app: The app.
        timeout: Seconds to wait for answers; 0 asks no worker. A worker that does not answer in time may be busy,
            stopped or gone.

    Attributes:
        problem: Why the workers could not be asked, in words; None if the broker has accepted all questions so far.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self.problem: str | None = None

    def ask(
        self, command: str, arguments: dict[str, Any] | None = None, to: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The answers, by worker name; empty if no worker answers.

        Args:
            command: The name of the remote control command.
            arguments: Its arguments.
            to: The names of the workers to ask; None for all. With names, the call returns once all have answered.
        """
        if not self._timeout:  # with a timeout of 0, Celery would wait forever
            self.problem = "--timeout is 0"
            return {}
        try:
            replies = patiently(
                lambda: self._app.control.broadcast(
                    command, arguments=arguments or {}, destination=to, reply=True, timeout=self._timeout
                ),
                waits=self._timeout,
            )
        except Exception as error:  # noqa: BLE001 - errors from the broker's library
            self.problem = describe(error)
            return {}
        answers = {shown(str(name)): answer for reply in replies or () for name, answer in reply.items()}
        # A worker without the plugin does not know the command, and answers with an error.
        return {name: one for name, one in answers.items() if not (isinstance(one, dict) and "error" in one)}


def patiently(ask: Callable[[], Answer], waits: float = 0.0) -> Answer:
    """Call `ask` in a thread and return its answer, unless that takes too long.

    Args:
        ask: Asks the broker or the result backend. If it takes too long, its daemon thread is left behind.
        waits: Seconds that `ask` waits by design; it may take `PATIENCE` seconds longer.

    Raises:
        TimeoutError: `ask` took too long.
        Exception: Whatever `ask` raises.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="redislock-ask", daemon=True)
    thread.start()
    thread.join(PATIENCE + waits)
    if not answer.done():
        raise TimeoutError(f"no answer within {PATIENCE + waits:g} s")
    return answer.result()


class Counts:
    """The waiting messages in the workers that answer.

    Args:
        workers: The workers. They are asked once, when this object is made.

    Attributes:
        conflicts: How many runs found their key held since their worker started, by worker.
        unasked: Why no message is counted, as a sentence; None if the broker accepted the question.
        locks: The waiting messages, by lock and task.
    """

    def __init__(self, workers: Workers) -> None:
        answers = workers.ask("redislock_counts")
        self.unasked: str | None = None
        if (why := workers.problem) is not None:
            self.unasked = f"The workers could not be asked: {why}. Each process in line counts as one."
        self.conflicts = {worker: int(answer["conflicts"]) for worker, answer in answers.items()}
        self.locks: dict[str, dict[str, Waits]] = {}
        self._rooms = {str(room) for answer in answers.values() for room in answer["rooms"]}
        self._workers: defaultdict[str, set[str]] = defaultdict(set)
        for worker, answer in answers.items():
            for lock, task, number, rank in answer["lines"]:
                tasks, name = self.locks.setdefault(str(lock), {}), known_as(str(task))
                tasks[name] = tasks.get(name, Waits()) + Waits(int(number), int(rank))
                self._workers[str(lock)].add(worker)

    def workers(self, lock: str) -> list[str]:
        """The workers that have messages waiting for `lock`."""
        return sorted(self._workers.get(lock, ()))

    def add(self, row: Row) -> Row:
        """`row` with the messages that wait for its lock, in place of the rooms that they wait in."""
        rooms = {room: rank for room, rank in row.rooms.items() if room not in self._rooms}
        return row._replace(rooms=rooms, messages=self.locks.get(row.part.lock, {}))

    def free(self, lock: str) -> list[Row]:
        """A row for the free lock `lock` if messages wait for it: they may lack a free slot in their worker."""
        return [self.add(Row(LockPart(lock, lock), FREE, None))] if lock in self.locks else []

    def missing(self, rows: Sequence[Row]) -> str | None:
        """What the numbers of `rows` leave out, as a sentence; None if they count everything."""
        rooms = {room for row in rows for room in row.rooms}
        if not rooms or self.unasked:
            return self.unasked
        return f"Each counts as one, whatever waits in it: {outside(len(rooms))}."


def outside(rooms: int) -> str:
    """How many processes stand in line outside the workers that answered, in words."""
    return f"{counted(rooms, 'process', 'processes')} outside the workers that answered"
