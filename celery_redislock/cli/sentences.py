"""Sentences: everything that ``celery locks why`` can say, and times and numbers in words.

A test with real workers produces each sentence.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum

from celery_redislock.errors import LONGEST, shown

NOTHING = "-"
_BUSY = "`celery inspect active` shows what keeps the processes busy."


class Say(Enum):
    """The sentences, with named placeholders: ``Say.RESERVED(task="shop.mail", worker="w1@shop-a")``."""

    # The message waits in a worker.
    WAITS = "Task {task} WAITS in line for {lock}, in worker {worker}, for {waited} now."
    AHEAD = "{before} ahead of it; {messages} in line in the {workers} that answered."
    NEXT = (
        "{free} is free, and the worker has a process for it: its turn comes within seconds, unless an earlier one"
        " waits in a worker that does not answer; or within a minute where the key was deleted by hand or lost."
    )
    FREE = "{free} is free: those before it are called first."
    NO_PROCESS = f"{{free}} is free, but the worker has no free process for it yet. {_BUSY}"
    NO_RATE = "{free} is free, but the worker keeps the message back, by the task's rate_limit."
    NO_SERVER = "{free} is free, but the worker cannot reach the lock server: look into its log."
    ELSEWHERE = "{free} is free on {here}, but the worker looks at {there}. Are these the same locks?"
    # The message is in a worker, but does not wait for a lock.
    RUNS = "Task {task} RUNS in worker {worker}, since {since}."
    HOLDS = "It holds {lock} since {since}."
    NEEDS_NONE = "It needs no lock."
    NOT_ASKED = "It has not asked for its lock yet."
    HOLDS_NOTHING = "It does not hold {lock}: it lost it, runs without it (lock_on_outage), or ends right now."
    DIED = (
        "Task {task} was in a process of worker {worker} that HAS DIED. The worker releases its lock, if it held one."
    )
    COMES_AGAIN = "Its message is delivered again shortly, or its next attempt is sent."
    COMES_NOT = "Its message is not delivered again: its result becomes WorkerLostError. Send it again."
    CALLED = "Task {task} has its TURN for {lock}: worker {worker} gives it to a process as soon as that takes it."
    RESERVED = f"Task {{task}} has NOT STARTED: worker {{worker}} has no free process for it yet. {_BUSY}"
    SCHEDULED = "Task {task} is NOT DUE: worker {worker} keeps its message until its eta, {eta}."
    LIMITED = "Task {task} has NOT STARTED: worker {worker} keeps its message back, by the task's rate_limit."
    # The result backend knows the task.
    DONE = "Task {id} HAS RUN: its result is SUCCESS{at}."
    JOINED = "Task {id} HAS NOT RUN: it joined task {other}, and has that task's result, {status}{at}."
    SKIPPED = "Task {id} WAS SKIPPED{at}: {reason} (lock_on_conflict is skip)."
    REVOKED = "Task {id} WAS REVOKED{at}: {reason}."
    REFUSED = "Task {id} FAILED{at}: {reason}."
    CUT_SHORT = "Task {id} WAS CUT SHORT{at}: its process died, or was killed ({error}). Its work may be done in part."
    NOT_STORED = "Task {id} HAS RUN, but its result could not be stored or sent on{at}: {error}. Its work is done."
    FAILED = "Task {id} FAILED{at}, by {error}."
    CHAIN = "In a chain, the tasks after one that failed or was revoked have its result, and never start."
    HAD_TO_WAIT = """\
Task {id} HAD TO WAIT: {conflict}. Since then no more is known, and no worker that answers has its message. Either
- it is in the broker's queue: a worker that shut down has put it back, or one that was full, for up to {pause}; or
- its worker keeps it, or runs it, and does not answer: it is shutting down, too busy or cut off; or
- its worker is dead: {again}; or
- it has run, and its result could not be stored: the log of its worker says so."""
    RETRIES = "Task {id} HAS STARTED and is to RUN AGAIN{after}. No worker that answers has its message yet."
    STARTED = (
        "Task {id} HAS STARTED, and no worker that answers runs it: its worker is shutting down, too busy, cut off or"
        " dead, or its message is in the broker's queue again. If its worker is dead and the task has acks_late,"
        " {again}; else send it again."
    )
    STATUS = "Task {id} has the state {status}{at}."
    # The lock server knows the task.
    HOLDS_SOMEWHERE = "The task HOLDS a lock, and no worker that answers runs it."
    QUEUED = (
        "The task has NOT STARTED: its message is in the broker's queue, in a worker that does not answer, or lost. If"
        " that worker is dead, {again}."
    )
    NEXT_ATTEMPT = "Its key is kept for its next attempt, which no worker that answers has."
    COOLS = "The task HAS RUN with success."
    # Who holds a key.
    HELD = "{key} is held by {who}, since {since}; {ends}."
    FOREIGN = "{key} is held by a lock of another library, or of a `Lock` with a token of its own; {ends}."
    KEPT = "{key} is kept for {who}, since {since}, for another {ttl}."
    RENEWED = "acquired or renewed {ago} ago, so its process was alive then"
    NOT_RENEWED = (
        "last renewed {ago} ago, though that is due every {every} with the lock_lease that is set here: its process is"
        " dead, hanging or cut off from the lock server, and the key is free in {ttl}"
    )
    HELD_TOO_LONG = "its lock_max_hold is over, so it is not renewed any more, and the key is free in {ttl}"
    ENDS = "it ends in {ttl} unless it is renewed"
    NEVER_ENDS = "it never ends by itself"
    SILENT = "Its worker {worker} does NOT ANSWER: it is shutting down, busy, cut off, dead, or uses another broker."
    # Nothing knows the task, or not everything could be asked.
    UNKNOWN = """\
No lock, no worker and no result that could be asked tells of it.
Asked: {asked}.{unasked}
It may be in the broker's queue, have ended without a stored result, have died with its worker, or never have been sent.
Look for its id in the log of the workers, and at the length of its queue."""
    NO_BACKEND = " The app has no result backend that could be asked ({scheme})."
    BACKEND_AWAY = " The result backend could not be asked: {error}."
    WORKERS_AWAY = "The workers could not be asked: {error}."

    def __call__(self, **about: object) -> str:
        """Fill in the sentence. The values may come from anywhere, so they are escaped."""
        return str(self.value).format(**{name: shown(str(value), LONGEST) for name, value in about.items()})


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number of things in words: ``1 worker``, ``2 workers``."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago `since` was, in words; zero if the clock it was read from is ahead of this host's."""
    return NOTHING if since is None else duration(max(0.0, (now - since).total_seconds()))


def duration(seconds: float) -> str:
    """Seconds in words: ``0.4s``, ``12s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit, size, small, of_small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // of_small:02}{small}"
    return f"{whole}s"


def moment(since: datetime | None, now: datetime) -> str:
    """A date and time in UTC, and how long ago that was."""
    if since is None:
        return "an unknown time"
    return f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(since, now)} ago)"
