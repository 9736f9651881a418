"""Hold: what each transition does in each phase, and what is sent. No server."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from celery_redislock.protocol import commands
from celery_redislock.protocol.hold import Hold, Phase
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import ACQUIRE, NOTE_TTL, Call, Claim, Command, Note, Passed, Tag
from celery_redislock.protocol.tokens import NOTHING, RESERVED, RUNS, Token, known_by

DEMAND = Demand("redislock:{x}")
PLACES = (keys_of(DEMAND.key).queued, keys_of(DEMAND.key).window("*"))
CALL, NOTE, CLAIM = b"!room 1", Note("note"), Claim("C" * 22, 5.0)


def token(number: int, milliseconds: int = 0, state: str = RUNS) -> Token:
    """A token with a nonce made of `number`, minted at a time of this test's own clock."""
    return Token.of(f"{state}{number:022} {NOTHING} {milliseconds} host {NOTHING}")


MINE, AGAIN, HEIR = token(1), token(1, 1), token(2, state=RESERVED)
FRESH = Hold(DEMAND, MINE, CLAIM, CALL, PLACES)
ASKED = FRESH.asked()
HELD = ASKED.answered(1, Tag.GRANTED)
HOLDS = {
    Phase.WANTED: FRESH,
    Phase.ASKED: ASKED,
    Phase.IN_DOUBT: ASKED.doubted(1),
    Phase.WAITING: ASKED.answered(1, Tag.CONFLICT),
    Phase.HELD: HELD,
    Phase.ENDING: HELD.ended(),
    Phase.OVER: HELD.over(),
}
Transition = Callable[[Hold], Hold]
#: Each transition, and the phases that it changes: the others stay what they were.
TRANSITIONS: dict[str, tuple[Transition, dict[Phase, Phase]]] = {
    "granted": (lambda hold: hold.answered(1, Tag.GRANTED), {Phase.ASKED: Phase.HELD}),
    "queued": (lambda hold: hold.answered(1, Tag.QUEUED), {Phase.ASKED: Phase.HELD}),
    "refused": (lambda hold: hold.answered(1, Tag.CONFLICT), {Phase.ASKED: Phase.WAITING}),
    "finished": (lambda hold: hold.answered(1, Tag.FINISHED), {Phase.ASKED: Phase.WAITING}),
    "doubted": (lambda hold: hold.doubted(1), {Phase.ASKED: Phase.IN_DOUBT}),
    "minted": (lambda hold: hold.minted(AGAIN), {Phase.IN_DOUBT: Phase.WANTED}),
    "renamed": (lambda hold: hold.renamed(AGAIN), {}),
    "called": (lambda hold: hold.called(CALL), {}),
    "handed over": (lambda hold: hold.handed_over(HEIR, 5.0), {}),
    "ended": (
        lambda hold: hold.ended(5.0, NOTE),
        {Phase.ASKED: Phase.ENDING, Phase.HELD: Phase.ENDING},
    ),
    "released for now": (Hold.released_for_now, dict.fromkeys((Phase.ASKED, Phase.HELD, Phase.ENDING), Phase.IN_DOUBT)),
    "unclaimed": (Hold.unclaimed, {}),
    "over": (Hold.over, dict.fromkeys(Phase, Phase.OVER)),
}
every_phase = pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
every_phase_without_doubt = pytest.mark.parametrize(
    "phase", [phase for phase in Phase if phase is not Phase.IN_DOUBT], ids=lambda phase: phase.name
)
every_transition = pytest.mark.parametrize("name", TRANSITIONS)


@every_phase
def test_the_holds_of_this_test_are_in_the_phase_that_they_stand_for(phase: Phase) -> None:
    assert HOLDS[phase].phase is phase


@every_transition
@every_phase
def test_a_transition_leads_to_the_next_phase_or_leaves_it(phase: Phase, name: str) -> None:
    apply, changes = TRANSITIONS[name]
    assert apply(HOLDS[phase]).phase is changes.get(phase, phase)


@every_transition
@every_phase
def test_a_transition_that_an_interrupted_driver_repeats_changes_nothing(phase: Phase, name: str) -> None:
    apply, _ = TRANSITIONS[name]
    once = apply(HOLDS[phase])
    assert apply(once) == once


@every_phase_without_doubt
def test_each_ask_has_the_next_number(phase: Phase) -> None:
    asked = HOLDS[phase].asked()
    assert (asked.phase, asked.asks) == (Phase.ASKED, HOLDS[phase].asks + 1)


