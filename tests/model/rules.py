"""Rules: the promises and excuses of the model, and the mistakes that it can be told to make."""

from __future__ import annotations

from enum import Enum

from promises import Excuse, Promise

#: The promises that the model checks. The others have to do with what it leaves out.
PROMISES = (
    Promise.AT_MOST_N,
    Promise.OWNER,
    Promise.FREED,
    Promise.NO_TWINS,
    Promise.NOT_AGAIN,
    Promise.NOT_DROPPED,
    Promise.POLICY,
    Promise.SERVED_ANEW,
    Promise.ANSWERED,
    Promise.ONE_JOB,
    Promise.ONE_IN_WINDOW,
    Promise.RESERVED,
    Promise.ENDS,
    Promise.ORDER,
    Promise.ONE_CALL,
    Promise.NOT_IDLE,
    Promise.SERVED,
)
#: The promises of merged calls, of rates and of fair turns: each has a small model of its own.
OF_MERGED_CALLS = (Promise.LATEST, Promise.NOT_STALE)
OF_RATES = (Promise.RATE,)
OF_FAIR_TURNS = (Promise.FAIR,)
#: The excuses that the model needs. A test shows that it needs each of them.
EXCUSES = (
    Excuse.ACKED_EARLY,
    Excuse.DIED_BEFORE_ACK,
    Excuse.PUBLISHED_TWICE,
    Excuse.ACK_TOO_LATE,
    Excuse.DISCONNECTED,
    Excuse.RELEASE_IN_DOUBT,
)


