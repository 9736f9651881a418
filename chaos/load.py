"""The load: a seeded stream of messages, and the wait until all of them have come to their end."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

from celery import Celery, chain, states
from celery.result import AsyncResult

from celery_redislock import signals
from tests.lab.ledger import Ledger

KEYS = 5
#: Messages that may be under way; more are sent when some of these have ended.
MOST = 15
#: The least and the most seconds between two messages.
PAUSE = (0.02, 0.3)
#: The kinds of messages that are acked after they ran, and so must come to their end whatever happens.
LATE = frozenset({"late", "again", "step", "link", "job", "last", "three", "contended", "several", "rated", "fair"})
#: The kinds whose calls are merged. They come to their end as well, but a newer call may supersede or replace them.
MERGING = frozenset({"latest", "all", "newest"})
LATE |= MERGING
_KINDS = {"late": 8, "again": 3, "step": 3, "link": 2, "once": 3, "early": 2, "limited": 1, "job": 5, "last": 5}
_KINDS |= {"burst": 3, "three": 3, "several": 3, "rated": 2, "fair": 2, "latest": 3, "all": 3, "newest": 4}
#: A burst is so many messages for one key, of kind `late` or `three`, at least and at most: several of them wait.
BURST = (3, 6)
#: The number of keys that more than one may hold at once.
LIMITED = 2
#: The number of the keys of kind `several`, two for each message, and of kind `rated`.
SEVERAL, RATED = 3, 1
#: A burst of kind `fair` has so many messages of one group, and then one of each of the others, of so many seconds.
CROWD, GROUPS, SHORT = 12, ("a", "b", "c"), 0.2
#: A message of kind `several` is so often one of kind `late` that needs one of those keys.
SINGLE = 0.3
#: Merged calls come in bursts, with pauses of up to so many seconds.
APART = 0.3
#: A body that may be replaced takes so many seconds, at least and at most.
REPLACED = (1.0, 6.0)
#: The calls have another key every so many seconds: they are merged into a message that a broker has lost, for an hour.
SPELL = 8.0
#: The number of keys of the jobs in each scope: so few that some of their publishes are duplicates.
JOBS = 3
#: What has not ended after so many seconds may be lost, and makes room for others. The check finds it in the end.
LONG_GONE = 60.0
#: Seconds for the messages that are under way when the faults are over. The check finds what has not ended by then.
END = 90.0
#: Nothing moves any more when the ledger has not grown for so long. What waits in line writes when it has its turn, at
#: most a lease after a holder's death. What an outage has sent back comes back within half of the visibility timeout;
#: on RabbitMQ, where that is long, within 8 s at its third try.
QUIET = 10.0
#: More seconds besides `END`, for messages that go round although all have succeeded.
STILL_GOING_ROUND = 30.0


class Load(threading.Thread):
    """Sends messages until `enough` is set."""

    def __init__(self, app: Celery, ledger: Ledger, seed: str) -> None:
        super().__init__(name="chaos-load", daemon=True)
        self.enough = threading.Event()
        self.results: dict[str, AsyncResult[Any]] = {}
        self.kinds: dict[str, str] = {}
        self._app, self._ledger, self._chance = app, ledger, random.Random(seed)
        self._states: dict[str, str] = {}
        self._results: dict[str, str] = {}
        self._sent_at: dict[str, float] = {}
        self._sent = 0
        self._call_here = threading.local()
        signals.lock_unavailable.connect(self._is_unasked)

    def run(self) -> None:
        """Send messages until `enough` is set."""
        while not self.enough.wait(self._chance.uniform(*PAUSE)):
            if len(self.unfinished(time.monotonic() - LONG_GONE)) < MOST:
                self._send()

    def unfinished(self, since: float = 0.0) -> list[str]:
        """The late messages that were sent `since` then, by `time.monotonic()`, and have not come to their end."""
        late = [task_id for task_id, kind in self.kinds.items() if kind in LATE and self._sent_at[task_id] >= since]
        return [task_id for task_id in late if not self._is_over(task_id)]

    def _is_over(self, task_id: str) -> bool:
        state = self.state(task_id)
        return state == states.SUCCESS or (state == states.REVOKED and self.kinds[task_id] in MERGING)

    def state(self, task_id: str) -> str:
        """The state of a task in the result backend, which is not asked again once the task has succeeded."""
        if self._states.get(task_id) != states.SUCCESS:
            meta = self._app.backend.get_task_meta(task_id, cache=False)
            self._states[task_id], self._results[task_id] = meta["status"], str(meta["result"])
        return self._states[task_id]

    def write_down_states(self) -> None:
        """Write down the outcome of every message, for the check."""
        for task_id in self.kinds:
            state = self.state(task_id)
            self._ledger.write({"event": "final", "task_id": task_id, "state": state, "result": self._results[task_id]})

    def _send(self) -> None:
        self._sent += 1
        kind = self._chance.choices(list(_KINDS), list(_KINDS.values()))[0]
        key, item = f"key{self._chance.randrange(KEYS)}", f"{kind}-{self._sent}"
        match kind:
            case "again":
                times = self._chance.randint(1, 2)
                sent = self._task("again").apply_async((key, item, self._seconds(), times))
            case "step" | "link":
                name, key = ("late", key) if kind == "step" else ("link", item)
                steps = [self._task(name).si(key, f"{item}.{number}", self._seconds()) for number in range(3)]
                sent = chain(*steps).apply_async()
            case "job" | "last":
                key = f"{kind}{self._chance.randrange(JOBS)}"
                sent = self._task(kind).delay(key, item, self._seconds(), self._chance.randint(0, 1))
                if sent.duplicate:
                    self._ledger.write({"event": "answered", "task_id": sent.id})
                    return
            case "burst" | "three":
                name, key = ("late", key) if kind == "burst" else (kind, f"{kind}{self._chance.randrange(LIMITED)}")
                for number in range(self._chance.randint(*BURST)):
                    sent = self._task(name).delay(key, f"{item}.{number}", self._seconds())
                    self._write_down(sent, name)
                return
            case "fair":
                first, *others = self._chance.sample(GROUPS, len(GROUPS))
                for number, group in enumerate([first] * CROWD + others):
                    sent = self._task(kind).delay("fair", group, f"{item}.{number}", SHORT)
                    self._write_down(sent, kind, group=group)
                return
            case "several" | "rated":
                for number in range(self._chance.randint(*BURST)):
                    self._send_sharing(kind, f"{item}.{number}")
                return
            case "latest" | "all" | "newest":
                for number in range(self._chance.randint(*BURST)):
                    self._call(kind, f"{item}.{number}")
                    self.enough.wait(self._chance.uniform(0.0, APART))
                return
            case "limited":
                sent = self._task(kind).apply_async((key, item, 20.0))
            case _:
                sent = self._task(kind).apply_async((key, item, self._seconds()))
        self._write_down(sent, kind)

    def _send_sharing(self, kind: str, item: str) -> None:
        """Send a message that needs two keys, or has a rate."""
        seconds = self._seconds()
        if kind == "several":
            key, other = (f"both{number}" for number in self._chance.sample(range(SEVERAL), 2))
            if self._chance.random() < SINGLE:
                self._write_down(self._task("late").delay(key, item, seconds), "late")
            else:
                self._write_down(self._task(kind).delay(key, other, item, seconds), kind)
        else:
            self._write_down(self._task(kind).delay(f"rate{self._chance.randrange(RATED)}", item, seconds), kind)

    def _call(self, kind: str, name: str) -> None:
        """Make a call that may be merged into a message that waits."""
        self._call_here.is_unasked = False
        asked_at = time.monotonic()
        key = f"{kind}{asked_at // SPELL:.0f}"
        seconds = round(self._chance.uniform(*REPLACED), 3) if kind == "newest" else self._seconds()
        sent = self._task(kind).delay(key=key, call=name, seconds=seconds)
        call = {"kind": kind, "key": key, "name": name, "asked_at": asked_at, "returned_at": time.monotonic()}
        how = {"merged": bool(sent.duplicate), "unasked": self._call_here.is_unasked}
        self._ledger.write({"event": "call", "task_id": sent.id, **call, **how})
        if sent.duplicate:
            self._ledger.write({"event": "answered", "task_id": sent.id})
        else:
            self._write_down(sent, kind)

    def _is_unasked(self, **_: object) -> None:
        """The lock server is unavailable, so a call is sent by itself."""
        self._call_here.is_unasked = True

    def _task(self, name: str) -> Any:
        return self._app.tasks[f"chaos.{name}"]

    def _seconds(self) -> float:
        """Mostly a moment, sometimes longer, and now and then for several renewals."""
        low, high = self._chance.choices([(0.05, 0.3), (0.5, 2.0), (3.5, 8.0)], [20, 4, 1])[0]
        return round(self._chance.uniform(low, high), 3)

    def _write_down(self, sent: Any, kind: str, **facts: str) -> None:
        while sent is not None:
            self.kinds[sent.id], self._sent_at[sent.id] = kind, time.monotonic()
            before = sent.parent.id if sent.parent else ""
            self._ledger.write({"event": "sent", "task_id": sent.id, "kind": kind, "after": before, **facts})
            sent = sent.parent


def wait_for_the_end(load: Load, ledger: Ledger) -> None:
    """Wait until all late messages have succeeded and nothing moves any more."""
    end = time.monotonic() + END
    while load.unfinished() and time.monotonic() < end:
        time.sleep(0.2)
    size, quiet_since = -1, time.monotonic()
    while time.monotonic() < min(quiet_since + QUIET, end + STILL_GOING_ROUND):
        if ledger.path.stat().st_size != size:
            size, quiet_since = ledger.path.stat().st_size, time.monotonic()
        time.sleep(0.2)
    if time.monotonic() < quiet_since + QUIET:
        busy = Counter(line["event"] for line in ledger.lines()[-50:])
        ledger.write({"event": "complaint", "text": f"messages still go round: {dict(busy)}"})
