"""Redis in the model: what each command does. Pure functions of the state of one lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt

from .commands import (
    Acquire,
    Command,
    Effect,
    Enter,
    GiveUp,
    HandOver,
    Leave,
    Release,
    Renew,
    Reserve,
    Stand,
)
from .memory import remembered
from .rules import Mistake
from .server import NOBODY, Key, Server, limit_of, member_of

Mistakes = Set[Mistake]


@remembered
def apply(server: Server, command: Command, mistakes: Mistakes = frozenset()) -> Effect:
    """What `command` does where Redis is in the state `server`."""
    run: Callable[[Server, Command, Mistakes], Effect] = _COMMANDS[type(command)]
    return run(server, command, mistakes)


def offer(server: Server, permits: Iterable[int], mistakes: Mistakes) -> Server:
    """Each of these permits that is free is offered to the first in line that may have it."""
    for permit in permits:
        anybody = Mistake.PERMIT_ABOVE_THE_LIMIT in mistakes
        member = server.first_for(1 if anybody else permit)
        if server.permits[permit - 1] is None and member and Mistake.RELEASE_OFFERS_NOTHING not in mistakes:
            server = server.put(permit, Key(f"?{member}", NOBODY)).ranked(member, None)
    return server


def acquire(server: Server, command: Acquire, mistakes: Mistakes) -> Effect:
    mine, kept = server.number_of(command.nonce), _kept(server, command, mistakes)
    if command.reads_note and noted(command.attempt, mistakes) in server.notes:
        owned = [mine] if mine and Mistake.FINISHED_LEAVES_ITS_KEY not in mistakes else []
        return Effect(Tag.FINISHED, _freed(server, [*kept, *owned], mistakes))
    if mine and Mistake.OWN_GRANT_IS_A_CONFLICT not in mistakes:
        return _granted(server, mine, command, mistakes)
    copy = 0 if kept and Mistake.CALLED_COPY_HAS_ITS_PERMIT in mistakes else _permit_of_copy(server, command, mistakes)
    if copy and not (kept and _is_reserved(server, copy)):
        return _meet_copy(server, copy, command, mistakes)
    permit = kept[0] if kept else _free_permit(server, command, mistakes)
    if permit:
        return _granted(server, permit, command, mistakes)
    return _refused(offer(server, server.free(command.limit), mistakes), command.limit)


def reserve(server: Server, command: Reserve, mistakes: Mistakes) -> Effect:
    key, queued = server.permits[0], server.queued
    if key is not None and key.nonce == command.claim:
        return Effect(Tag.GRANTED, server)
    if _has_place(server, command.claim):
        return Effect(Tag.QUEUED, server)
    if _is_in_window(server, command, mistakes):
        return Effect(Tag.WINDOW, server, holders=tuple(key for key in (server.window,) if key))
    if any(_is_outstanding(one, command, mistakes) for one in _heeded(server, mistakes)):
        return _told(server)
    key_is_over, place_is_over = (_is_over(one, command, mistakes) for one in (key, queued))
    if place_is_over:
        server = server._replace(queued=None)
    if (key is None or key_is_over) and not server.line:
        server = _with_window(server, command)
        return Effect(Tag.GRANTED, server.put(1, Key(command.claim, command.attempt, sending=True)), 1)
    if server.queued is not None:
        return _told(server)
    server = _with_window(server, command)
    if Mistake.OTHERS_LEAVE_NO_PLACE not in mistakes:
        server = server._replace(queued=Key(command.claim, command.attempt, sending=True))
    freed = [1] if key is None or key_is_over else []
    return Effect(Tag.QUEUED, _freed(server, freed, mistakes))


def _is_in_window(server: Server, command: Reserve, mistakes: Mistakes) -> bool:
    if server.window is None or not command.opens_window or Mistake.WINDOW_IS_NOT_HEEDED in mistakes:
        return False
    return not _is_taken_over(server.window, command, mistakes)


def _with_window(server: Server, command: Reserve) -> Server:
    window = Key(command.claim, command.attempt, sending=True)
    return server._replace(window=window) if command.opens_window else server


def _heeded(server: Server, mistakes: Mistakes) -> list[Key]:
    """Who may be an outstanding job: who has the key, and who has the place."""
    both = (server.permits[0], None if Mistake.FREE_KEY_IS_ENOUGH in mistakes else server.queued)
    return [one for one in both if one is not None and not one.member]


def _is_outstanding(one: Key, command: Reserve, mistakes: Mistakes) -> bool:
    if Mistake.NEWER_JOB_IS_OVERWRITTEN in mistakes and command.ended and one.is_reserved:
        return False
    return one.attempt.task_id not in command.ended | command.preceding and not _is_taken_over(one, command, mistakes)


def _is_taken_over(one: Key, command: Reserve, mistakes: Mistakes) -> bool:
    """Whether the publisher takes over what is reserved for a message that has not been sent."""
    is_unsent = one.sending or (one.is_reserved and Mistake.SENT_IS_TAKEN_OVER in mistakes)
    is_any = Mistake.ANY_UNSENT_IS_TAKEN_OVER in mistakes and bool(command.unsent)
    return is_unsent and (is_any or one.attempt.task_id in command.unsent)


def _is_over(one: Key | None, command: Reserve, mistakes: Mistakes) -> bool:
    """Whether what `one` reserves is not needed: its message does not run any more."""
    if one is None or one.member:
        return False
    if Mistake.NEWER_JOB_IS_OVERWRITTEN in mistakes and command.ended and one.is_reserved:
        return True
    if _is_taken_over(one, command, mistakes):
        return True
    return one.attempt.task_id in command.ended and (one.is_reserved or Mistake.ENDED_RUN_IS_OVERWRITTEN in mistakes)


def _told(server: Server) -> Effect:
    """The answer to a publisher that may have neither the key nor the place: who has them."""
    return Effect(Tag.OUTSTANDING, server, holders=tuple(key for key in (server.permits[0], server.queued) if key))


def _is_reserved(server: Server, permit: int) -> bool:
    key = server.permits[permit - 1]
    return key is not None and key.is_reserved


def _permit_of_copy(server: Server, command: Acquire, mistakes: Mistakes) -> int:
    """The permit that holds the attempt of `command`: if possible one that runs it, not one reserved for it; 0: none.

    Whose message may be a copy, or has a claim, looks at all permits: the limit may have been greater a moment ago.
    """
    if Mistake.SECOND_PERMIT_FOR_A_COPY in mistakes:
        return 0
    looks_at_all = command.reads_note or (bool(command.claim) and command.limit > 1)
    is_blind = not looks_at_all or Mistake.BLIND_TO_HIGH_PERMITS in mistakes
    seen = server.permits[: command.limit] if is_blind else server.permits
    mine, found = noted(command.attempt, mistakes), 0
    for permit, key in enumerate(seen, 1):
        if key is None or key.member or key.nonce == command.claim or noted(key.attempt, mistakes) != mine:
            continue
        # Above a limit of 1 only what runs counts.
        if not key.is_reserved or (not found and (permit == 1 or command.limit > 1)):
            found = permit
    return found


def _meet_copy(server: Server, permit: int, command: Acquire, mistakes: Mistakes) -> Effect:
    """My attempt has a permit, which is marked. Whatever is kept for me is passed on: I must not run beside it."""
    key = server.permits[permit - 1]
    assert key
    copy = key._replace(marked=key.marked or not key.is_reserved)
    passed_on = _freed(server.put(permit, copy), _kept(server, command, mistakes), mistakes)
    tag = Tag.COPY if command.limit > 1 or permit > 1 else Tag.CONFLICT
    return Effect(tag, passed_on, 0, (copy,))


def _free_permit(server: Server, command: Acquire, mistakes: Mistakes) -> int:
    """The lowest free permit that I may take: nobody waits for it, or I was called and my call has lapsed."""
    is_awaited = any(key.is_offered for key in server.permits[: command.limit] if key is not None)
    if Mistake.NEWCOMER_PASSES_AN_OFFER in mistakes:
        is_awaited = False
    for permit in server.free(command.limit):
        if command.room or not (is_awaited or server.first_for(permit)):
            return permit
    return 0


def _granted(server: Server, permit: int, command: Acquire, mistakes: Mistakes) -> Effect:
    """The permit is granted, and what else is kept for me is passed on."""
    key, gone, is_claimed = server.permits[permit - 1], server.gone, bool(_claimed(server, command))
    is_new = key is None or key.nonce != command.nonce
    if is_new:
        keeps_claim = Mistake.CLAIM_IS_KEPT in mistakes and permit in _claimed(server, command)
        nonce = command.claim if keeps_claim else command.nonce
        server = server.put(permit, Key(nonce, command.attempt, key is not None and key.marked, times=command.times))
    elif key is not None and Mistake.SECOND_GRANT_STORES_NOTHING not in mistakes:
        server = server.put(permit, key._replace(times=command.times))
    is_early = bool(command.claim) and command.limit > 1 and is_new and not is_claimed
    if is_early and Mistake.EARLY_RETRY_IS_FORGOTTEN not in mistakes:
        gone |= {command.claim}  # the run before must not hand its permit over to me any more
    forgets = Mistake.SECOND_KEPT_PERMIT_IS_FORGOTTEN in mistakes
    others = [] if forgets else [one for one in _kept(server, command, mistakes) if one != permit]
    if command.claim and _has_place(server, command.claim) and Mistake.PLACE_IS_KEPT not in mistakes:
        server = server._replace(queued=None)
    return Effect(Tag.GRANTED, _freed(server._replace(gone=gone), others, mistakes), permit)


def _kept(server: Server, command: Acquire, mistakes: Mistakes) -> list[int]:
    """The permits that are kept for whoever sends `command`: called to one, it may have been handed another since."""
    return [*_called(server, command, mistakes), *_claimed(server, command)]


def _called(server: Server, command: Acquire, mistakes: Mistakes) -> list[int]:
    """The permits to which whoever sends `command` was called."""
    if not command.room:
        return []
    call = Key(f"!{member_of(command.room, command.limit)}", NOBODY, rank=command.rank, number=command.number)
    if Mistake.CALL_NAMES_NO_RANK in mistakes:
        return [permit for permit, key in enumerate(server.permits, 1) if key and key.nonce == call.nonce]
    return [permit for permit, key in enumerate(server.permits, 1) if key == call]


def _claimed(server: Server, command: Acquire) -> list[int]:
    """The permit that is reserved for the message of whoever sends `command`. A limit of 1 looks at the first only."""
    permit = server.number_of(command.claim) if command.claim else 0
    return [permit] if permit and (command.limit > 1 or permit == 1) else []


def _has_place(server: Server, claim: str) -> bool:
    """Whether the place in the queue is reserved under `claim`."""
    return server.queued is not None and server.queued.nonce == claim


def _refused(server: Server, limit: int) -> Effect:
    """The answer to somebody who may not have a permit: who holds the lock, and then for whom it is kept."""
    holders = [key for key in server.permits[:limit] if key is not None]
    return Effect(Tag.CONFLICT, server, holders=tuple(sorted(holders, key=lambda key: bool(key.member))))


def enter(server: Server, command: Enter, mistakes: Mistakes) -> Effect:
    return Effect(Tag.ENTERED, server.ranked(command.member, command.rank))


def stand(server: Server, command: Stand, mistakes: Mistakes) -> Effect:
    member, limit = command.member, command.limit
    server = server.ranked(member, command.rank)
    if Mistake.OFFERED_ROOM_IGNORES_A_SMALLER_RANK not in mistakes:
        for permit in _offered(server, command):
            if any(rank < command.rank and limit_of(other) >= permit for rank, other in server.line):
                server = server.put(permit, None)
    mine = _permit_of_room(server, command)
    if mine:
        server = _called_in(server, mine, command, mistakes)
    for permit in server.free(limit):
        anybody = Mistake.STAND_IGNORES_A_SMALLER_RANK in mistakes
        if not mine and (anybody or server.first_for(permit) == member):
            mine = permit
            server = _called_in(server, mine, command, mistakes)
        elif not mine or Mistake.STAND_OFFERS_ONE_PERMIT not in mistakes:
            server = offer(server, [permit], mistakes)
    return Effect(Tag.CALLED, server) if mine else _refused(server, limit)


def _permit_of_room(server: Server, command: Stand) -> int:
    """The permit to which the first who waits in the room is called already, or that is offered to it; 0: none."""
    called = Key(f"!{command.member}", NOBODY, rank=command.rank, number=command.number)
    seen = list(enumerate(server.permits[: command.limit], 1))
    already = [permit for permit, key in seen if key == called]
    return next(iter([*already, *_offered(server, command)[-1:]]), 0)


def _offered(server: Server, command: Stand) -> list[int]:
    """The permits that are offered to the room."""
    offer = Key(f"?{command.member}", NOBODY)
    return [permit for permit, key in enumerate(server.permits[: command.limit], 1) if key == offer]


def _called_in(server: Server, permit: int, command: Stand, mistakes: Mistakes) -> Server:
    """The permit keeps the key for the first who waits in the room, and the next one has the room's rank in line."""
    called = Key(f"!{command.member}", NOBODY, rank=command.rank, number=command.number)
    # Where the command was sent before, the next waiter may have been offered another permit by that.
    is_offered = any(number != permit for number in _offered(server, command))
    kept = Key(f"?{command.member}", NOBODY) if Mistake.CALL_IS_AN_OFFER in mistakes else called
    return server.ranked(command.member, None if is_offered else command.next_rank).put(permit, kept)