@every_phase
def test_the_key_may_be_held_from_the_ask_until_the_end(phase: Phase) -> None:
    assert HOLDS[phase].may_be_held == (phase in {Phase.ASKED, Phase.HELD, Phase.ENDING})


def test_a_hold_in_doubt_does_not_ask_again_with_its_token() -> None:
    doubted = HOLDS[Phase.IN_DOUBT]
    with pytest.raises(RuntimeError, match="needs a new token"):
        doubted.asked()
    again = doubted.minted(AGAIN).asked()
    assert (again.token, again.asks) == (AGAIN, 2)


@every_phase_without_doubt
def test_a_hold_that_is_not_in_doubt_keeps_its_token(phase: Phase) -> None:
    """The key may hold it, or a queue may know it."""
    assert HOLDS[phase].minted(AGAIN) == HOLDS[phase]


@pytest.mark.parametrize("tag", [Tag.GRANTED, Tag.CONFLICT])
def test_a_late_reply_to_an_earlier_ask_changes_nothing(tag: Tag) -> None:
    again = HOLDS[Phase.IN_DOUBT].minted(AGAIN).asked()
    assert again.answered(1, tag) == again
    assert again.doubted(1) == again


def test_a_call_is_used_up_by_an_answer_but_not_by_asking() -> None:
    assert FRESH.asked().call == FRESH.asked().doubted(1).call == CALL
    assert ASKED.answered(1, Tag.GRANTED).call is ASKED.answered(1, Tag.CONFLICT).call is None


def test_a_waiter_whose_turn_has_come_asks_with_its_call() -> None:
    refused = ASKED.answered(1, Tag.CONFLICT)
    assert refused.acquire(10.0) == commands.acquire(DEMAND, MINE, 10.0, claim=CLAIM)
    assert refused.called(CALL).asked().acquire(10.0) == commands.acquire(DEMAND, MINE, 10.0, claim=CLAIM, call=CALL)


def test_a_hold_whose_token_was_chosen_by_its_caller_is_released_by_that_token() -> None:
    chosen = Token.of("of the caller")
    assert HELD.renamed(chosen).ended().release() == commands.release(DEMAND, b"of the caller")


def test_a_claim_is_used_up_by_a_grant_alone() -> None:
    assert HELD.claim is None
    assert Hold(DEMAND, MINE, places=PLACES, phase=Phase.HELD, asks=1) == HELD
    assert ASKED.answered(1, Tag.CONFLICT).claim == ASKED.doubted(1).claim == CLAIM
    assert FRESH.unclaimed() == FRESH._replace(claim=None)


@every_phase
def test_a_hold_that_is_over_knows_only_whose_it_was(phase: Phase) -> None:
    assert HOLDS[phase].over() == Hold(DEMAND, MINE, phase=Phase.OVER)


def test_an_acquire_presents_the_call_and_the_claim() -> None:
    assert ASKED.acquire(10.0, "note", fence=True) == commands.acquire(
        DEMAND, MINE, 10.0, note="note", fence=True, call=CALL, claim=CLAIM
    )


def test_a_publish_reserves_with_its_token() -> None:
    passed = Passed(frozenset({"a"}))
    for window in (None, 60.0):
        options = {"in_queue": True, "window": window}
        assert ASKED.reserve(10.0, passed, **options) == commands.reserve(DEMAND.key, MINE, 10.0, passed, **options)


def test_a_reservation_names_the_window_of_its_task_and_how_long_it_is() -> None:
    _, keys, values = commands.reserve(DEMAND.key, MINE, 10.0, Passed(), in_queue=True, window=60.0)
    assert keys == (DEMAND.key, keys_of(DEMAND.key).line, *PLACES)
    assert (values[0], values[-1]) == ("QwD", "60000")


def test_a_publish_merges_its_call_with_its_token() -> None:
    passed, call = Passed(frozenset({"a"})), Call(b"a body", "a channel")
    assert ASKED.merge(10.0, 20.0, passed, call) == commands.merge(DEMAND.key, MINE, 10.0, 20.0, passed, call)


def test_an_undo_names_the_whole_token_and_the_place() -> None:
    assert ASKED.undo() == commands.release(DEMAND, MINE.value, places=PLACES)
    assert ASKED._replace(places=()).undo() == commands.release(DEMAND, MINE.value)


