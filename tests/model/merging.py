"""Merging in Redis: what each command does with the calls that are merged into one message. Pure functions.

That message, the ticket, has the place in the queue. A call's number stands for its arguments: a body is known by the
number of the call whose arguments it has. The key, the place and the notes are those of the model's `Server`.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt

from . import effects
from .commands import Acquire, GiveUp, Release, Renew
from .memory import quick, remembered
from .server import NOBODY, Key
from .server import Server as Lock

#: With how many calls a ticket that collects them is full, in most scenarios. The scripts' number is greater.
FULL = 2


class Mistake(Enum):
    """What an implementation may get wrong. A test shows that each one breaks a promise."""

    __hash__ = object.__hash__  # fast, as that of `Phase`

    UNSENT_IS_MERGED_INTO = "a call is merged into a ticket that has not been sent"
    NO_SECOND_QUESTION = "a call that was merged into a job that has ended is not sent again"
    SECOND_QUESTION_IS_THE_FIRST = "a call that asks again, as its job has ended, gets the answer that it was merged"
    NO_THIRD_QUESTION = "a call that asks again, and is merged into another job that has ended, is left there"
    ANY_NEWEST_IS_AN_ANSWER = "where all calls are wanted, a newer call that has begun stands for those before it"
    RETRY_IS_MERGED = "a retry is merged into the ticket that has the place, whose later arguments it replaces"
    RETRY_HAS_A_NEW_NUMBER = "a retry gets a number of its own, greater than those of calls that came meanwhile"
    RETRY_HAS_NO_NUMBER = "a retry that does not get the place is sent without its number"
    LAPSED_PLACE_LOSES_ITS_CALLS = "who takes a place that has lapsed drops the calls of the ticket that had it"
    FULL_TICKET_LOSES_ITS_CALLS = "who takes the place of a full ticket drops its calls"
    UNDO_DROPS_THE_CALLS_OF_ANOTHER = "a publish that fails drops the calls of the ticket that has the place by now"
    GRANT_LEAVES_THE_PLACE = "a run that begins leaves the place and its calls, so that others are merged into it"
    GRANT_KEEPS_NO_ARGUMENTS = "what a run was given is not kept for a copy of its message"
    DEAD_CHILD_LOSES_ITS_ARGUMENTS = "the main process deletes what a dead child was given when it releases for it"
    NO_NEWEST = "a run that begins does not say which call is the newest"
    NEWEST_OF_MERGED_ONLY = "only a run with merged calls says which call is the newest"
    FREE_KEY_IS_ENOUGH = "a message that finds the key free is granted it before it is asked for the newest call"
    OWN_NUMBER_IS_COMPARED = "the number in the message is compared with the newest, though later calls were merged"
    DEAD_CHILD_LOSES_THE_CALLS = (
        "the main process drops the calls when it gives up for a child that died before it asked"
    )
    ENDED_JOB_LOSES_ITS_CALLS = "who takes the place of a job that has ended drops its calls, though a retry comes"
    REFUSED_KEEPS_ITS_PLACE = "a ticket that is superseded or has expired keeps the place until its outcome is stored"


Mistakes = Set[Mistake]


class Time(Enum):
    """Whether a ticket's calls may run."""

    EARLY = "not yet due"
    DUE = "due"
    EXPIRED = "expired"
    BEGUN = "given to a run, so that a copy of its message is given them too"

    __hash__ = object.__hash__


@quick
class Calls(NamedTuple):
    """The calls that one message stands for."""

    number: int
    """That of the last one."""
    bodies: tuple[int, ...]
    """Whose arguments the run is given: the last one's, or all."""
    claim: str = ""
    """The claim of the ticket; empty once a run was given the calls, or they are those of an attempt."""
    attempt: Attempt = NOBODY
    time: Time = Time.DUE
    is_refused: bool = False
    """Whether the ticket's run was refused for good, so that its calls get no run."""

    @property
    def given(self) -> Calls:
        """The calls as a run is given them."""
        return Calls(self.number, self.bodies, time=Time.BEGUN)

    @property
    def kept(self) -> Calls:
        """The calls as they are kept for a message that has lost its place."""
        return Calls(self.number, self.bodies, time=self.time)