def leave(server: Server, command: Leave, mistakes: Mistakes) -> Effect:
    mine = {f"?{command.member}"} | ({f"!{command.member}"} if Mistake.SECOND_ENDS_THE_CALL in mistakes else set())
    left = server.ranked(command.member, None)
    offered = [permit for permit, key in enumerate(left.permits[: command.limit], 1) if key and key.nonce in mine]
    for permit in offered:
        left = left.put(permit, None)
    reply = Tag.RELEASED if offered else Tag.LEFT
    return Effect(reply, offer(left, left.free(command.limit), mistakes))


def renew(server: Server, command: Renew, mistakes: Mistakes) -> Effect:
    window = server.window
    if command.has_window and window is not None and window.nonce == command.nonce:
        says_nothing = Mistake.WINDOW_IS_NOT_SAID in mistakes
        server = server._replace(window=window if says_nothing else window._replace(sending=False))
    key = server.permits[command.permit - 1] if command.permit else server.queued
    if key is not None and (key.nonce == command.nonce or Mistake.RENEW_WITHOUT_OWNER_CHECK in mistakes):
        if Mistake.SENT_IS_NOT_SAID not in mistakes:
            key = key._replace(sending=False)
        server = server.put(command.permit, key) if command.permit else server._replace(queued=key)
        return Effect(Tag.KEPT, server, command.permit)
    return Effect(Tag.LOST, server)


