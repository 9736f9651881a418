"""What is promised, what is excused by name, and the mistakes that the model can be told to make."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """What is checked in every step, every state, or at the end."""

    ONE_BODY = "at most one body runs under the key, but for one that knows its lock as lost"
    OWN_KEY = "nobody releases or extends another's key"
    NOTHING_LEFT = "who ends alive leaves no key behind"
    NOT_DROPPED = "no attempt is dropped unfinished"
    NOT_AGAIN = "no attempt is started again after it finished"
    NOT_STUCK = "no key is left to a message that is not on its way"
    ANSWERED = "who is answered with a job gets one that runs, or whose publisher failed or that was revoked"
    POLICY = "a duplicate that nobody can have begun meets its policy"
    SERVED_ANEW = "who has seen a run end is not answered with it, nor skipped for it"
    ENDS = "whatever happened, everything can still come to its end"


class Excuse(Enum):
    """What the protocol does not prevent, each with the reason. A test shows that each one is needed."""

    ACKED_EARLY = "the process died, or gave up, after an early ack: Celery itself loses the message"
    DIED_BEFORE_ACK = "the process died between its last word to Redis or the broker and its ack"
    PUBLISHED_TWICE = "an attempt ran twice because its first run did not finish, and published its next one twice"
    ACK_TOO_LATE = "the visibility timeout passed between the release and the ack"
    DISCONNECTED = "the connection to the broker was lost before the body began or after it ended, and with it the ack"


class Mistake(Enum):
    """What an implementation may get wrong; each breaks a promise."""

    SAME_ID_IS_A_COPY = "the same task id is taken for a copy, whatever its attempt"
    NOTE_ON_SYSTEM_EXIT = "a run that SystemExit has cut short, in its body or after it, leaves a note"
    NOTE_ON_REQUEUE = "a message that was requeued leaves a note"
    NOTE_OF_A_DEAD_CHILD = "the main process leaves a note when it releases for a dead child"
    NO_NOTE = "no release leaves a note"
    NO_NOTE_FOR_AN_UNSEEN_COPY = "held past the visibility timeout, no note where no copy was seen"
    CLAIM_OPENS_THE_HELD_KEY = "a hand-over gives away the token that the giver itself still holds by"
    CLAIM_IS_KEPT = "who claims a key goes on under the hand-over token, which copies carry too"
    RELEASE_WITHOUT_OWNER_CHECK = "release deletes the key, whoever holds it"
    RENEW_WITHOUT_OWNER_CHECK = "renew extends the key, whoever holds it"
    OWN_GRANT_IS_A_CONFLICT = "an acquire that is sent again takes its own token for another's"
    RELEASE_WHILE_THE_CHILD_RUNS = "the main process releases at the hard time limit, before the child is dead"
    SUCCESSOR_MEETS_THE_POLICY = "what the holder itself published is skipped as a duplicate"
    BEGUN_WORK_MEETS_THE_POLICY = "a redelivered message is skipped as a duplicate"
    # Found by this model in the code of its time:
    FIRST_DELIVERY_IGNORES_ITS_COPY = "who runs a copy leaves no note for the first delivery, which reads none"
    OUTAGE_FORGETS_BEGUN_WORK = "a redelivered message that meets an outage comes back as a fresh one"
    FINISHED_LEAVES_ITS_KEY = "an acquire that was granted, and is sent again, meets the note and leaves its key"
    GIVEN_UP_IS_FORGOTTEN = "a retry that is revoked while the run that sent it goes on is left its key nevertheless"
    DROPPED_KEEPS_ITS_CLAIM = "a copy that finds the note gives up no claim, and is left a key by a second first run"
    FAILED_PUBLISH_LEAVES_ITS_KEY = "a publish that fails does not give the key back"
    OLD_IS_BEGUN = "a message that has waited for long, or comes again before its early ack, is taken for begun"
    COMEBACK_LEAVES_NO_NOTE = "a message that has come back, and may have been sent twice then, leaves no note"
    NOTE_NAMES_NO_PUBLISH = "a second publish under one task id is taken for a copy of the first"
    ENDED_IS_A_HOLDER = "a run whose end its caller has seen is a conflict until it has released its key"
    CLAIMED_MESSAGE_MEETS_THE_POLICY = "a message whose key has lapsed is skipped as a duplicate"
