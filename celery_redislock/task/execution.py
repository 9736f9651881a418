"""Execution: one process running one delivered message, from asking for the key to giving it back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from celery import states
from celery.exceptions import Ignore

from celery_redislock import signals
from celery_redislock.app import server_of
from celery_redislock.errors import LockUnavailable
from celery_redislock.info import LockInfo
from celery_redislock.message.message import Message
from celery_redislock.server import tokens
from celery_redislock.server.answers import Claim, Conflict, Finished, Granted, Note
from celery_redislock.server.held import HeldLock
from celery_redislock.server.names import keys_of
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import Token
from celery_redislock.shown import shown

from .abort import Abort
from .held_by_request import EXECUTION
from .outcome import has_ended
from .policies import GIVE_TURNS, POLICIES, CameBack, CameBackInOutage
from .publish import seconds_to_start

if TYPE_CHECKING:
    from celery.app.task import Context

    from .locked_task import LockedTask
    from .outcome import Outcome
    from .plan import LockPlan

logger = logging.getLogger(__name__)

#: The first pause of a copy, a successor or begun work, in seconds: what it waits for mostly ends in a moment.
SOON = 0.05
#: Attempts that ended so are over: a copy of their message must not run again. A rejected or requeued message, a
#: body that raised SystemExit and a dead child leave no note: their message is to run again.
_OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})


class Execution:
    """Takes, keeps and gives back the key of one request.

    Attributes:
        task: The task object; many threads share it, so nothing of a run is kept there.
        plan: What is known once per task class.
        request: Celery's request.
        message: Its message.
        lock: The held lock; None while nothing is held.
        leaves_to: The token and the seconds by which the key is left to the next attempt, once that has been sent.
        abort: Ends the body when the lock is lost; None where it may go on.
        joined: The outcome that the run ends with instead of its body's.
    """

    __slots__ = (
        "_attempt",
        "_claim",
        "_key",
        "_release_was_asked_for",
        "_server",
        "_wait_end",
        "_waits",
        "abort",
        "joined",
        "leaves_to",
        "lock",
        "message",
        "plan",
        "request",
        "task",
    )

    def __init__(self, task: LockedTask, plan: LockPlan, request: Context) -> None:
        self.task = task
        self.plan = plan
        self.request = request
        self.lock: HeldLock | None = None
        self.abort = Abort() if plan.options.on_lost == "abort" else None
        self._server = server_of(plan.app)
        self.message = Message(task, plan, request)
        self._attempt = str(self.message.attempt)
        self._waits: bool | None = None  # True while the release is to wake this run, False when it no longer is
        self._wait_end = 0.0
        self.joined: Outcome | None = None
        self.leaves_to: tuple[Token, float] | None = None
        self._key: str | None = None
        claim = self.message.returned.claim
        self._claim = None
        if claim is not None:
            self._claim = Claim(claim, seconds_to_start(task, plan, {"expires": request.expires}))
        self._release_was_asked_for = False

    @property
    def key(self) -> str:
        """The key in Redis; empty before it is known."""
        return self._key or ""

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the key of this call, or end the run as its options say.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They cannot make a key.
            LockConflict, LockUnavailable: By policy.
            Ignore, Reject: The run has ended without its body.
        """
        self._key = key = self.plan.redis_key(args, kwargs)
        if self._claim is not None and self.message.returned.key not in {key, None}:
            self._leave_other_key(key)
        options = self.plan.options
        lock = HeldLock(self._server.store, key, self._mint(), options.lease, options.max_hold, self._on_lost)
        self._take(lock)

    def end(self, state: str | None) -> None:
        """Give the key back; whatever happens, the task's own outcome stands.

        Args:
            state: What the task ended with; None where nobody knows.
        """
        if self.lock is not None:
            self._give_back(self.lock, state)
        if not self.message.was_sent_back:
            self._give_up_claim()

    def _give_back(self, lock: HeldLock, state: str | None) -> None:
        self._server.keeper.remove(lock)
        note = self._note_after(lock, state)
        # Interrupted amid the answer, it may have released the key already.
        asked_before, self._release_was_asked_for = self._release_was_asked_for, True
        try:
            was_held = self._last_word(lock, state, note)(self._server.store)
        except LockUnavailable as error:
            soon = f"it is given back once Redis answers, or ends in {lock.lease:g} s"
            logger.warning("%s has ended, but %s; %s", self.message.name, error, soon)
            # Where the broker was away too, the message may not have been acked: its copy must find the note.
            note = note and note._replace(in_any_case=True)
            self._server.keeper.later(self._last_word(lock, state, note))
            self.lock = None
            return
        self.lock = None  # only now: a time limit that strikes before leaves it to the postrun hook
        if not was_held and lock.was_granted and not asked_before:
            lock.lose("its key was not ours at the release")
        if signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)

    def _note_after(self, lock: HeldLock, state: str | None) -> Note | None:
        if state not in _OVER:
            return None
        copy_may_wait, is_sent_back_only = self.message.may_be_a_copy, not self.message.is_delivered_again
        ttl = self.plan.short_note_ttl if copy_may_wait and is_sent_back_only else self.plan.note_ttl
        return Note(self._note(lock.key), ttl, copy_may_wait)

    def _last_word(self, lock: HeldLock, state: str | None, note: Note | None) -> Callable[[LockStore], bool]:
        """How the key is given back: to the next attempt, after its cooldown, or at once."""
        key, token, leaves_to, cooldown = lock.key, lock.token, self.leaves_to, self.plan.options.cooldown
        if leaves_to is not None:
            return lambda store: store.hand_over(key, token, *leaves_to, note)
        if cooldown and state == states.SUCCESS:
            return lambda store: store.cool_down(key, token, cooldown, note)
        return lambda store: store.release(key, token, note)

    def _leave_other_key(self, key: str) -> None:
        """The publisher made another key of the same arguments: its code is older or newer."""
        logger.warning(
            "%s: its publisher took lock %s, but its arguments make %s here: that one is given up, and this one asked "
            "for; do the publisher and this worker run the same code?",
            *(self.message.name, shown(str(self.message.returned.key)), key),
        )
        self._give_up_claim()
        self.message.returned = self.message.returned._replace(claim=None, key=None)

    def _give_up_claim(self) -> None:
        """What was left to the message is not needed: it does not run, or runs without."""
        key = self.message.returned.key or self._key
        if self._claim is not None and key is not None:
            is_to_come = self.plan.hands_over_to(self.message.attempt.retries)
            self._server.give_up(key, self._claim.nonce, is_to_come=is_to_come)
        self._claim = None

    def _take(self, lock: HeldLock) -> None:
        while True:
            # Before the answer: where a time limit strikes while it is read, the postrun hook releases the key.
            self.lock = lock
            # Only such a message reads the note that its attempt is over.
            note = self._note(lock.key) if self.message.may_be_a_copy else None
            try:
                result = self._ask(lock, note)
            except LockUnavailable as error:
                self.lock = None
                if self._runs_without(error):
                    self._give_up_claim()
                    return
                lock.token = self._mint()  # the undo of the last one may still be on its way
                continue
            if isinstance(result, Granted):
                self._claim = None
                lock.granted(result)
                self._taken(lock)
                return
            self.lock = None
            if isinstance(result, Finished):
                self._drop()
            self._conflict(lock.key, result)

    def _ask(self, lock: HeldLock, note: str | None) -> Granted | Conflict | Finished:
        fence, waits = self.plan.options.fence, self._waits
        if self._claim is None:
            return lock.store.acquire(lock.key, lock.token, lock.lease, note, fence=fence, waits=waits)
        return lock.store.claim(lock.key, lock.token, lock.lease, self._claim, note, fence=fence, waits=waits)

    def _drop(self) -> NoReturn:
        logger.info("%s: dropped, it has finished in another delivery of its message", self.message.name)
        raise Ignore("finished in another delivery of its message")

    def _taken(self, lock: HeldLock) -> None:
        self._server.keeper.add(lock)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self.task, lock=lock)

    def _conflict(self, key: str, conflict: Conflict) -> None:
        holder = conflict.holder.info(key, conflict.ttl)
        begun = self.message.has_begun or str(conflict.holder.attempt) == self._attempt
        options = self.plan.options
        has_the_key = self._claim is not None and options.scope != "queue"  # it had: it was kept for too short a time
        policy = options.on_conflict
        if options.scope == "job" and holder.task_id is None:  # no job of which this is a duplicate
            policy = "retry"
        is_spared = begun or has_the_key or self.message.attempt.retries or self._follows(holder)
        if not is_spared and not (policy not in GIVE_TURNS and has_ended(self.task, holder)):
            if self._waits is None:  # else it is the conflict that has been announced
                self._announce(holder, policy)
            POLICIES[policy](self, holder)
            return
        self._announce(holder, "come back")
        pause = self.pause(SOON, holder)
        self.tell(holder, f"come back: in {pause:.2f} s")
        if self.message.send_back(pause, begun=begun):
            raise CameBack(f"the lock is held by {holder.who}; the message comes back")

    def pause(self, shortest: float, holder: LockInfo | None) -> float:
        """Seconds until the message should be tried again; not before the key of `holder` has cooled down."""
        pause = self.message.returned.delay(shortest, self.plan.options.retry_max_delay)
        if holder and holder.state == "cooling":
            pause = max(pause, holder.ttl or 0.0)
        return self.message.countdown(pause)

    def tell(self, holder: LockInfo, what: str) -> None:
        """Log a conflict: who holds the key, the policy, and what becomes of this run, which Celery only calls ignored.

        Args:
            holder: Of the key.
            what: The policy and what is next, as ``retry: it comes back in 0.40 s``.
        """
        logger.info("%s: lock %s is held by %s: %s", self.message.name, holder.key, holder.who, what)

    def wait_for_release(self, holder: LockInfo) -> bool:
        """Block for a while, in this run's `lock_wait`.

        Returns:
            Whether to ask for the key again: True at first, to say that this run waits, and at last, to say that it
            waits no longer; False from then on.
        """
        if self._waits is None:
            self.tell(holder, f"wait: it waits for up to {self.plan.options.wait:g} s in its worker slot")
            self._waits, self._wait_end = True, time.monotonic() + self.plan.options.wait
            return True
        left = self._wait_end - time.monotonic()
        if self._waits and left > 0:
            self._server.wait(holder, left)
            return True
        was_waiting, self._waits = self._waits, False
        return was_waiting

    def _follows(self, holder: LockInfo) -> bool:
        """Whether the holder itself caused this message: no duplicate, but work that comes after it.

        The first step of a chain may run once more while its last one arrives.
        """
        request = self.request
        causes = (request.id, request.parent_id, request.root_id)
        return holder.task_id is not None and holder.task_id in {tokens.known_as(str(one)) for one in causes if one}

    def _runs_without(self, error: LockUnavailable) -> bool:
        """What an outage does: True to run without the lock, False where the key must be asked for again."""
        policy = self.plan.options.on_outage
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        if policy == "raise":
            raise error
        if policy == "run":
            logger.warning("%s runs without its lock, by lock_on_outage: %s", self.message.name, error)
            return True
        pause = self.pause(self.plan.options.retry_delay, None)
        logger.info("%s: %s; it comes back in %.2f s", self.message.name, error, pause)
        if self.message.send_back(pause):
            raise CameBackInOutage("Redis could not be asked for the lock; the message comes back")
        return False

    def _announce(self, holder: LockInfo, policy: str) -> None:
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)

    def _on_lost(self, lock: HeldLock, reason: str) -> None:
        if self.abort is not None:  # first: a receiver may take its time
            self.abort.strike(lock.key, reason)
        signals.lock_lost.send(sender=self.task, lock=lock, reason=reason)

    def _note(self, key: str) -> str:
        return keys_of(key).note(self._attempt)

    def _mint(self) -> Token:
        return tokens.mint(self.message.nonce, self._attempt, self.plan.origin(self.request.hostname))


def execution_of(request: Any) -> Execution | None:
    """What runs for Celery's `request`; None where there is none, or it has not asked for its key."""
    execution = None if request is None else request.__dict__.get(EXECUTION)
    return execution if isinstance(execution, Execution) else None
