"""The promises of this package and the excuses for breaking one: each has one name and one sentence.

The model (tests/model), the mutants (mutants/) and the chaos run (chaos/) name them, and docs/how-it-is-tested.md lists
them. docs/guarantees.md explains them at length.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Promise(Enum):
    """What holds, whatever happens to processes, connections and servers, unless an `Excuse` applies."""

    AT_MOST_N = "At most `lock_limit` runs hold a key at once: one, unless you set it"
    OWNER = "Only its owner releases or extends a lock"
    TOLD = "A holder that loses its lock knows it at its own deadline at the latest"
    FREED = "However a run or a publish ends, no key stays locked"
    NO_TWINS = "No message runs while a copy of it runs"
    NOT_AGAIN = "No message runs again once it has finished"
    NOT_DROPPED = "No task is dropped because a lock lapsed, a message came twice or Redis was down"
    POLICY = "A duplicate meets its policy, and nothing else does"
    SERVED_ANEW = "A caller that has seen a run end is not answered with that run, and not skipped because of it"
    ANSWERED = "A publish is answered only with a job that its caller can wait for"
    ONE_JOB = "While a job is queued, waiting or running, no second one is sent"
    LATEST = "An accepted call is followed by a run with its arguments or later ones"
    NOT_STALE = "The call numbers of the bodies that begin never go down"
    REPLACED = "A run is stopped only for a newer call of its task, and a job that was stopped does not run again"
    ONE_IN_WINDOW = "Within `lock_window` of a publish, no second job is sent"
    RATE = "In any period of a `lock_rate`, no more runs of a key begin than it allows"
    RESERVED = "A key is reserved for one message, and only while that message may still come"
    ENDS = "Every message that waits can still run, whatever has happened"
    ORDER = "Waiting messages are called in the order of their ranks, and none takes a key that is kept for another"
    FAIR = "While messages of two groups wait for a key, neither gets more than a turn ahead of its share"
    ONE_CALL = "One offer of a key calls one message"
    NOT_IDLE = "No key is left free while a message that could run waits for it"
    SERVED = "A free slot goes to a message that waits for a free key before anything else that was fetched"
    ACKS = "A waiting message stays with the broker, and its worker goes on fetching"
    FENCE = "Each holder has a greater fencing number than all holders before it"
    KEYS = "Equal calls have one key, and different calls have different keys"
    CONTEXT = "A lock is held by the process, the thread and the context that acquired it"
    CHEAP = "A waiting message costs few commands and little memory"
    NO_ERRORS = "The package logs no error of its own, and its keeper never fails"


class Excuse(StrEnum):
    """Why a promise may be broken: what no client of Redis and no user of Celery can prevent."""

    ACKED_EARLY = "the message was acked early, and its process died or could not return it to the broker"
    DIED_BEFORE_ACK = "the process died between its last command and its ack"
    ACK_TOO_LATE = "the visibility timeout passed between the release and the ack"
    DISCONNECTED = (
        "the run ended before its worker noticed that the connection to the broker, and with it the ack, was lost"
    )
    RELEASE_IN_DOUBT = (
        "the connection to Redis was lost before the release was answered, and the process died, or its lease ended,"
        " before the release was sent again"
    )
    PUBLISHED_TWICE = "the message was published twice: by two runs of the attempt before it, or by kombu"
    UNFINISHED = "the process died before the run had finished, so its message came again"
    KNEW_OF_THE_LOSS = "the holder had been told that its lock was lost"
    STOOD_STILL = "the holder's process stood still past its lease"
    WENT_ON = "the first run went on after it had lost its lock"
    STOOD_STILL_BEFORE_ITS_BODY = "the process stood still between the grant and the body"
    STOOD_STILL_WITH_THE_MESSAGE = "a worker stood still as it received the message, so it did not know of its copy"
    DATA_LOST = "the lock server lost its data"
    UNREACHABLE = "the lock server could not be reached"
    GIVEN_BACK = "the worker was shutting down when the run ended, and gave the message back unacked"
    SENT_BACK_UNACKED = (
        "the message was sent back, and its worker ended, stood still or lost its connection before the ack"
    )
    HUNG = "the worker hung in Celery's own code before the ack"
    TAKEN_BY_KOMBU = "kombu had taken the message from the queue when its worker was killed"
    KEPT_BY_KOMBU = "the worker ended with the message, and kombu gave it to no other"
    KILLED_BEFORE_REDELIVERY = "the process was killed, so its key was free until the message was delivered again"
    NOT_HANDED_OVER = "the key could not be handed over to the retry while the lock server was down"
    NO_FREE_SLOT = "the worker of the waiting message had no free slot"
    SERVED_OTHERS = "the free slots went to messages that waited for other keys"
