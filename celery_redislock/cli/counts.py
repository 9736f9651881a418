"""Counts: how many messages wait for each lock, as the workers tell. A line in Redis knows only their processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from celery_redislock.protocol.names import Place
from celery_redislock.protocol.tokens import known_as

from .scan import FREE, Row, Waits
from .table import counted
from .workers import Workers


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
            for lock, task, number, place in answer["lines"]:
                tasks, name = self.locks.setdefault(str(lock), {}), known_as(str(task))
                tasks[name] = tasks.get(name, Waits()) + Waits(int(number), int(place))
                self._workers[str(lock)].add(worker)

    def workers(self, lock: str) -> list[str]:
        """The workers in which messages wait for `lock`."""
        return sorted(self._workers.get(lock, ()))

    def add(self, row: Row) -> Row:
        """`row` with the messages that wait for its lock, in place of the rooms that have told of theirs."""
        rooms = {room: place for room, place in row.rooms.items() if room not in self._rooms}
        return row._replace(rooms=rooms, messages=self.locks.get(row.place.lock, {}))

    def free(self, lock: str) -> list[Row]:
        """A row for `lock`, which nobody holds, if messages wait for it: their workers have no free process."""
        return [self.add(Row(Place(lock, lock), FREE, None))] if lock in self.locks else []

    def missing(self, rows: Sequence[Row]) -> str | None:
        """What the numbers of `rows` do not count, as a sentence; None where they count everything."""
        rooms = {room for row in rows for room in row.rooms}
        if not rooms or self.unasked:
            return self.unasked
        return f"Each counts as one, whatever waits in it: {outside(len(rooms))}."


def outside(rooms: int) -> str:
    """In words, so many processes that no worker has told of."""
    return f"{counted(rooms, 'process', 'processes')} outside the workers that answered"
