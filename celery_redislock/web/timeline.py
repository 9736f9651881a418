"""Timeline: the events of locks since the page was started, and the bars in which they are drawn.

They are the events of `worker.lock_events`, as Celery's own event receiver hears them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from celery import Celery

from celery_redislock.errors import describe

logger = logging.getLogger(__name__)

#: How many events are kept.
MOST_EVENTS = 5000
#: Seconds between two attempts to reach the broker.
PAUSE = 2.0
GROUP = "redislock-"


class Event(NamedTuple):
    """What happened to a lock."""

    what: str
    """``acquired``, ``waiting``, ``skipped``, ``released`` or ``lost``."""
    at: float
    """Seconds since the epoch, by the worker's clock."""
    key: str
    task_id: str
    task: str
    worker: str
    note: str
    """More about it, in words."""
    seconds: float
    """For how long the key was held, or the message had waited."""

    @property
    def text(self) -> str:
        """What a search looks at."""
        return "\n".join((self.key, self.task_id, self.task)).lower()

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Event:
        """Make one from an event of Celery's.

        Raises:
            KeyError, TypeError, ValueError: It is not an event of this package.
        """
        holder, reason = event.get("holder"), str(event.get("reason") or "")
        key, task_id, task, worker = (str(event.get(name) or "") for name in ("key", "uuid", "name", "hostname"))
        note = reason or (f"behind {holder}" if holder else "")
        at, seconds = float(event["timestamp"]), float(event.get("held") or event.get("waited") or 0.0)
        if not (0 <= at < 2**33 and abs(seconds) < 2**33):
            raise ValueError("its times are not times")
        return cls(str(event["type"]).removeprefix(GROUP), at, key, task_id, task, worker, note, seconds)


class Bar(NamedTuple):
    """A time in which a task held a key or waited for it; or a mark, where it has no length."""

    what: str
    """``held``, ``waited``, ``lost`` or ``skipped``; ``unknown`` if its end was not heard."""
    begin: float
    end: float
    task_id: str


class Timeline:
    """Hears events in a thread.

    Args:
        app: The app.

    Attributes:
        since: When it was started, in seconds since the epoch.
        problem: Why nothing is heard now, in words; None if the broker answers.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.since = time.time()
        self.problem: str | None = None
        self._over = threading.Event()
        self._receiver: Any = None
        self._thread = threading.Thread(target=self._run, name="redislock-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def heard(self) -> list[Event]:
        """The events, the latest last."""
        return [*self._events.copy()]

    def stop(self) -> None:
        """End the thread within about a second."""
        self._over.set()
        if self._receiver is not None:
            self._receiver.should_stop = True

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._app.connection_for_read() as connection:
                    self._receiver = self._app.events.Receiver(connection, handlers={"*": self._hear})
                    self.problem = None
                    self._receiver.capture(wakeup=False)
            except Exception as error:  # noqa: BLE001 - errors from the broker's library
                self.problem = describe(error)
                self._over.wait(PAUSE)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if str(event.get("type")).startswith(GROUP):
            try:
                self._events.append(Event.of(event))
            except (ValueError, TypeError, KeyError):  # not of this package
                logger.debug("an event of another kind: %r", event.get("type"))

    def lanes(self, now: float, seconds: float, living: Container[str], key: str | None = None) -> dict[str, list[Bar]]:
        """The bars of each key in the last `seconds`; the key with the latest event first.

        Args:
            now: The time at the right end.
            seconds: How far back to look.
            living: The ids of the tasks that hold a key or wait now: their bars go on.
            key: The only key to look at; None for all.
        """
        found, opened = dict[str, list[Bar]](), dict[tuple[str, str, str], Event]()

        def close(what: str, of: str, event: Event) -> None:
            before = opened.pop((of, event.key, event.task_id), None)
            was_lost = any((one.what, one.task_id) == ("lost", event.task_id) for one in found[event.key])
            if before or (event.seconds and not was_lost):
                begin = before.at if before else event.at - event.seconds
                found[event.key].append(Bar(what, begin, event.at, event.task_id))

        for event in [one for one in self.heard if key in {None, one.key}]:
            found[event.key] = found.pop(event.key, [])  # the latest last
            match event.what:
                case "waiting":
                    opened["waiting", event.key, event.task_id] = event
                case "acquired":
                    close("waited", "waiting", event)
                    opened["acquired", event.key, event.task_id] = event
                case "released" | "lost":
                    close("held", "acquired", event)
            if event.what in {"lost", "skipped"}:
                found[event.key].append(Bar(event.what, event.at, event.at, event.task_id))
        for (what, its_key, task_id), event in opened.items():
            goes_on = task_id in living or now - event.at < 2 * PAUSE  # the snapshot may be older than the event
            kind = {"waiting": "waited", "acquired": "held"}[what] if goes_on else "unknown"
            found[its_key].append(Bar(kind, event.at, now, task_id))
        lanes = {one: [bar for bar in bars if bar.end > now - seconds] for one, bars in found.items()}
        return {one: bars for one, bars in reversed(lanes.items()) if bars}