@quick
class Answer(NamedTuple):
    """What a publisher was told whose call was merged."""

    claim: str
    """The claim under which it asked."""
    asked: int
    """The number that it brought; 0 with its first question."""
    number: int
    """The number of the call."""
    ticket: Key


@quick
class Server(NamedTuple):
    """All that Redis knows."""

    lock: Lock = Lock()
    """The key, the place in the queue, and the notes."""
    pending: Calls | None = None
    """The calls that wait for the ticket which has the place, or had it last."""
    given: frozenset[tuple[Attempt, Calls]] = frozenset()
    """What was given to each attempt, or is kept for it."""
    newest: tuple[int, str] = (0, "")
    """The number of the newest call with which a run has begun, and the run's task id."""
    merged: frozenset[Answer] = frozenset()
    """Who was merged."""
    clock: int = 0
    """The server's clock: the greatest number that it has given."""

    def give(self, attempt: Attempt, calls: Calls | None) -> Server:
        """This state with these calls kept for `attempt`; None: with none."""
        others = frozenset(one for one in self.given if one[0] != attempt)
        return self._replace(given=others if calls is None else others | {(attempt, calls)})

    def given_to(self, attempt: Attempt) -> Calls | None:
        return next((calls for one, calls in self.given if one == attempt), None)


class Effect(NamedTuple):
    """What a command does: its answer, and the state of Redis after it."""

    reply: Tag
    server: Server
    number: int = 0
    """The number of the call."""
    bodies: tuple[int, ...] = ()
    """What the run is given in place of its message's own arguments."""
    ticket: Key | None = None
    """The ticket into which the call was merged."""


class Merge(NamedTuple):
    """Take the place for a message that is about to be sent, or merge the call into the ticket that has it."""

    claim: str
    attempt: Attempt
    ended: frozenset[str] = frozenset()
    """The ids of the jobs whose end the publisher has seen."""
    unsent: frozenset[str] = frozenset()
    """The ids of the jobs whose publishers were too slow."""
    number: int = 0
    """The number that the call was given before; 0: none."""
    is_retry: bool = False
    """Whether the call is the next attempt of a run, and keeps its number."""
    joins: bool = False
    """Whether the call joins the ticket's calls; otherwise it replaces them."""
    is_early: bool = False
    """Whether the call is due only later."""
    full: int = FULL
    """With how many calls a ticket is full."""


class Ask(NamedTuple):
    """Acquire the key for a message that has a number."""

    acquire: Acquire
    number: int | None
    """The number in the message; 0: a newer call does not replace it; None: the message has none."""
    body: int = 0
    """The message's own arguments, if it is a retry that could not be merged; 0: it is not."""


class End(NamedTuple):
    """Release the key at the end of a run."""

    release: Release
    over: Attempt | None
    """The attempt whose copies need no arguments any more."""


Command = Merge | Ask | End | GiveUp | Renew


@remembered
def apply(server: Server, command: Command, mistakes: Mistakes = frozenset()) -> Effect:
    """What `command` does where Redis is in the state `server`."""
    match command:
        case Merge():
            return merge(server, command, mistakes)
        case Ask():
            return ask(server, command, mistakes)
        case End(release, over):
            ended = effects.apply(server.lock, release)
            after = server if over is None else server.give(over, None)
            return Effect(ended.reply, after._replace(lock=ended.server))
        case GiveUp(claim):
            given_up, calls = effects.apply(server.lock, command), server.pending
            is_mine = calls is not None and calls.claim == claim
            drops = is_mine or Mistake.UNDO_DROPS_THE_CALLS_OF_ANOTHER in mistakes
            never_runs = command.exactly or command.closes_window or Mistake.DEAD_CHILD_LOSES_THE_CALLS in mistakes
            if calls is not None and is_mine and not never_runs:
                server = server.give(calls.attempt, calls.kept)
            if command.over:
                server = server.give(command.over, None)
            return Effect(given_up.reply, server._replace(lock=given_up.server, pending=None if drops else calls))
        case Renew():
            renewed = effects.apply(server.lock, command)
            return Effect(renewed.reply, server._replace(lock=renewed.server))