def release(server: Server, command: Release | HandOver, mistakes: Mistakes) -> Effect:
    permit = _permit_to_release(server, command, mistakes)
    mine = server.permits[permit - 1] if permit else None
    notes = server.notes
    # Where the lock was lost, the mark of a copy may be lost with it, so the note is left in any case.
    if command.note and (mine is None or command.unseen_copy or mine.marked) and Mistake.NO_NOTE not in mistakes:
        notes |= {noted(command.note, mistakes)}
    server = server._replace(notes=notes)
    if mine is None:
        return Effect(Tag.LOST, server)
    if isinstance(command, HandOver) and command.claim in server.gone:
        server = server._replace(gone=server.gone - {command.claim})
        return Effect(Tag.RELEASED, _freed(server, [permit], mistakes))
    if isinstance(command, HandOver):
        return Effect(Tag.REPLACED, server.put(permit, Key(command.claim, command.attempt)), permit)
    return Effect(Tag.RELEASED, _freed(server, [permit], mistakes))


def _permit_to_release(server: Server, command: Release | HandOver, mistakes: Mistakes) -> int:
    """The permit of the owner; 0: none."""
    if Mistake.RELEASE_WITHOUT_OWNER_CHECK in mistakes and server.permits[0] is not None:
        return 1
    for permit, key in enumerate(_in_reach(server, command.limit), 1):
        called = key is not None and (key.nonce, key.rank, key.number)
        if called == (command.nonce, command.rank, command.number) and _is_exact(key, command, mistakes):
            return permit
    return 0