def test_an_end_releases_lets_cool_down_or_hands_over_and_the_heir_goes_first() -> None:
    assert HELD.ended(0.0, NOTE).release() == commands.release(DEMAND, MINE.owner, NOTE)
    assert HELD.ended(5.0, NOTE).release() == commands.cool_down(DEMAND, MINE, 5.0, NOTE)
    heir = HELD.handed_over(HEIR, 7.0)
    assert heir.ended(5.0, NOTE).release() == commands.hand_over(DEMAND, MINE, HEIR, 7.0, NOTE)


@pytest.mark.parametrize("ended", [HELD.ended(0.0, NOTE), HELD.handed_over(HEIR, 7.0).ended(0.0, NOTE)])
def test_a_release_in_any_case_says_so_in_its_note(ended: Hold) -> None:
    noted = ended._replace(note=Note("note", NOTE_TTL, True))
    assert ended.release(in_any_case=True) == noted.release() != ended.release()


def test_an_end_without_a_note_leaves_none_in_any_case_either() -> None:
    assert HELD.ended().release(in_any_case=True) == HELD.ended().release()


def test_a_grant_forgets_how_an_earlier_hold_would_have_ended() -> None:
    again = HELD.handed_over(HEIR, 7.0).ended(5.0, NOTE).asked().answered(2, Tag.GRANTED)
    assert again.ended().release() == again.release() == commands.release(DEMAND, MINE.owner)
    assert again == HELD._replace(asks=2)
    assert HELD.handed_over(HEIR, 7.0).ended(5.0, NOTE).asked() == ASKED._replace(claim=None, call=None, asks=2)


@every_phase
def test_a_hold_rebuilt_from_the_text_of_its_token_sends_the_same(phase: Phase) -> None:
    hold = HOLDS[phase].handed_over(HEIR, 7.0)
    _, text, *others = hold._replace(token=hold.token.value)  # type: ignore[arg-type]
    again = Hold(DEMAND, Token.of(text), *others)  # type: ignore[arg-type]
    assert again == hold
    assert (again.undo(), again.release()) == (hold.undo(), hold.release())


def test_a_process_that_knows_only_the_nonce_ends_the_hold_of_its_dead_child() -> None:
    """It knows neither when the child minted the token nor how far it came."""
    known = Hold(DEMAND, known_by(MINE.nonce), phase=Phase.ASKED)
    assert known.ended().release() == HELD.ended().release()


class Server:
    """One key, as the scripts treat it, with a clock of its own in milliseconds."""

    def __init__(self) -> None:
        self.now, self.expires, self.value = 0, 0, b""

    def passes(self, milliseconds: int) -> None:
        self.now += milliseconds
        if self.now >= self.expires:
            self.value = b""

    def run(self, command: Command) -> Tag:
        letters, *values = [text.encode() if isinstance(text, str) else text for text in command.values]
        required = 2 if command.script is ACQUIRE else 1
        given = dict(zip([chr(one) for one in letters if chr(one).isupper()], values[required:], strict=True))
        if command.script is ACQUIRE:
            owners = (values[0][:23], given.get("C"))
            if self.value and not any(owner and self._is_owned_by(owner) for owner in owners):
                return Tag.CONFLICT
            self.value, self.expires = values[0], self.now + int(values[1])
            return Tag.GRANTED
        if not self._is_owned_by(values[0]):
            return Tag.LOST
        self.value, self.expires = given.get("K", b""), self.now + int(given.get("T", 0))
        return Tag.REPLACED if self.value else Tag.RELEASED

    def _is_owned_by(self, owner: bytes) -> bool:
        return self.value == owner or self.value.startswith(owner + b" ")


class Driver:
    """One owner, between the steps of its driver."""

    def __init__(self, number: int, claim: Claim | None = None) -> None:
        self.number = number
        self.hold = Hold(DEMAND, token(number), claim)
        self.asked: Command | None = None
        """What is stored as asked, and has not been sent."""
        self.reply: tuple[int, Tag] | None = None
        """What was answered, and is not stored."""
        self.is_interrupted = False

    @property
    def awaits(self) -> bool:
        return self.asked is not None or self.reply is not None


class Flight(NamedTuple):
    """A release on its way."""

    sender: Driver
    command: Command
    is_undo: bool


