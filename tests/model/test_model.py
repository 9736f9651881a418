"""The protocol on paper: every interleaving of up to three executions, with all faults that may happen to them.

Where a test fails, its message tells the way to the broken promise, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.protocol.scripts import Tag
from promises import Excuse, Promise
from tests.lab.servers import Valkey

from .commands import Acquire, Command, Enter, GiveUp, HandOver, Leave, Release, Renew, Reserve, Stand
from .effects import apply
from .executions import IN_BODY, Phase
from .explore import explore
from .publishing import Stage
from .real import Keys, follow, plain, small_lines, small_permits, small_places
from .rules import EXCUSES, Mistake
from .scenarios import (
    ACKED_EARLY,
    BACKLOG,
    BEGUN,
    BROKEN_LINE,
    COPIES_IN_PERMITS,
    DEPLOY,
    DISCONNECTED,
    EQUALS_IN_LINE,
    FOLLOWED_JOB,
    FULL_ROOMS,
    GIVEN_BACK,
    HANDED_ON,
    HANDED_OVER,
    HANDED_OVER_AMONG_STRANGERS,
    HANDED_OVER_ONCE_MORE,
    JOB_AMONG_OTHERS,
    JOB_SEEN_TO_END,
    LINE,
    LINE_IN_A_DEPLOY,
    OLD,
    ONE_JOB,
    ONE_MESSAGE,
    PERMIT_HANDED_OVER,
    PERMIT_HANDED_OVER_AMONG_STRANGERS,
    PERMITS,
    PERMITS_OF_ONE_ROOM,
    PERMITS_OF_TWO_ROOMS,
    PUBLISHED,
    PUBLISHED_AND_RETRIED,
    REPLACED,
    RETRIED,
    RETRIED_WHEN_LOST,
    REUSED,
    REVOKED,
    SCENARIOS,
    SEEN_TO_END,
    SENT_BACK_TWICE,
    SKIPPED_BESIDE_PERMITS,
    SKIPPED_IN_LINE,
    SLOW_PUBLISH,
    STRANGERS,
    SUCCESSOR,
    TWINS_IN_LINE,
    TWO_LIMITS_IN_LINE,
    UNDONE_LATE,
    WINDOW,
)
from .server import Server, limit_of

#: The explorations take a minute of a CPU of its own, which a loaded machine does not have.
pytestmark = pytest.mark.timeout(900)

FOUND_IN = {
    Mistake.DOUBT_IS_FORGOTTEN: (ONE_MESSAGE, Promise.FREED),
    Mistake.DOUBT_LEAVES_NO_NOTE: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Mistake.DOUBT_NOTES_UNFINISHED_WORK: (GIVEN_BACK, Promise.NOT_DROPPED),
    Mistake.DOUBT_NAMES_THE_NEXT_RUN: (BROKEN_LINE, Promise.OWNER),
    Mistake.DOUBT_ASKS_AGAIN_AS_BEFORE: (UNDONE_LATE, Promise.OWNER),
    Mistake.SECOND_GRANT_STORES_NOTHING: (UNDONE_LATE, Promise.OWNER),
    Mistake.UNDO_BY_OWNER: (UNDONE_LATE, Promise.OWNER),
    Mistake.SAME_ID_IS_A_COPY: (RETRIED, Promise.NOT_DROPPED),
    Mistake.NOTE_ON_SYSTEM_EXIT: (GIVEN_BACK, Promise.NOT_DROPPED),
    Mistake.NOTE_ON_REQUEUE: (GIVEN_BACK, Promise.NOT_DROPPED),
    Mistake.NOTE_OF_A_DEAD_CHILD: (ONE_MESSAGE, Promise.NOT_DROPPED),
    Mistake.NO_NOTE: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Mistake.OVERDUE_LEAVES_NO_NOTE: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Mistake.LOST_OUTSIDE_ITS_BODY_LEAVES_NO_NOTE: (DISCONNECTED, Promise.NOT_AGAIN),
    Mistake.REDELIVERED_LEAVES_NO_NOTE: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Mistake.CLAIM_OPENS_THE_HELD_KEY: (HANDED_OVER, Promise.AT_MOST_N),
    Mistake.CLAIM_IS_KEPT: (HANDED_OVER, Promise.AT_MOST_N),
    Mistake.RELEASE_WITHOUT_OWNER_CHECK: (ONE_MESSAGE, Promise.OWNER),
    Mistake.RENEW_WITHOUT_OWNER_CHECK: (ONE_MESSAGE, Promise.OWNER),
    Mistake.OWN_GRANT_IS_A_CONFLICT: (ONE_MESSAGE, Promise.FREED),
    Mistake.LOST_KEY_IS_KEPT_FOR_NOBODY: (RETRIED_WHEN_LOST, Promise.RESERVED),
    Mistake.RELEASE_WHILE_THE_CHILD_RUNS: (GIVEN_BACK, Promise.AT_MOST_N),
    Mistake.SUCCESSOR_MEETS_THE_POLICY: (SUCCESSOR, Promise.NOT_DROPPED),
    Mistake.BEGUN_WORK_MEETS_THE_POLICY: (STRANGERS, Promise.NOT_DROPPED),
    Mistake.FIRST_DELIVERY_IGNORES_ITS_COPY: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Mistake.OUTAGE_FORGETS_BEGUN_WORK: (BEGUN, Promise.NOT_DROPPED),
    Mistake.FINISHED_LEAVES_ITS_KEY: (ONE_MESSAGE, Promise.FREED),
    Mistake.GIVEN_UP_IS_FORGOTTEN: (REVOKED, Promise.RESERVED),
    Mistake.FAILED_PUBLISH_LEAVES_ITS_KEY: (PUBLISHED, Promise.FREED),
    Mistake.DROPPED_KEEPS_ITS_CLAIM: (HANDED_OVER_ONCE_MORE, Promise.RESERVED),
    Mistake.CLAIMED_MESSAGE_MEETS_THE_POLICY: (PUBLISHED, Promise.NOT_DROPPED),
    Mistake.FREE_KEY_IS_ENOUGH: (ONE_JOB, Promise.ONE_JOB),
    Mistake.OTHERS_LEAVE_NO_PLACE: (JOB_AMONG_OTHERS, Promise.ONE_JOB),
    Mistake.ENDED_RUN_IS_OVERWRITTEN: (ONE_JOB, Promise.OWNER),
    Mistake.NEWER_JOB_IS_OVERWRITTEN: (ONE_JOB, Promise.ONE_JOB),
    Mistake.UNSENT_IS_AN_ANSWER: (ONE_JOB, Promise.ANSWERED),
    Mistake.UNSENT_IS_A_HOLDER: (SLOW_PUBLISH, Promise.NOT_DROPPED),
    Mistake.SENT_IS_NOT_SAID: (ONE_JOB, Promise.ONE_JOB),
    Mistake.SENT_IS_TAKEN_OVER: (SLOW_PUBLISH, Promise.ONE_JOB),
    Mistake.ANY_UNSENT_IS_TAKEN_OVER: (WINDOW, Promise.ONE_IN_WINDOW),
    Mistake.WINDOW_IS_NOT_HEEDED: (WINDOW, Promise.ONE_IN_WINDOW),
    Mistake.WINDOW_IS_NOT_SAID: (WINDOW, Promise.ONE_IN_WINDOW),
    Mistake.FAILED_PUBLISH_LEAVES_ITS_WINDOW: (WINDOW, Promise.FREED),
    Mistake.REVOKED_LEAVES_ITS_WINDOW: (WINDOW, Promise.FREED),
    Mistake.PLACE_IS_KEPT: (ONE_JOB, Promise.RESERVED),
    Mistake.OLD_IS_BEGUN: (OLD, Promise.POLICY),
    Mistake.COMEBACK_LEAVES_NO_NOTE: (SENT_BACK_TWICE, Promise.NOT_AGAIN),
    Mistake.NOTE_NAMES_NO_PUBLISH: (REUSED, Promise.NOT_DROPPED),
    Mistake.ENDED_IS_A_HOLDER: (SEEN_TO_END, Promise.SERVED_ANEW),
    Mistake.NO_LOOKS: (LINE, Promise.ENDS),
    Mistake.CALL_IS_AN_OFFER: (LINE, Promise.ONE_CALL),
    Mistake.RELEASE_OFFERS_NOTHING: (LINE, Promise.NOT_IDLE),
    Mistake.OFFER_NEVER_LAPSES: (BROKEN_LINE, Promise.ENDS),
    Mistake.ROOM_TAKES_WITHOUT_A_SLOT: (LINE, Promise.NOT_IDLE),
    Mistake.CALLED_IN_VAIN: (LINE, Promise.NOT_IDLE),
    Mistake.CALLS_WITHOUT_A_SLOT: (LINE, Promise.SERVED),
    Mistake.STRANGER_TAKES_THE_SLOT: (BACKLOG, Promise.SERVED),
    Mistake.SECOND_CALL_ON_THE_WAY: (BACKLOG, Promise.ONE_CALL),
    Mistake.SECOND_ENDS_THE_CALL: (LINE, Promise.ORDER),
    Mistake.ACK_BEFORE_THE_GRANT: (BROKEN_LINE, Promise.NOT_DROPPED),
    Mistake.RESENT_IN_VAIN_LEAVES_NO_NOTE: (HANDED_ON, Promise.NOT_AGAIN),
    Mistake.STAND_IGNORES_A_SMALLER_RANK: (BROKEN_LINE, Promise.ORDER),
    Mistake.OFFERED_ROOM_IGNORES_A_SMALLER_RANK: (LINE, Promise.ORDER),
    Mistake.FULL_ROOM_CLOSES_THE_WINDOW: (FULL_ROOMS, Promise.ENDS),
    Mistake.CLAIM_WAITS_IN_LINE: (HANDED_OVER, Promise.ENDS),
    Mistake.OFFER_IS_A_HOLDER: (SKIPPED_IN_LINE, Promise.NOT_DROPPED),
    Mistake.SECOND_PERMIT_FOR_A_COPY: (COPIES_IN_PERMITS, Promise.NO_TWINS),
    Mistake.CALLED_COPY_HAS_ITS_PERMIT: (PERMITS, Promise.NO_TWINS),
    Mistake.EARLY_RETRY_IS_FORGOTTEN: (PERMIT_HANDED_OVER_AMONG_STRANGERS, Promise.RESERVED),
    Mistake.SECOND_KEPT_PERMIT_IS_FORGOTTEN: (PERMIT_HANDED_OVER_AMONG_STRANGERS, Promise.RESERVED),
    Mistake.BLIND_TO_HIGH_PERMITS: (DEPLOY, Promise.NO_TWINS),
    Mistake.CALL_NAMES_NO_RANK: (PERMITS_OF_ONE_ROOM, Promise.ORDER),
    Mistake.EQUALS_SHARE_A_CALL: (EQUALS_IN_LINE, Promise.ONE_CALL),
    Mistake.MAIN_PROCESS_KNOWS_ONE_PERMIT: (PERMIT_HANDED_OVER_AMONG_STRANGERS, Promise.RESERVED),
    Mistake.PERMIT_ABOVE_THE_LIMIT: (LINE_IN_A_DEPLOY, Promise.NOT_IDLE),
    Mistake.STAND_OFFERS_ONE_PERMIT: (PERMITS_OF_ONE_ROOM, Promise.NOT_IDLE),
    Mistake.NEWCOMER_PASSES_AN_OFFER: (PERMITS_OF_ONE_ROOM, Promise.ORDER),
}
NEEDED_IN = {
    Excuse.ACKED_EARLY: (ACKED_EARLY, Promise.NOT_DROPPED),
    Excuse.DIED_BEFORE_ACK: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Excuse.PUBLISHED_TWICE: (RETRIED, Promise.NOT_AGAIN),
    Excuse.ACK_TOO_LATE: (ONE_MESSAGE, Promise.NOT_AGAIN),
    Excuse.DISCONNECTED: (DISCONNECTED, Promise.NOT_AGAIN),
    Excuse.RELEASE_IN_DOUBT: (ONE_MESSAGE, Promise.NOT_AGAIN),
}


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_the_promise_holds_in_every_interleaving_of(name, explorations):
    assert explorations[name].broken is None, str(explorations[name])


@pytest.mark.parametrize(
    ("scenario", "floor"),
    [
        (ONE_MESSAGE, 5000),
        (GIVEN_BACK, 2000),
        (ACKED_EARLY, 4000),
        (RETRIED, 10_000),
        (REPLACED, 400),
        (SUCCESSOR, 2500),
        (STRANGERS, 10_000),
        (BEGUN, 1500),
        (UNDONE_LATE, 500),
        (HANDED_OVER, 12_000),
        (HANDED_OVER_ONCE_MORE, 100),
        (HANDED_OVER_AMONG_STRANGERS, 4000),
        (DISCONNECTED, 200),
        (REVOKED, 10_000),
        (RETRIED_WHEN_LOST, 5000),
        (PUBLISHED, 8000),
        (PUBLISHED_AND_RETRIED, 8000),
        (ONE_JOB, 8000),
        (JOB_AMONG_OTHERS, 5000),
        (FOLLOWED_JOB, 1000),
        (SLOW_PUBLISH, 1000),
        (WINDOW, 5000),
        (SENT_BACK_TWICE, 1000),
        (OLD, 1000),
        (REUSED, 1000),
        (SEEN_TO_END, 1000),
        (JOB_SEEN_TO_END, 1000),
        (LINE, 2000),
        (EQUALS_IN_LINE, 1000),
        (BROKEN_LINE, 5000),
        (BACKLOG, 1000),
        (TWINS_IN_LINE, 10_000),
        (HANDED_ON, 1000),
        (FULL_ROOMS, 300),
        (SKIPPED_IN_LINE, 5000),
        (PERMITS, 10_000),
        (COPIES_IN_PERMITS, 8000),
        (PERMIT_HANDED_OVER, 12_000),
        (PERMIT_HANDED_OVER_AMONG_STRANGERS, 500),
        (SKIPPED_BESIDE_PERMITS, 5000),
        (PERMITS_OF_ONE_ROOM, 3000),
        (PERMITS_OF_TWO_ROOMS, 4000),
        (DEPLOY, 2500),
        (LINE_IN_A_DEPLOY, 1500),
        (TWO_LIMITS_IN_LINE, 6000),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_exploration_is_not_empty_of(scenario, floor, explorations):
    found = explorations[scenario.name]
    assert len(found.states) > floor
    assert scenario.publishers or any(len(world.executions) >= 3 for world in found.worlds)
    assert any(world.is_over for world in found.worlds)


def test_what_fate_can_do_has_really_happened(explorations):
    """If some fault had never happened, it would prove little that the promises hold."""
    worlds = [world for found in explorations.values() for world in found.worlds]
    assert [sight for sight, is_seen in SIGHTS.items() if not any(map(is_seen, worlds))] == []


def test_copies_wait_unseen_and_are_seen(explorations):
    """There are two reasons for a note: a copy has marked the key, or the message is overdue, so a copy may wait."""
    asked = {pair for found in explorations.values() for pair in found.asked}
    releases = [(server, command) for server, command in asked if isinstance(command, Release) and command.note]
    own = [(key, command) for server, command in releases for key in server.keys if key.nonce == command.nonce]
    assert any(key.marked and not command.unseen_copy for key, command in own)
    assert any(command.unseen_copy and not key.marked for key, command in own)
    assert any(isinstance(command, HandOver) for _, command in asked)
    assert any(isinstance(command, Acquire) and command.attempt in server.notes for server, command in asked)


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    scenario, promise = FOUND_IN[mistake]
    found = explore(scenario, {mistake})
    assert found.broken is promise, str(found)
    assert found.trace


@pytest.mark.parametrize("excuse", EXCUSES, ids=lambda excuse: excuse.value)
def test_the_promise_needs_the_exception_that(excuse):
    """An excuse that no scenario needs would hide mistakes."""
    scenario, promise = NEEDED_IN[excuse]
    found = explore(scenario, excuses=frozenset(EXCUSES) - {excuse})
    assert found.broken is promise, str(found)


def test_a_lock_that_is_lost_unknown_to_its_holder_would_break_the_promise(explorations):
    """The exception in the promise `AT_MOST_N` is needed: two bodies do run, of which one knows of its loss."""
    worlds = explorations[ONE_MESSAGE.name].worlds
    bodies = [[one for one in world.executions if one.phase in IN_BODY] for world in worlds]
    assert any(len(running) > 1 for running in bodies)


def test_a_broken_promise_is_told_step_by_step():
    scenario, promise = FOUND_IN[Mistake.NOTE_ON_SYSTEM_EXIT]
    story = str(explore(scenario, {Mistake.NOTE_ON_SYSTEM_EXIT}))
    assert promise.value in story
    assert "n1 is granted the key and starts a/0/0" in story
    assert "finds the note and is dropped" in story


def _phases(world):
    return {one.phase for one in world.executions}


def _holders(world):
    return {key.nonce for key in world.server.keys}


def _nonces(world):
    return {one.nonce for one in world.executions}


def _rooms(world):
    return {one.home for one in world.executions}


def _doubtful(world):
    return [one for one in world.executions if one.phase is Phase.IN_DOUBT]


#: What must have been seen in some state.
SIGHTS = {
    "a copy in the queue": lambda world: any(message.redelivered for message in world.queue),
    "a message that came back": lambda world: any(message.returned for message in world.queue),
    "a marked key": lambda world: any(key.marked for key in world.server.keys),
    "a note": lambda world: bool(world.server.notes),
    "a dead child": lambda world: Phase.CHILD_DEAD in _phases(world),
    "a dead child's key that is kept for its retry": lambda world: Phase.KEPT in _phases(world),
    "a key whose holder is gone": lambda world: any(nonce[0] == "n" for nonce in _holders(world) - _nonces(world)),
    "a lost lock": lambda world: any(one.lost for one in world.executions),
    "an unanswered acquire": lambda world: Phase.ASKED in _phases(world),
    "an undo on its way": lambda world: bool(world.late),
    "a release in doubt, before the ack": lambda world: any(one.unacked for one in _doubtful(world)),
    "a release in doubt, after the ack": lambda world: any(not one.unacked for one in _doubtful(world)),
    "a release in doubt that has not run": lambda world: any(one.nonce in _holders(world) for one in _doubtful(world)),
    "a run beside a release in doubt": lambda world: bool(_doubtful(world)) and bool(_phases(world) & IN_BODY),
    "a hand-over in doubt": lambda world: any(one.hold.gives for one in _doubtful(world)),
    "a claim": lambda world: any(message.claim for message in world.queue),
    "a reserved place": lambda world: world.server.queued is not None,
    "a job that is being sent": lambda world: any(key.sending for key in world.server.reserved),
    "an open window": lambda world: bool(world.history.windows),
    "a publisher that takes over": lambda world: any(one.passed.unsent for one in world.publishers),
    "a publisher that asks again": lambda world: any(one.stage is Stage.PASSES for one in world.publishers),
    "a key handed over": lambda world: any(key.is_reserved for key in world.server.keys),
    "a claim that was given up": lambda world: bool(world.server.gone),
    "an offered key": lambda world: any(key.is_offered for key in world.server.keys),
    "a called room": lambda world: any(nonce[0] == "!" for nonce in _holders(world)),
    "a line of two rooms": lambda world: len(world.server.line) > 1,
    "an offer that nobody can answer": lambda world: any(
        key.room and key.room not in _rooms(world) for key in world.server.keys
    ),
    "a worker in which two wait": lambda world: len(world.waiting_in("w1")) > 1,
    "a worker full of other tasks in which one waits": lambda world: (
        world.busy.count("w1") > 1 and world.waiting_in("w1")
    ),
    "two bodies at once": lambda world: sum(one.phase in IN_BODY and not one.lost for one in world.executions) > 1,
    "two calls from one room": lambda world: len({key.rank for key in world.server.keys if key.nonce == "!w1 2"}) > 1,
    "two limits in line": lambda world: len({limit_of(member) for _, member in world.server.line}) > 1,
    "a publisher": lambda world: bool(world.publishers),
    "an answered publisher": lambda world: bool(world.history.answered),
    "a failed publisher": lambda world: bool(world.history.failed),
}


# The Lua scripts do what the model says, for every command on every state of a key that an exploration has met.


@pytest.fixture(scope="module")
def asked(explorations) -> set[tuple[Server, Command]]:
    """Every command that any exploration asked Redis, with the state that Redis was in."""
    return {pair for found in explorations.values() for pair in found.asked}


@pytest.fixture(scope="module")
def pairs(asked) -> list[tuple[Server, Command]]:
    return sorted({plain(server, command) for server, command in asked}, key=repr)


@pytest.fixture
def keys(locks: Valkey) -> Iterator[Keys]:
    client = connect(locks.url(), {})
    yield Keys(client)
    client.close()


def test_every_command_answers_and_leaves_what_the_model_says(pairs, keys):
    for server, command in pairs:
        follow(keys, server, command)


def test_every_command_does_so_on_every_small_line(keys):
    assert len(small_lines()) > 900
    for server, command in small_lines():
        follow(keys, server, command)


def test_every_command_does_so_on_every_place_in_the_queue(keys):
    assert len(small_places()) > 500
    for server, command in small_places():
        follow(keys, server, command)


def test_every_command_does_so_on_every_two_permits(keys):
    assert len(small_permits()) > 5000
    for server, command in small_permits():
        follow(keys, server, command)


def kind_of(command: Command) -> object:
    return "claim" if isinstance(command, Acquire) and command.claim else type(command)


def test_the_pairs_are_many_and_every_script_and_reply_is_among_them(pairs):
    assert len(pairs) > 400
    commands = Counter(kind_of(command) for _, command in pairs)
    replies = Counter((kind_of(command), apply(server, command).reply) for server, command in pairs)
    assert all(
        commands[kind] > 20 for kind in (Acquire, "claim", Reserve, HandOver, Release, Renew, Enter, Stand, Leave)
    ), commands
    assert commands[GiveUp] > 5
    assert commands[Enter] > 5
    assert set(replies) == {
        (Acquire, Tag.GRANTED),
        (Acquire, Tag.CONFLICT),
        (Acquire, Tag.FINISHED),
        ("claim", Tag.GRANTED),
        ("claim", Tag.CONFLICT),
        ("claim", Tag.COPY),
        (Acquire, Tag.COPY),
        ("claim", Tag.FINISHED),
        (Reserve, Tag.GRANTED),
        (Reserve, Tag.QUEUED),
        (Reserve, Tag.OUTSTANDING),
        (Reserve, Tag.WINDOW),
        (HandOver, Tag.REPLACED),
        (HandOver, Tag.RELEASED),
        (GiveUp, Tag.RELEASED),
        (GiveUp, Tag.LOST),
        (HandOver, Tag.LOST),
        (Release, Tag.RELEASED),
        (Release, Tag.LOST),
        (Renew, Tag.KEPT),
        (Renew, Tag.LOST),
        (Enter, Tag.ENTERED),
        (Stand, Tag.CALLED),
        (Stand, Tag.CONFLICT),
        (Leave, Tag.LEFT),
        (Leave, Tag.RELEASED),
    }