def merge(server: Server, command: Merge, mistakes: Mistakes) -> Effect:
    queued, calls = server.lock.queued, server.pending
    known = _known(server, command, mistakes)
    if known is not None:
        return known
    is_over = _is_over(queued, command)
    if queued is not None and not is_over and not _may_merge(server, command, mistakes):
        before = server.given_to(command.attempt)  # if it had the place before
        time = before.time if before else Time.BEGUN
        kept = Calls(command.number, _bodies(server, command, command.number), time=time)
        return Effect(Tag.OUTSTANDING, server.give(command.attempt, kept) if command.is_retry else server)
    number = max(server.clock, server.newest[0], calls.number if calls else 0) + 1
    if command.is_retry and Mistake.RETRY_HAS_A_NEW_NUMBER not in mistakes:
        number = command.number
    bodies = _bodies(server, command, command.number if command.is_retry else number)
    server = server._replace(clock=max(server.clock, number))
    time = Time.EARLY if command.is_early else Time.DUE
    is_full = command.joins and calls is not None and len(calls.bodies) >= command.full
    if queued is not None and calls is not None and not is_over and not is_full:
        if command.joins:
            bodies, time = calls.bodies + bodies, Time.EARLY if Time.EARLY in {time, calls.time} else Time.DUE
        answers = frozenset(one for one in server.merged if one.claim != command.claim)
        answers |= {Answer(command.claim, command.number, number, queued)}
        merged = calls._replace(number=number, bodies=bodies, time=_time(command, bodies, time))
        return Effect(Tag.MERGED, server._replace(pending=merged, merged=answers), number, ticket=queued)
    is_unsent = queued is not None and (queued.sending or Mistake.ENDED_JOB_LOSES_ITS_CALLS in mistakes)
    is_needless = calls is not None and ((is_over and is_unsent and _has_calls(server)) or calls.is_refused)
    if calls is not None and not is_needless and not _is_dropped(queued, mistakes):
        server = server.give(calls.attempt, calls.kept)  # the place lapsed, or the ticket is full
    place = Key(command.claim, command.attempt, sending=True)
    pending = Calls(number, bodies, command.claim, command.attempt, _time(command, bodies, time))
    return Effect(Tag.QUEUED, server._replace(lock=server.lock._replace(queued=place), pending=pending), number)


def _known(server: Server, command: Merge, mistakes: Mistakes) -> Effect | None:
    """The answer to a call that has the place, was merged, or was in a run that has begun; None to a new one."""
    queued, calls, (newest, job) = server.lock.queued, server.pending, server.newest
    if calls is not None and queued is not None and calls.claim == queued.nonce == command.claim:
        return Effect(Tag.QUEUED, server, calls.number)
    for claim, asked, number, ticket in server.merged:
        if claim == command.claim and (asked == command.number or Mistake.SECOND_QUESTION_IS_THE_FIRST in mistakes):
            return Effect(Tag.MERGED, server, number, ticket=ticket)
    if not command.number or command.is_retry or newest < command.number:
        return None
    # Where all calls are wanted, only the run of the job into which the call was merged has had it.
    is_any = not command.joins or Mistake.ANY_NEWEST_IS_AN_ANSWER in mistakes
    return Effect(Tag.MERGED, server, command.number) if is_any or job in command.ended else None


def _has_calls(server: Server) -> bool:
    """Whether the calls that wait are those of the message that has the place."""
    queued, calls = server.lock.queued, server.pending
    return queued is not None and calls is not None and calls.claim == queued.nonce


def _may_merge(server: Server, command: Merge, mistakes: Mistakes) -> bool:
    """Whether a call may be merged into the message that has the place."""
    queued = server.lock.queued
    is_unsent = queued is not None and queued.sending and Mistake.UNSENT_IS_MERGED_INTO not in mistakes
    is_retry = command.is_retry and Mistake.RETRY_IS_MERGED not in mistakes
    return _has_calls(server) and not is_unsent and not is_retry


def _time(command: Merge, bodies: tuple[int, ...], time: Time) -> Time:
    """When these calls are due: a full ticket at once."""
    return Time.DUE if command.joins and len(bodies) >= command.full else time


def _bodies(server: Server, command: Merge, own: int) -> tuple[int, ...]:
    """The bodies of a call: its own; and those of the run that retries, except the last one, before it."""
    given = server.given_to(_before(command.attempt)) if command.is_retry else None
    return (*(given.bodies[:-1] if given else ()), own)


