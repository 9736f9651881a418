"""Workers: what the app's workers answer over Celery's remote control, such as how many messages wait in them."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from celery import Celery

from celery_redislock.errors import describe, shown
from celery_redislock.protocol.tokens import known_as

from .sentences import Say, duration

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
        problem: Why the workers could not be asked the last time, in words; None if the broker accepted the question.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app, self._timeout = app, timeout
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
            self.problem = f"{describe(error)}; check broker_url"
            return {}
        self.problem = None
        answers = [one for reply in replies or () if isinstance(reply, dict) for one in reply.items()]
        # A worker without the plugin does not know the command, and answers with an error.
        return {shown(str(name)): answer for name, answer in answers if _is_expected(command, answer)}


def _is_expected(command: str, answer: Any) -> bool:
    """Whether an answer has what is read from it. Any program that uses the broker may answer."""
    match command, answer:
        case "redislock_counts", {"lines": list(lines), "rooms": list(), "conflicts": int()}:
            return all(isinstance(one, list | tuple) and [*map(type, one)] == [str, str, int, int] for one in lines)
        case "redislock_waiting" | "redislock_task", list():
            return all(map(_is_message, answer))
    return command == "redislock_drop" and isinstance(answer, int)


def _is_message(one: Any) -> bool:
    """Whether `one` describes a message, as `remote_control` does."""
    match one:
        case (
            {"is": "waiting", "lock": str(), "waited": Real(), "rank": Real(), "limit": int(), "lacks": _, "server": _}
            | {"is": "running", "since": Real() | None, "needs_lock": _}
            | {"is": "dead", "comes_again": _}
            | {"is": "asleep" | "called" | "reserved" | "scheduled" | "limited"}
        ):
            is_known = True
        case {"id": str(), "lock": str(), "waited": Real(), "rank": Real()}:
            is_known = "is" not in one  # an answer to `redislock_waiting`
        case _:
            return False
    texts = [one.get(name) for name in ("lock", "reserved", "eta", "group", "lacks")]
    return is_known and isinstance(one.get("name"), str) and all(isinstance(text, str | None) for text in texts)


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

    threading.Thread(target=run, name="redislock-ask", daemon=True).start()
    return answer.result(PATIENCE + waits)


def redelivery(app: Celery) -> str:
    """When the broker redelivers a dead worker's message, in words."""
    transport: Any = app.connection_for_read().transport
    if transport.driver_type == "amqp":
        return "RabbitMQ gives the message to another worker as soon as it sees the lost connection"
    options = app.conf.broker_transport_options or {}
    seconds = options.get("visibility_timeout") or getattr(transport.Channel, "visibility_timeout", None)
    when = f"{duration(seconds)} after the dead one received it (visibility_timeout)" if seconds else "later"
    return f"the broker gives the message to another worker {when}"


def groups_of(waiting: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How many of the messages that workers described are of each group, in the order of these messages."""
    return Counter(str(one["group"]) for one in waiting if one.get("group"))


class Waits(NamedTuple):
    """How many messages wait for a lock, and since when."""

    number: int = 0
    rank: float = math.inf
    """When the first of these messages was published, in microseconds since the epoch."""

    def __add__(self, other: Waits) -> Waits:  # type: ignore[override]
        return Waits(self.number + other.number, min(self.rank, other.rank))

    @property
    def oldest(self) -> float:
        """How long ago the first of these messages was published, in seconds; 0 if no message waits."""
        return max(0.0, time.time() - self.rank / 1e6)


class Counts:
    """The waiting messages in the workers that answer.

    Args:
        workers: The workers. They are asked once, when this object is made. None to ask no worker.

    Attributes:
        conflicts: How many runs found their key held since their worker started, by worker.
        unasked: Why no message is counted, as a sentence; None if the broker accepted the question.
        locks: The waiting messages, by lock and task.
        inside: The workers that have waiting messages, by lock.
        rooms: The names under which the messages of the workers that answered stand in line.
        telling: The workers that send the events of locks.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        answers = workers.ask("redislock_counts") if workers else {}
        self.unasked: str | None = None
        if workers and workers.problem is not None:
            self.unasked = f"{Say.WORKERS_AWAY(error=workers.problem)} Each process in line counts as one message."
        self.conflicts = {worker: int(answer["conflicts"]) for worker, answer in answers.items()}
        self.rooms = {str(room) for answer in answers.values() for room in answer["rooms"]}
        self.telling = {worker for worker, answer in answers.items() if answer.get("events")}
        self.locks: defaultdict[str, defaultdict[str, Waits]] = defaultdict(lambda: defaultdict(Waits))
        self.inside: defaultdict[str, set[str]] = defaultdict(set)
        for worker, answer in answers.items():
            for lock, task, number, rank in answer["lines"]:
                self.locks[str(lock)][known_as(str(task))] += Waits(int(number), int(rank))
                self.inside[str(lock)].add(worker)
