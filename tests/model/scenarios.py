"""Scenarios: where the explorations begin. Each is small, and adds one thing that the others do not have."""

from __future__ import annotations

from celery_redislock.protocol.tokens import Attempt

from .explore import Scenario
from .messages import LOST, Ending, Message
from .publishing import Publisher
from .world import Faults

A, A_RETRIED, A_REPLACED = Attempt("a", 0, 0), Attempt("a", 1, 0), Attempt("a", 0, 1)
NEXT, STRANGER, OTHER = Attempt("b", 0, 0), Attempt("x", 0, 0), Attempt("y", 0, 0)

SUCCESS, FAILURE, IGNORED = Ending("SUCCESS"), Ending("FAILURE"), Ending("IGNORED")
SYSTEM_EXIT = Ending("SystemExit", requeues=True)
REQUEUED, REJECTED = Ending("REJECTED", requeues=True), Ending("REJECTED")

ONE_MESSAGE = Scenario(
    "one message, acked late, delivered again and again",
    (Message(A),),
    {A: (SUCCESS,)},
    Faults(3, timeouts=2, deaths=1, lost_replies=1, pauses=1),
)
GIVEN_BACK = Scenario(
    "one message, which its own run may put back into the queue",
    (Message(A),),
    {A: (SUCCESS, SYSTEM_EXIT, REQUEUED)},
    Faults(2, timeouts=2, deaths=1, lost_replies=1, pauses=1),
)
ACKED_EARLY = Scenario(
    "one message, acked early, delivered again while it was reserved",
    (Message(A, acks_late=False),),
    {A: (FAILURE, SYSTEM_EXIT, REJECTED)},
    Faults(3, timeouts=2, deaths=1, lost_replies=1, pauses=1),
)
RETRIED = Scenario(
    "a message and its retry",
    (Message(A),),
    {A: (Ending("RETRY", Message(A_RETRIED)),), A_RETRIED: (SUCCESS,)},
    Faults(2, timeouts=2, deaths=1, lost_replies=1, pauses=1),
)
REPLACED = Scenario(
    "a message that replaces itself",
    (Message(A),),
    {A: (Ending("IGNORED", Message(A_REPLACED)), IGNORED), A_REPLACED: (SUCCESS,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1, pauses=1),
)
SUCCESSOR = Scenario(
    "a message, its successor and a stranger, that skip duplicates",
    (Message(A, policy="skip"), Message(STRANGER, policy="skip")),
    {A: (Ending("SUCCESS", Message(NEXT, policy="skip", parent="a")),), NEXT: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1, pauses=1),
)
STRANGERS = Scenario(
    "two strangers, of which one skips duplicates and the other takes its turn",
    (Message(A, policy="skip"), Message(STRANGER)),
    {A: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(2, timeouts=1, deaths=1, lost_replies=1, pauses=1),
)
UNDONE_LATE = Scenario(
    "one message and a stranger, of which one cannot be sent back when Redis does not answer, and undoes its acquire",
    (Message(A), Message(STRANGER)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(3, timeouts=1, lost_replies=1, late_undos=1, pauses=1),
)
BEGUN = Scenario(
    "a message that skips duplicates, whose worker dies, and a stranger; all rooms are full",
    (Message(A, policy="skip"), Message(STRANGER)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, deaths=1, lost_replies=1),
    limit=0,
)
HANDED_OVER = Scenario(
    "a key handed over to a retry, with copies",
    (Message(A),),
    {A: (Ending("RETRY", Message(A_RETRIED), hands_over=True),), A_RETRIED: (SUCCESS,)},
    Faults(2, timeouts=2, deaths=1, lost_replies=1, pauses=1),
)
HANDED_OVER_ONCE_MORE = Scenario(
    "a key handed over to a retry that a dead run had published before, and copies of both",
    (Message(A), Message(A_RETRIED, redelivered=True)),
    {A: (Ending("RETRY", Message(A_RETRIED, redelivered=True), hands_over=True),), A_RETRIED: (SUCCESS,)},
    Faults(),
)
HANDED_OVER_AMONG_STRANGERS = Scenario(
    "a key handed over to a retry, which a stranger wants too",
    (Message(A), Message(STRANGER, acks_late=False)),
    {A: (Ending("RETRY", Message(A_RETRIED), hands_over=True),), A_RETRIED: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1, pauses=1),
)
DISCONNECTED = Scenario(
    "one message, delivered again when the connection to the broker was lost",
    (Message(A),),
    {A: (SUCCESS, FAILURE)},
    Faults(2, disconnects=1, deaths=1, lost_replies=1),
)
REVOKED = Scenario(
    "a key handed over to a retry that is revoked",
    (Message(A),),
    {A: (Ending("RETRY", Message(A_RETRIED), hands_over=True),), A_RETRIED: (SUCCESS,)},
    Faults(2, timeouts=1, deaths=1, lost_replies=1, revokes=1),
)
RETRIED_WHEN_LOST = Scenario(
    "a key handed over to the retry of a run whose process has died, which a stranger wants too",
    (Message(A), Message(STRANGER, acks_late=False)),
    {A: (SUCCESS, Ending(LOST, Message(A_RETRIED), hands_over=True)), A_RETRIED: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, deaths=2, pauses=1, revokes=1),
)
PUBLISHED = Scenario(
    "two publishers of one job, acked late or early",
    (),
    {A: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1, pauses=1, failed_publishes=1, revokes=1),
    (Publisher(Message(A, policy="skip")), Publisher(Message(STRANGER, acks_late=False, policy="skip"))),
)
PUBLISHED_AND_RETRIED = Scenario(
    "a publisher of a job that retries itself, acked early, and one that may be answered with it",
    (),
    {
        A: (Ending("RETRY", Message(A_RETRIED, acks_late=False), hands_over=True),),
        A_RETRIED: (SUCCESS,),
        STRANGER: (SUCCESS,),
    },
    Faults(1, lost_replies=1, revokes=1),
    (Publisher(Message(A, acks_late=False)), Publisher(Message(STRANGER, acks_late=False))),
)

ONE_JOB = Scenario(
    "two publishers of one job, and one that has seen it end",
    (),
    {
        A: (Ending("SUCCESS", caller=Message(STRANGER), caller_of_job=True),),
        **dict.fromkeys((STRANGER, OTHER), (SUCCESS,)),
    },
    Faults(1, failed_publishes=1, revokes=1),
    (Publisher(Message(A)), Publisher(Message(OTHER))),
)
JOB_AMONG_OTHERS = Scenario(
    "two publishers of one job, whose key a message has, or waits for, that is none",
    (Message(NEXT, rank=1),),
    dict.fromkeys((A, NEXT, STRANGER), (SUCCESS,)),
    Faults(1, revokes=1, lapses=1),
    (Publisher(Message(A, rank=2)), Publisher(Message(STRANGER, rank=3))),
)
FOLLOWED_JOB = Scenario(
    "a job that retries itself and publishes its successor, beside another publisher of it",
    (),
    {
        A: (Ending("RETRY", Message(A_RETRIED), hands_over=True),),
        A_RETRIED: (Ending("SUCCESS", caller=Message(NEXT, parent="a"), caller_of_job=True),),
        **dict.fromkeys((NEXT, STRANGER), (SUCCESS,)),
    },
    Faults(),
    (Publisher(Message(A)), Publisher(Message(STRANGER))),
)
SLOW_PUBLISH = Scenario(
    "two publishers of one job, one of which may be slow, and a message that skips duplicates",
    (Message(NEXT, policy="skip"),),
    dict.fromkeys((A, NEXT, STRANGER), (SUCCESS,)),
    Faults(2, slow_publishes=1, failed_publishes=1),
    (Publisher(Message(A)), Publisher(Message(STRANGER))),
)
WINDOW = Scenario(
    "two publishers of a job that has windows, and one that has seen it end",
    (),
    {
        A: (Ending("FAILURE", caller=Message(STRANGER, window=True), caller_of_job=True),),
        **dict.fromkeys((STRANGER, OTHER), (SUCCESS,)),
    },
    Faults(1, failed_publishes=1, revokes=1, lapses=1, deaths=1, lost_replies=1),
    (Publisher(Message(A, window=True)), Publisher(Message(OTHER, window=True))),
)

SENT_BACK_TWICE = Scenario(
    "two strangers whose rooms are full, and a message that is sent back twice at once",
    (Message(A), Message(STRANGER, acks_late=False)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, doublings=1, deaths=1, lost_replies=1),
    limit=0,
)
OLD = Scenario(
    "two strangers that skip duplicates, one acked early, whose messages wait for too long",
    (Message(A, policy="skip"), Message(STRANGER, policy="skip", acks_late=False)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, timeouts=2, deaths=1),
)
REUSED = Scenario(
    "two publishes under one task id, and copies of them",
    (Message(A._replace(publish="1")), Message(A._replace(publish="2"), policy="skip")),
    {A._replace(publish="1"): (SUCCESS,), A._replace(publish="2"): (FAILURE,)},
    Faults(2, timeouts=1, deaths=1, lost_replies=1),
)
SEEN_TO_END = Scenario(
    "a message, and one of a caller who has seen it end; both skip duplicates",
    (Message(A, policy="skip"),),
    {A: (Ending("SUCCESS", caller=Message(STRANGER, policy="skip")),), STRANGER: (SUCCESS,)},
    Faults(2, timeouts=1, deaths=1, lost_replies=1, pauses=1),
)
JOB_SEEN_TO_END = Scenario(
    "a job, and one of a caller who has seen it end, acked early",
    (),
    {
        A: (Ending("FAILURE", caller=Message(STRANGER, policy="skip", acks_late=False), caller_of_job=True),),
        STRANGER: (SUCCESS,),
    },
    Faults(1, timeouts=1, deaths=1, lost_replies=1, failed_publishes=1),
    (Publisher(Message(A, policy="skip")),),
)
LINE = Scenario(
    "three messages that wait in the rooms of two workers",
    (Message(A, rank=1), Message(NEXT, rank=2, acks_late=False), Message(STRANGER, rank=3)),
    {A: (SUCCESS,), NEXT: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(),
    slots=(2, 1),
    has_others=True,
)
EQUALS_IN_LINE = Scenario(
    "three messages that wait in one worker, two of them with the same rank",
    (Message(A, rank=1), Message(NEXT, rank=1, acks_late=False), Message(STRANGER, rank=2)),
    {A: (SUCCESS,), NEXT: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(1, lapses=1, revokes=1),
    slots=(2,),
    has_others=True,
)
BROKEN_LINE = Scenario(
    "two messages that wait in the rooms of two workers, one of which may be gone",
    (Message(A, rank=1), Message(STRANGER, rank=2, acks_late=False)),
    {A: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(1, deaths=1, disconnects=1, lapses=1, lost_replies=1, revokes=1),
    slots=(1, 1),
)
BACKLOG = Scenario(
    "three messages that wait in a worker whose slots other tasks take as soon as they are free",
    LINE.messages,
    LINE.plays,
    Faults(1, lapses=1),
    slots=(2,),
    has_others=True,
)
TWINS_IN_LINE = Scenario(
    "a message that waits for a stranger, and copies of it",
    (Message(A, rank=1), Message(STRANGER, rank=2)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, disconnects=1, deaths=1, lapses=1, lost_replies=1),
)
HANDED_ON = Scenario(
    "a message that waits for a stranger, and is published again by its worker",
    (Message(A, rank=1), Message(STRANGER, rank=2, acks_late=False)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(2, handovers=1, doublings=1, deaths=1, disconnects=1),
)
FULL_ROOMS = Scenario(
    "a key reserved for a message, while the room of the only worker is full",
    (Message(A, rank=1), Message(NEXT, rank=2), Message(STRANGER, rank=3, acks_late=False)),
    {
        A: (Ending("RETRY", Message(A_RETRIED, rank=4), hands_over=True),),
        **dict.fromkeys((A_RETRIED, NEXT, STRANGER), (SUCCESS,)),
    },
    Faults(),
    slots=(1,),
    limit=2,
)
SKIPPED_IN_LINE = Scenario(
    "a message, one of a caller who has seen it end and skips duplicates, and copies of the first",
    (Message(A, rank=1),),
    {A: (Ending("SUCCESS", caller=Message(STRANGER, policy="skip", rank=2)),), STRANGER: (SUCCESS,)},
    Faults(2, timeouts=1, deaths=1, lapses=1),
)

# More than one at once: a lock with a limit has permits.

PERMITS = Scenario(
    "two permits for three messages",
    (Message(A, rank=1), Message(NEXT, rank=2, acks_late=False), Message(STRANGER, rank=3)),
    {A: (SUCCESS,), NEXT: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1, lapses=1, pauses=1),
    limits=(2,),
)
COPIES_IN_PERMITS = Scenario(
    "two permits for two messages and copies of them",
    (Message(A, rank=1), Message(STRANGER, rank=2)),
    {A: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(2, timeouts=2, deaths=1),
    limits=(2,),
)
PERMIT_HANDED_OVER = Scenario(
    "a permit handed over to a retry, with copies",
    (Message(A),),
    {A: (Ending("RETRY", Message(A_RETRIED), hands_over=True),), A_RETRIED: (SUCCESS,)},
    Faults(2, timeouts=2, deaths=1, lost_replies=1),
    limits=(2,),
)
PERMIT_HANDED_OVER_AMONG_STRANGERS = Scenario(
    "a permit handed over to a retry, which may be revoked, beside a stranger",
    (Message(A, rank=1), Message(STRANGER, rank=2, acks_late=False)),
    {A: (Ending("RETRY", Message(A_RETRIED, rank=3), hands_over=True),), A_RETRIED: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(1, revokes=1, lapses=1),
    limits=(2,),
)
SKIPPED_BESIDE_PERMITS = Scenario(
    "two permits, a message and its successor, and one of a caller who has seen another end; all skip duplicates",
    (Message(A, policy="skip"), Message(STRANGER, policy="skip")),
    {
        A: (Ending("SUCCESS", Message(NEXT, policy="skip", parent="a")),),
        STRANGER: (Ending("SUCCESS", caller=Message(OTHER, policy="skip")),),
        **dict.fromkeys((NEXT, OTHER), (SUCCESS,)),
    },
    Faults(1, lost_replies=1),
    limits=(2,),
)
PERMITS_OF_ONE_ROOM = Scenario(
    "two permits for four messages of one worker, of which one may be put back into the queue",
    (Message(A, rank=1), Message(NEXT, rank=2, acks_late=False), Message(STRANGER, rank=3), Message(OTHER, rank=4)),
    {A: (SUCCESS, REQUEUED), NEXT: (SUCCESS,), STRANGER: (FAILURE,), OTHER: (SUCCESS,)},
    Faults(),
    slots=(3,),
    limits=(2,),
)
PERMITS_OF_TWO_ROOMS = Scenario(
    "two permits for three messages that wait in the rooms of two workers",
    (Message(A, rank=1), Message(NEXT, rank=2, acks_late=False), Message(STRANGER, rank=3)),
    {A: (SUCCESS,), NEXT: (SUCCESS,), STRANGER: (FAILURE,)},
    Faults(1, lapses=1),
    slots=(2, 1),
    limits=(2,),
    has_others=True,
)
DEPLOY = Scenario(
    "two messages and a copy, while some workers know the limit 1 and some the limit 2",
    (Message(A, rank=1), Message(STRANGER, rank=2)),
    {A: (SUCCESS,), STRANGER: (SUCCESS,)},
    Faults(1, timeouts=1, deaths=1, lost_replies=1),
    limits=(1, 2),
)
LINE_IN_A_DEPLOY = Scenario(
    "three messages in the rooms of two workers, of which each knows the limits 1 and 2",
    (Message(A, rank=1), Message(NEXT, rank=2), Message(STRANGER, rank=3)),
    dict.fromkeys((A, NEXT, STRANGER), (SUCCESS,)),
    Faults(),
    slots=(1, 2),
    limits=(1, 2),
)
TWO_LIMITS_IN_LINE = Scenario(
    "four messages of one worker, some with the limit 1 and some with the limit 2",
    (*LINE_IN_A_DEPLOY.messages, Message(OTHER, rank=4)),
    dict.fromkeys((A, NEXT, STRANGER, OTHER), (SUCCESS,)),
    Faults(),
    slots=(3,),
    limits=(1, 2),
)

SCENARIOS = (
    ONE_MESSAGE,
    GIVEN_BACK,
    ACKED_EARLY,
    RETRIED,
    REPLACED,
    SUCCESSOR,
    STRANGERS,
    UNDONE_LATE,
    BEGUN,
    HANDED_OVER,
    HANDED_OVER_ONCE_MORE,
    HANDED_OVER_AMONG_STRANGERS,
    DISCONNECTED,
    REVOKED,
    RETRIED_WHEN_LOST,
    PUBLISHED,
    PUBLISHED_AND_RETRIED,
    ONE_JOB,
    JOB_AMONG_OTHERS,
    FOLLOWED_JOB,
    SLOW_PUBLISH,
    WINDOW,
    SENT_BACK_TWICE,
    OLD,
    REUSED,
    SEEN_TO_END,
    JOB_SEEN_TO_END,
    LINE,
    EQUALS_IN_LINE,
    BROKEN_LINE,
    BACKLOG,
    TWINS_IN_LINE,
    HANDED_ON,
    FULL_ROOMS,
    SKIPPED_IN_LINE,
    PERMITS,
    COPIES_IN_PERMITS,
    PERMIT_HANDED_OVER,
    PERMIT_HANDED_OVER_AMONG_STRANGERS,
    SKIPPED_BESIDE_PERMITS,
    PERMITS_OF_ONE_ROOM,
    PERMITS_OF_TWO_ROOMS,
    DEPLOY,
    LINE_IN_A_DEPLOY,
    TWO_LIMITS_IN_LINE,
)