class Interrupted(RuleBasedStateMachine):
    """Two owners take turns at one key. Replies are lost, undos come late, and exceptions strike between the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.server, self.flights, self.count = Server(), list[Flight](), 2
        self.owners = [Driver(1), Driver(2)]

    which = st.integers(0, 1)

    @rule(which=which)
    def store_that_it_asks(self, which: int) -> None:
        one = self.owners[which]
        if one.is_interrupted or one.awaits or one.hold.phase not in {Phase.WANTED, Phase.WAITING, Phase.IN_DOUBT}:
            return
        self.server.passes(1)
        one.hold = one.hold.minted(token(one.number, self.server.now)).asked()
        one.asked = one.hold.acquire(1.0)

    @rule(which=which)
    def send(self, which: int) -> None:
        one = self.owners[which]
        if one.asked is not None:
            one.reply, one.asked = (one.hold.asks, self.server.run(one.asked)), None

    @rule(which=which)
    def store_the_reply(self, which: int) -> None:
        one = self.owners[which]
        if one.reply is not None:
            one.hold, one.reply = one.hold.answered(*one.reply), None

    @rule(which=which)
    def lose_the_command_or_its_reply(self, which: int) -> None:
        one = self.owners[which]
        if one.awaits:
            self.flights.append(Flight(one, one.hold.undo(), True))
            one.asked, one.reply, one.hold = None, None, one.hold.doubted(one.hold.asks)

    @rule(which=which, is_undone=st.booleans())
    def interrupt(self, which: int, is_undone: bool) -> None:
        """A time limit strikes. If the command was under way, its sender undoes it; the owner has only to end."""
        one = self.owners[which]
        if one.awaits and is_undone:
            self.flights.append(Flight(one, one.hold.undo(), True))
        one.asked, one.reply, one.is_interrupted = None, None, True

    @rule(which=which, steps=st.integers(1, 3), hands_over=st.booleans())
    def end(self, which: int, steps: int, hands_over: bool) -> None:
        """Store that it ends, send the release, store that it is over; or be interrupted after some of these steps."""
        one = self.owners[which]
        if one.awaits or one.hold.phase is Phase.OVER:
            return
        self.count += 1
        if hands_over and one.hold.phase is Phase.HELD:
            one.hold = one.hold.handed_over(token(self.count, state=RESERVED), 1.0)
        one.is_interrupted, one.hold = True, one.hold.ended()
        if steps > 1 and one.hold.may_be_held:
            self.flights.append(Flight(one, one.hold.release(), False))
        if steps > 2:
            self.count += 1
            claim = Claim(one.hold.heir[0].nonce, 1.0) if one.hold.heir else None
            one.hold = one.hold.over()
            self.owners[which] = Driver(self.count, claim)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        before = self.server.value
        if self.server.run(flight.command) is Tag.LOST:
            return
        assert Token.of(before).nonce == flight.sender.hold.token.nonce, "a release ended what another was granted"
        if flight.is_undo and not flight.sender.is_interrupted:
            assert before != flight.sender.hold.token.value or flight.sender.hold.phase is Phase.IN_DOUBT, (
                "a late undo ended a later grant"
            )

    @rule(milliseconds=st.sampled_from([1, 500, 1000]))
    def time_passes(self, milliseconds: int) -> None:
        self.server.passes(milliseconds)

    @invariant()
    def the_key_holds_a_token_of_somebody_who_will_release_it(self) -> None:
        holder = Token.of(self.server.value)
        known = [*self.owners, *(flight.sender for flight in self.flights)]
        claims = [one.hold.claim.nonce for one in self.owners if one.hold.claim]
        heirs = [one.hold.heir[0].nonce for one in self.owners if one.hold.heir]
        assert not holder or holder.nonce in [one.hold.token.nonce for one in known] + claims + heirs

    def teardown(self) -> None:
        for one in self.owners:  # a hold in doubt sends nothing: its undo is on its way, or has arrived
            if one.hold.may_be_held:
                self.flights.append(Flight(one, one.hold.ended().release(), False))
        for flight in self.flights:
            self.server.run(flight.command)
        assert self.server.value[:1] in {b"", RESERVED.encode()}, "the key is held by nobody"


def test_no_interruption_lost_reply_or_late_undo_ends_what_another_holds_or_leaves_a_key_locked() -> None:
    short = settings(
        max_examples=200, stateful_step_count=40, report_multiple_bugs=False, derandomize=True, database=None
    )
    run_state_machine_as_test(Interrupted, settings=short)
