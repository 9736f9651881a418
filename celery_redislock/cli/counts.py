"""Counts: how many messages wait for each lock, as the workers tell. A line in Redis knows only their processes."""

from __future__ import annotations

from collections.abc import Sequence

from celery_redislock.server.names import Place
from celery_redislock.server.tokens import known_as

from .scan import FREE, Row, Waits
from .table import counted
from .workers import Workers


class Counts:
    """The messages that wait in the workers that answer.

    Args:
        workers: The workers, which are asked once.

    Attributes:
        conflicts: How many runs have found their key held, for each worker since its start.
        problem: Why no worker could be asked, in words; None where the broker has taken the question.
    """

    def __init__(self, workers: Workers) -> None:
        answers = workers.ask("redislock_counts")
        self.problem = workers.problem
        self.conflicts = {worker: int(answer["conflicts"]) for worker, answer in answers.items()}
        self._rooms = {str(room) for answer in answers.values() for room in answer["rooms"]}
        self._messages: dict[str, dict[str, Waits]] = {}
        self._workers: dict[str, list[str]] = {}
        for worker, answer in answers.items():
            for key, task, count, place in answer["lines"]:
                tasks, name = self._messages.setdefault(str(key), {}), known_as(str(task))
                tasks[name] = tasks.get(name, Waits()) + Waits(int(count), int(place))
                self._workers.setdefault(str(key), []).append(worker)

    @property
    def locks(self) -> set[str]:
        """The keys of the locks for which messages wait."""
        return {*self._messages}

    def workers(self, lock: str) -> list[str]:
        """The workers in which messages wait for `lock`."""
        return sorted({*self._workers.get(lock, ())})

    def add(self, row: Row) -> Row:
        """`row` with the messages that wait for its lock, in place of the rooms that have told of theirs."""
        rooms = {room: place for room, place in row.rooms.items() if room not in self._rooms}
        return row._replace(rooms=rooms, messages=self._messages.get(row.place.lock, {}))

    def free(self, lock: str) -> list[Row]:
        """A row for `lock`, which nobody holds, if messages wait for it: their workers have no free process."""
        return [self.add(Row(Place(lock, lock), FREE, None))] if lock in self._messages else []

    @property
    def unasked(self) -> str | None:
        """Why no message is counted, as a sentence; None where the workers were asked."""
        return self.problem and f"The workers could not be asked: {self.problem}. Each process in line counts as one."

    def missing(self, rows: Sequence[Row]) -> str | None:
        """What the numbers of `rows` do not count, as a sentence; None where they count everything."""
        rooms = {room for row in rows for room in row.rooms}
        if not rooms or self.problem is not None:
            return self.unasked
        return f"Each counts as one, whatever waits in it: {outside(len(rooms))}."


def outside(rooms: int) -> str:
    """In words, so many processes that no worker has told of."""
    return f"{counted(rooms, 'process', 'processes')} outside the workers that answered"
