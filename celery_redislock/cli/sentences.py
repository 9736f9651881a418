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
    WAITS = "Task {task} WAITS in line for {lock} in worker {worker}, for {waited} so far."
    AHEAD = "{before} ahead of it; {messages} in line in the {workers} that answered."
    TURN = "Its group {group} has {messages} in line, and takes turns with {others} (lock_fair). Its rank is {rank}."
    NEXT = (
        "{free} is free, and the worker has a process for it: it starts within seconds, unless an earlier message waits"
        " in a worker that did not answer. If the key was deleted by hand or lost, it starts within a minute."
    )
    FREE = "{free} is free: the messages ahead of it go first."
    NO_PROCESS = f"{{free}} is free, but the worker has no free process for it yet. {_BUSY}"
    NO_RATE = "{free} is free, but the task's rate_limit holds the message back."
    NO_SERVER = "{free} is free, but the worker cannot reach the lock server: check its log."
    ELSEWHERE = "{free} is free on {here}, but the worker uses {there}. Are they the same server?"
    # The message is in a worker, but does not wait for a lock.
    RUNS = "Task {task} RUNS in worker {worker}, since {since}."
    HOLDS = "It has held {lock} since {since}."
    NEEDS_NONE = "It needs no lock."
    NOT_ASKED = "It has not asked for its lock yet."
    OTHER_KEY = "Its publisher reserved {reserved}, but its worker computed {lock}: do both run the same version?"
    HOLDS_NOTHING = "It does not hold {lock}: it lost it, runs without it (lock_on_outage), or is just ending."
    DIED = "Task {task} was in a process of worker {worker} that HAS DIED. The worker releases its lock if it held one."
    COMES_AGAIN = "Its message will soon be delivered again, or its next attempt sent."
    COMES_NOT = "Its message is not delivered again: its result becomes WorkerLostError. Send the task again."
    CALLED = "Task {task} has its TURN for {lock}: worker {worker} starts it as soon as a process accepts it."
    RESERVED = f"Task {{task}} has NOT STARTED: worker {{worker}} has no free process for it yet. {_BUSY}"
    SCHEDULED = "Task {task} is NOT DUE: worker {worker} keeps its message until its eta, {eta}."
    ASLEEP = (
        "Task {task} is NOT DUE: it sleeps in worker {worker} until its lock_debounce is over, which each new call puts"
        " off."
    )
    LIMITED = "Task {task} has NOT STARTED: the task's rate_limit holds its message back in worker {worker}."
    # The result backend knows the task.
    DONE = "Task {id} HAS RUN: its result is SUCCESS{at}."
    JOINED = "Task {id} HAS NOT RUN: it joined task {other} and has that task's result, {status}{at}."
    SKIPPED = "Task {id} WAS SKIPPED{at}: {reason} (lock_on_conflict is skip)."
    SUPERSEDED = (
        "Task {id} WAS SUPERSEDED{at}: {reason}. A run with a newer call's arguments began first, so its own are out of"
        " date (lock_arguments is latest)."
    )
    REPLACED = "Task {id} WAS REPLACED{at}: {reason}, a newer call (lock_on_conflict is replace)."
    REVOKED = "Task {id} WAS REVOKED{at}: {reason}."
    REFUSED = "Task {id} FAILED{at}: {reason}."
    CUT_SHORT = "Task {id} WAS CUT SHORT{at}: its process died or was killed ({error}). Its work may be partly done."
    CANCELLED = "Task {id} WAS CUT SHORT: its worker stopped or lost the broker. Without acks_late, send it again."
    NOT_STORED = "Task {id} HAS RUN, but its result could not be stored or passed on{at}: {error}. Its work is done."
    FAILED = "Task {id} FAILED{at} with {error}."
    CHAIN = "In a chain, the tasks after a failed or revoked one get its result and never start."
    HAD_TO_WAIT = """\
Task {id} HAD TO WAIT: when it last asked, {conflict}. Nothing newer is known; no worker that answered has it. Either
- it is in the broker's queue, put back by a worker that shut down, or for up to {pause} by a full one; or
- its worker keeps or runs it, but does not answer: it is shutting down, too busy, cut off or without remote control; or
- its worker died while it waited: {again}; or
- it got its turn, and its worker died in its run: without acks_late it is lost, so send it again; or
- it has run, but its result could not be stored: its worker's log says so."""
    RETRIES = "Task {id} HAS STARTED and will RUN AGAIN{after}. No worker that answered has its message yet."
    STARTED = (
        "Task {id} HAS STARTED, but no worker that answered runs it: its worker is shutting down, too busy, cut off or"
        " dead, or its message is back in the broker's queue. If its worker is dead and the task has acks_late,"
        " {again}; otherwise send it again."
    )
    STATUS = "Task {id} has the state {status}{at}."
    # The lock server knows the task.
    HOLDS_SOMEWHERE = "The task HOLDS a lock, but no worker that answered runs it."
    QUEUED = (
        "The task has NOT STARTED: its message is in the broker's queue, in a worker that did not answer, or lost. If"
        " that worker is dead, {again}. If the queue is empty and no worker is silent, release the key and send the"
        " task again."
    )
    SENDING = "The task has NOT STARTED: its publisher is sending its message, or died before it could confirm that."
    NEXT_ATTEMPT = "Its key is kept for its next attempt, which no worker that answered has."
    COOLS = "The task HAS RUN successfully."
    # Who holds a key.
    HELD = "{key} is held by {who}, since {since}; {ends}."
    STOPPING = "It is ASKED TO STOP: task {newer}, a newer call, replaces it once its body has ended."
    FOREIGN = "{key} is held by another library's lock, or by a `Lock` with a custom token; {ends}."
    KEPT = "{key} is kept for {who}, since {since}, for another {ttl}."
    SPENT = "The rate of {key}{rate} is used up until {until}."
    CALLS = "So far it stands for {calls}."
    RENEWED = "acquired or renewed {ago} ago, so its process was alive then"
    NOT_RENEWED = (
        "last renewed {ago} ago, though a renewal is due every {every} with the lock_lease set here: its process is"
        " dead, hanging or cut off from the lock server, and the key is free in {ttl}"
    )
    HELD_TOO_LONG = "its lock_max_hold is over, so it is no longer renewed, and the key is free in {ttl}"
    ENDS = "it expires in {ttl} unless renewed"
    NEVER_ENDS = "it never expires"
    SILENT = (
        "Its worker {worker} does NOT ANSWER: it is shutting down, busy, cut off or dead, uses another broker, or has"
        " no remote control."
    )
    # Nothing knows the task, or not everything answered.
    UNKNOWN = """\
No worker, result or lock knows this task.
Asked: {asked}.{unasked}
It may be in the broker's queue, have ended without a stored result, have died with its worker, or never have been sent.
Search the workers' logs for its id, and check the length of its queue."""
    NO_BACKEND = " The app's result backend cannot be queried ({scheme})."
    BACKEND_AWAY = " Could not query the result backend: {error}."
    WORKERS_AWAY = "Could not ask the workers: {error}."

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
    at = since and f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(since, now)} ago)"
    return at or "an unknown time"
