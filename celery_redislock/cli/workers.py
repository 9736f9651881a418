"""Workers: what the workers of the app answer, over the broker, by Celery's remote control."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery_redislock.errors import describe
from celery_redislock.info import shown
from celery_redislock.protocol.names import LockPart
from celery_redislock.protocol.tokens import known_as

from .scan import FREE, Row, Waits
from .table import counted

if TYPE_CHECKING:
    from celery import Celery


class Workers:
    """The workers that answer.

    Args:
        app: The app.
        timeout: Seconds to wait for answers; 0 asks nobody. A worker that has not answered by then may be busy, stopped
            or gone.

    Attributes:
        problem: Why no worker could be asked, in words; None as long as the broker has taken all questions.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self.problem: str | None = None

    def ask(
        self, command: str, arguments: dict[str, Any] | None = None, to: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The answers by the names of the workers; empty where none answers.

        Args:
            command: The name of the remote control command.
            arguments: Its arguments.
            to: The names of the workers that are asked; None for all. If all of these answer, it takes no longer.
        """
        if not self._timeout:  # Celery would wait for ever
            self.problem = "--timeout is 0"
            return {}
        try:
            replies = patiently(
                lambda: self._app.control.broadcast(
                    command, arguments=arguments or {}, destination=to, reply=True, timeout=self._timeout
                ),
                waits=self._timeout,
            )
        except Exception as error:  # noqa: BLE001 - each broker has its own
            self.problem = describe(error)
            return {}
        answers = {shown(str(name)): answer for reply in replies or () for name, answer in reply.items()}
        return {name: answer for name, answer in answers.items() if not _is_error(answer)}


def _is_error(answer: Any) -> bool:
    """Whether a worker has refused: it has no such command, as one without the plugin."""
    return isinstance(answer, dict) and "error" in answer


Answer = TypeVar("Answer")

#: Seconds that a broker or a result backend has for an answer. Celery's own commands wait for a silent one for ever.
PATIENCE = 4.0


def patiently(ask: Callable[[], Answer], waits: float = 0.0) -> Answer:
    """What `ask` returns.

    Args:
        ask: Asks. A thread in which it takes longer than it may is left behind: it ends with the process.
        waits: For how many seconds it waits by itself, besides `PATIENCE`.

    Raises:
        TimeoutError: It took longer.
        Exception: What `ask` has raised.
    """
    done: list[Answer] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(ask())
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="redislock-ask", daemon=True)
    thread.start()
    thread.join(PATIENCE + waits)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {PATIENCE + waits:g} s")
    return done[0]


class Counts:
    """The messages that wait in the workers that answer.

    Args:
        workers: The workers, which are asked once.

    Attributes:
        conflicts: How many runs have found their key held, for each worker since its start.
        unasked: Why no message is counted, as a sentence; None where the broker has taken the question.
        locks: The messages that wait, by their locks and tasks.
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
        """The workers in which messages wait for `lock`."""
        return sorted(self._workers.get(lock, ()))

    def add(self, row: Row) -> Row:
        """`row` with the messages that wait for its lock, instead of the rooms that have told of theirs."""
        rooms = {room: rank for room, rank in row.rooms.items() if room not in self._rooms}
        return row._replace(rooms=rooms, messages=self.locks.get(row.part.lock, {}))

    def free(self, lock: str) -> list[Row]:
        """A row for `lock`, which nobody holds, if messages wait for it: their workers have no free process."""
        return [self.add(Row(LockPart(lock, lock), FREE, None))] if lock in self.locks else []

    def missing(self, rows: Sequence[Row]) -> str | None:
        """What the numbers of `rows` do not count, as a sentence; None where they count everything."""
        rooms = {room for row in rows for room in row.rooms}
        if not rooms or self.unasked:
            return self.unasked
        return f"Each counts as one, whatever waits in it: {outside(len(rooms))}."


def outside(rooms: int) -> str:
    """In words, so many processes that no worker has told of."""
    return f"{counted(rooms, 'process', 'processes')} outside the workers that answered"