def _is_exact(key: Key | None, command: Release | HandOver, mistakes: Mistakes) -> bool:
    """Whether the permit holds the token of the release, if that is an undo. Else the owner is enough."""
    if not isinstance(command, Release) or command.exactly is None or Mistake.UNDO_BY_OWNER in mistakes:
        return True
    return key is not None and key.times == command.exactly[1]


def _in_reach(server: Server, limit: int) -> tuple[Key | None, ...]:
    """Where an owner with this limit is looked for: in all permits, for its limit may have been greater; but for 1."""
    return server.permits[:1] if limit == 1 else server.permits


def give_up(server: Server, command: GiveUp, mistakes: Mistakes) -> Effect:
    if _has_place(server, command.claim):
        server = server._replace(queued=None)
    if command.closes_window and server.window is not None and server.window.nonce == command.claim:
        server = server._replace(window=None)
    permit = server.number_of(command.claim)
    if 0 < permit <= len(_in_reach(server, command.limit)):
        return Effect(Tag.RELEASED, _freed(server, [permit], mistakes))
    if command.is_to_come and Mistake.GIVEN_UP_IS_FORGOTTEN not in mistakes:
        return Effect(Tag.LOST, server._replace(gone=server.gone | {command.claim}))
    return Effect(Tag.LOST, server)


def _freed(server: Server, permits: Sequence[int], mistakes: Mistakes) -> Server:
    """This state with these permits free, or offered to the first in line."""
    for permit in permits:
        server = server.put(permit, None)
    return offer(server, permits, mistakes)


def noted(attempt: Attempt, mistakes: Mistakes) -> Attempt:
    """What notes and copies of `attempt` are recognised by: the attempt itself, unless a mistake says otherwise."""
    if Mistake.SAME_ID_IS_A_COPY in mistakes:
        return Attempt(attempt.task_id, 0, 0)
    return attempt._replace(publish="") if Mistake.NOTE_NAMES_NO_PUBLISH in mistakes else attempt


_COMMANDS: dict[type, Callable[..., Effect]] = {
    Acquire: acquire,
    Reserve: reserve,
    Renew: renew,
    Release: release,
    HandOver: release,
    GiveUp: give_up,
    Enter: enter,
    Stand: stand,
    Leave: leave,
}