def _before(attempt: Attempt) -> Attempt:
    """The attempt before this one."""
    return attempt._replace(retries=attempt.retries - 1)


def _is_over(queued: Key | None, command: Merge) -> bool:
    """Whether what has the place does not need it: its job has ended, or its publisher was too slow to send it."""
    if queued is None:
        return False
    job = queued.attempt.task_id
    return job in command.ended or (queued.sending and job in command.unsent)


def _is_dropped(queued: Key | None, mistakes: Mistakes) -> bool:
    lapsed, full = Mistake.LAPSED_PLACE_LOSES_ITS_CALLS, Mistake.FULL_TICKET_LOSES_ITS_CALLS
    return (lapsed if queued is None else full) in mistakes


def ask(server: Server, command: Ask, mistakes: Mistakes) -> Effect:
    asked, before = command.acquire, server.lock.permits[0]
    effect = effects.apply(server.lock, asked)
    after = server._replace(lock=effect.server)
    if effect.reply is Tag.FINISHED or command.number is None:
        return Effect(effect.reply, after)
    calls = calls_of(server, asked)
    number = calls.number if calls else command.number
    is_owner = before is not None and before.nonce == asked.nonce
    compared = command.number if Mistake.OWN_NUMBER_IS_COMPARED in mistakes else number
    looks = not is_owner and not (before is None and Mistake.FREE_KEY_IS_ENOUGH in mistakes)
    refusal = _refusal(server, calls, compared if command.number else 0) if looks else None
    if refusal is not None:
        if effect.reply is Tag.GRANTED:
            after = server
        queued, leaves = after.lock.queued, refusal is not Tag.DUE and Mistake.REFUSED_KEEPS_ITS_PLACE not in mistakes
        if leaves and queued is not None and queued.nonce == asked.claim:
            after = after._replace(lock=after.lock._replace(queued=None))
        if calls is not None and calls.claim and refusal is not Tag.DUE:
            after = after._replace(pending=calls._replace(is_refused=True))
        return Effect(refusal, after)
    if effect.reply is not Tag.GRANTED:
        return Effect(effect.reply, after)
    if calls is not None:
        if command.body and calls is server.given_to(_before(asked.attempt)):
            calls = calls._replace(bodies=(*calls.bodies[:-1], command.body))
        after = _given(server, after, asked.attempt, calls, mistakes)
    after = after._replace(given=frozenset(one for one in after.given if one[0] != _before(asked.attempt)))
    is_silent = Mistake.NO_NEWEST in mistakes or (calls is None and Mistake.NEWEST_OF_MERGED_ONLY in mistakes)
    if number and not is_silent:
        after = after._replace(newest=(number, asked.attempt.task_id))
    return Effect(Tag.GRANTED, after, number, calls.bodies if calls else ())


def _given(before: Server, after: Server, attempt: Attempt, calls: Calls, mistakes: Mistakes) -> Server:
    """The state after a grant, in which what the run is given is kept for its copies."""
    if Mistake.GRANT_LEAVES_THE_PLACE in mistakes:
        after = after._replace(lock=after.lock._replace(queued=before.lock.queued))
    elif calls.claim:
        after = after._replace(pending=None)
    else:
        kept = {attempt, _before(attempt)}
        after = after._replace(given=frozenset(one for one in after.given if one[0] not in kept))
    return after if Mistake.GRANT_KEEPS_NO_ARGUMENTS in mistakes else after.give(attempt, calls.given)


def calls_of(server: Server, asked: Acquire) -> Calls | None:
    """The calls that were merged into the message, or what was given to its attempt, or to the one before."""
    pending, attempt = server.pending, asked.attempt
    if pending is not None and asked.claim and pending.claim == asked.claim:
        return pending
    return server.given_to(attempt) or server.given_to(_before(attempt))


def _refusal(server: Server, calls: Calls | None, number: int) -> Tag | None:
    """The answer to a run that must not begin now, or never; None if it may begin."""
    if calls is not None and calls.time in {Time.EARLY, Time.EXPIRED}:
        return Tag.EXPIRED if calls.time is Time.EXPIRED else Tag.DUE
    return Tag.SUPERSEDED if 0 < number < server.newest[0] else None