class Mistake(Enum):
    """What an implementation may get wrong. A test shows that each one breaks a promise."""

    __hash__ = object.__hash__  # fast, as that of `Phase`

    SAME_ID_IS_A_COPY = "the same task id is taken for a copy, whatever its attempt"
    NOTE_ON_SYSTEM_EXIT = "a run that SystemExit has cut short, in its body or after it, leaves a note"
    NOTE_ON_REQUEUE = "a message that was requeued leaves a note"
    NOTE_OF_A_DEAD_CHILD = "the main process leaves a note when it releases for a dead child"
    NO_NOTE = "no release leaves a note"
    OVERDUE_LEAVES_NO_NOTE = "a message that was held past the visibility timeout leaves no note"
    LOST_OUTSIDE_ITS_BODY_LEAVES_NO_NOTE = "a run whose connection was lost before or after its body leaves no note"
    CLAIM_OPENS_THE_HELD_KEY = "a run hands its key over under the nonce by which it still holds the key itself"
    CLAIM_IS_KEPT = "a run that has claimed its key holds it under the claim, which copies carry too"
    RELEASE_WITHOUT_OWNER_CHECK = "release deletes the key, whoever holds it"
    RENEW_WITHOUT_OWNER_CHECK = "renew extends the key, whoever holds it"
    OWN_GRANT_IS_A_CONFLICT = "an acquire that is sent again takes its own token for another's"
    LOST_KEY_IS_KEPT_FOR_NOBODY = "the main process keeps a dead child's key for a retry that it does not publish"
    RELEASE_WHILE_THE_CHILD_RUNS = "the main process releases at the hard time limit, before the child is dead"
    SUCCESSOR_MEETS_THE_POLICY = "a message that the holder itself published is skipped as a duplicate"
    BEGUN_WORK_MEETS_THE_POLICY = "a redelivered message is skipped as a duplicate"
    DOUBT_IS_FORGOTTEN = "a release that is in doubt is not sent again"
    DOUBT_LEAVES_NO_NOTE = "a release that is sent again leaves no note where no copy was seen"
    DOUBT_NOTES_UNFINISHED_WORK = "a release that is sent again leaves a note, though its message was requeued"
    DOUBT_NAMES_THE_NEXT_RUN = "a release that is sent again releases what its process runs by now"
    DOUBT_ASKS_AGAIN_AS_BEFORE = "an execution in doubt asks again with its token, which an undo on its way then frees"
    SECOND_GRANT_STORES_NOTHING = (
        "an acquire of an owner that has the key leaves its old token there, which an undo then frees"
    )
    UNDO_BY_OWNER = "an undo that comes late frees whatever its owner has"
    # This model has found the following mistakes in earlier versions of the code.
    FIRST_DELIVERY_IGNORES_ITS_COPY = "a copy's run leaves no note for the first delivery, which looks for none"
    OUTAGE_FORGETS_BEGUN_WORK = "a redelivered message that meets an outage comes back as if it were new"
    FINISHED_LEAVES_ITS_KEY = "an acquire that was granted, and is sent again, meets the note and leaves its key"
    GIVEN_UP_IS_FORGOTTEN = "a run hands its key over to a retry that was revoked before the run had ended"
    DROPPED_KEEPS_ITS_CLAIM = (
        "a copy that finds the note keeps its claim, and a second first run hands the key over to it"
    )
    FAILED_PUBLISH_LEAVES_ITS_KEY = "a publish that fails does not release the key"
    OLD_IS_BEGUN = "a message that has waited for long, or is redelivered before its early ack, is taken for begun"
    COMEBACK_LEAVES_NO_NOTE = "a message that was published again, and may have been sent twice then, leaves no note"
    RESENT_IN_VAIN_LEAVES_NO_NOTE = "a message that was published again, as it seemed in vain, leaves no note"
    REDELIVERED_LEAVES_NO_NOTE = "a message that the broker has delivered again leaves no note"
    NOTE_NAMES_NO_PUBLISH = "a second publish under one task id is taken for a copy of the first"
    ENDED_IS_A_HOLDER = "a run whose end its caller has seen is a conflict until it has released its key"
    NO_LOOKS = "a room that stands in line waits for its wake-up, and never looks"
    CALL_IS_AN_OFFER = "a room that has called one of those who wait in it leaves the key offered"
    RELEASE_OFFERS_NOTHING = "a key that is given back is not offered to the first in line"
    OFFER_NEVER_LAPSES = "an offer lives until its room has answered"
    ROOM_TAKES_WITHOUT_A_SLOT = "a room takes an offer though it has no slot for who waits"
    SECOND_ENDS_THE_CALL = "a room that has no slot for the second of those who wait ends the call of the first"
    ACK_BEFORE_THE_GRANT = "a task that is acked early is acked when it is accepted, and waits after that"
    STAND_IGNORES_A_SMALLER_RANK = "a room takes a free key though another one has a smaller rank"
    OFFERED_ROOM_IGNORES_A_SMALLER_RANK = "a room takes an offered key though another one has a smaller rank by now"
    FULL_ROOM_CLOSES_THE_WINDOW = "a worker whose room is full receives no message"
    CLAIM_WAITS_IN_LINE = "a message that waits does not see that the key is reserved for it by now"
    OFFER_IS_A_HOLDER = "a duplicate is skipped because the key is offered to somebody who waits"
    SECOND_PERMIT_FOR_A_COPY = "a copy takes a free permit before it has looked for the permit of its own attempt"
    CALLED_COPY_HAS_ITS_PERMIT = (
        "a copy that was called, or has a claim, has that permit though its attempt runs with another"
    )
    EARLY_RETRY_IS_FORGOTTEN = (
        "a permit is handed over to a retry that has begun with another permit before the run had ended"
    )
    SECOND_KEPT_PERMIT_IS_FORGOTTEN = (
        "a retry that was called takes that permit, and leaves the one reserved for it meanwhile"
    )
    BLIND_TO_HIGH_PERMITS = "a copy whose limit was lowered does not see that its attempt has a permit above the limit"
    CALL_NAMES_NO_RANK = "who was called takes all permits to which its room has called somebody for its own"
    EQUALS_SHARE_A_CALL = "two who wait in one room with the same rank are called by the same call"
    MAIN_PROCESS_KNOWS_ONE_PERMIT = "the main process gives up, or releases for a dead child, only the first permit"
    PERMIT_ABOVE_THE_LIMIT = "a permit is offered to a room whose limit is below the number of the permit"
    STAND_OFFERS_ONE_PERMIT = "a room that takes a permit leaves another free permit unoffered"
    NEWCOMER_PASSES_AN_OFFER = "a newcomer takes a free permit while another one is offered to a room where two wait"
    CALLED_IN_VAIN = "one that was called keeps its call although another task has taken the slot or the token for it"
    CALLS_WITHOUT_A_SLOT = "a room calls a waiter though no slot is free, and what was fetched runs before that one"
    STRANGER_TAKES_THE_SLOT = "a slot that becomes free goes to what was fetched, though a message waits for a free key"
    SECOND_CALL_ON_THE_WAY = "a room whose call has lapsed calls the next one while the first is still on the way"
    FREE_KEY_IS_ENOUGH = "a publish that finds the key free, or offered, does not ask who has the place in the queue"
    OTHERS_LEAVE_NO_PLACE = "a job that finds only others before it is sent without the place in the queue"
    ENDED_RUN_IS_OVERWRITTEN = "a publish takes the key of a run that has ended and has not released it"
    NEWER_JOB_IS_OVERWRITTEN = "a publish that may have seen one job end overwrites another one, reserved meanwhile"
    UNSENT_IS_AN_ANSWER = "a publish is answered with a job whose message has not been sent"
    UNSENT_IS_A_HOLDER = "a run is skipped in favour of a job whose message has not been sent"
    SENT_IS_NOT_SAID = "a publisher lets its reservation live longer, and does not say that its message is sent"
    SENT_IS_TAKEN_OVER = "a publish that has waited takes over what is reserved for a message that has been sent"
    ANY_UNSENT_IS_TAKEN_OVER = "a publish that has waited for one job to be sent takes over another one too"
    WINDOW_IS_NOT_HEEDED = "a publish looks for no job within its window if the key is free"
    WINDOW_IS_NOT_SAID = "a publisher does not say of its window that the message is sent"
    FAILED_PUBLISH_LEAVES_ITS_WINDOW = "a publish that fails leaves its window open"
    REVOKED_LEAVES_ITS_WINDOW = "a job that is revoked before it starts leaves its window open"
    PLACE_IS_KEPT = "a run that is granted its key keeps the place in the queue"
    CLAIMED_MESSAGE_MEETS_THE_POLICY = "a message whose reservation has lapsed is skipped as a duplicate"
