"""Children: tracks what each child of the pool runs, so that its lock can be released when the child dies."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from celery.worker import state

from celery_redislock.app import server_of
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable, fields, run_named
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.message.header import Reservation
from celery_redislock.options import LockOptions
from celery_redislock.policy import may_be_handed_a_key
from celery_redislock.protocol.hold import Hold, Phase
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import RESERVED, call_at, known_by
from celery_redislock.task.lost import NextAttempt
from celery_redislock.task.plan import LockPlan

from .worker_port import idle_children

logger = logging.getLogger(__name__)

#: Seconds between two checks of a process whose end the system does not report.
LOOK_EVERY = 0.2
#: Seconds after which a process that exits releases no other child's locks.
AT_EXIT = 5.0


class Run(NamedTuple):
    """A run that was given to a child: one delivery of one message."""

    task_id: str
    plan: LockPlan
    options: LockOptions
    """The lock options of the message."""
    nonce: str
    """The nonce of the token that the child stores in its key."""
    reservation: Reservation | None
    """What to release if the child dies before it takes the key reserved for the message. None if no key is reserved,
    or if the message was sent back and therefore still needs it."""
    retries: int
    call: bytes | None = None
    """What the key holds until the child acquires it; None if the message was not called to its key."""
    waited_for: tuple[Demand, ...] = ()
    """What the message waited for in this worker, and was called to; empty if it has not waited here."""
    next: NextAttempt | None = None
    """The next attempt, which takes over the key if the child dies; None if the task has no such attempt."""

    @property
    def holds(self) -> tuple[Hold, ...]:
        """What the child may hold, with whatever permit; empty if the child has not asked, and so holds nothing."""
        capacities = {one.key: one.capacity for one in self.waited_for}
        return tuple(
            Hold(
                *(self.plan.in_any_permit(key), known_by(self.nonce)),
                call=call_at(self.call, capacities[key]) if self.call and key in capacities else None,
                phase=Phase.ASKED,
            )
            for key in dict.fromkeys((*ASKED_KEYS.of(self.nonce), *capacities))
        )

    @property
    def reserved(self) -> Hold | None:
        """What is reserved for the message; None if nothing is, or if the message still needs it."""
        if self.reservation is None:
            return None
        demand = self.plan.in_any_permit(self.reservation.key)
        return Hold(demand, known_by(self.reservation.claim, RESERVED), phase=Phase.HELD)

    @property
    def name(self) -> str:
        """The task and its id, for log lines: ``task shop.bill[<id>]``."""
        return run_named(self.plan.task, self.task_id)

    def fields(self, event: str, key: str | None) -> dict[str, str]:
        """The `celery_redislock.errors.fields` of a log line about the run."""
        return fields(event, task=self.plan.task, task_id=self.task_id, key=key)


def run_of(request: Any) -> Run | None:
    """What a child is given to run for `request`; None if no lock is needed. Any task's request may have a `run`."""
    run = getattr(request, "run", None)
    return run if isinstance(run, Run) else None


class Children:
    """Watches the child processes of the pool, and releases the lock of a child that dies.

    A thread waits for the end of each child, because the worker's event loop must wait for neither a child nor Redis.
    Celery itself may notice a killed child five seconds late: its event loop checks when the child's pipe closes, which
    may be before the child is dead, and then only every five seconds; while messages wait, every half second. A live
    child keeps its lock, whatever Celery has reported: at a hard time limit, Celery reports the end before it kills the
    child.
    """

    def __init__(self) -> None:
        #: What each child runs, or has run, by pid. A thread waits for the end of each of them.
        self._runs: dict[int, Run] = {}
        #: The pids of children that Celery is about to kill, and whose runs it already counts as ended.
        self._condemned: set[int] = set()
        self._releasing = threading.RLock()

    def accepted(self, pid: int, run: Run) -> None:
        """Record that the child `pid` accepted `run`, so its previous run has ended. Called in the main thread."""
        ASKED_KEYS.read()  # before the previous run is forgotten, and before the pipe fills up
        before, self._runs[pid] = self._runs.get(pid), run
        self._condemned.discard(pid)
        if before is not None:
            ASKED_KEYS.forget(before.nonce)
        else:
            threading.Thread(target=self._watch, args=(pid,), name="redislock-children", daemon=True).start()

    def condemned(self, pid: Any) -> None:
        """Record that Celery is about to kill the child `pid`, and already counts its run as ended."""
        self._condemned.add(pid)

    def dead(self, pool: Any) -> int:
        """How many children of `pool` that have no message are dead or about to be killed. Thread-safe."""
        return sum(pid in self._condemned or is_dead(pid) for pid in idle_children(pool))

    def keep_reservation(self, pid: Any, nonce: str) -> None:
        """Record that the message of the run `nonce` was sent back, and still needs its reservation.

        Otherwise the reservation would be released when the child is recycled or the worker shuts down. The child `pid`
        may have begun another run since.
        """
        if (run := self._runs.get(pid)) is not None and run.nonce == nonce:
            self._runs[pid] = run._replace(reservation=None)

    def release_dead(self) -> None:
        """Release the locks of the children that are dead. Called at exit.

        In a cold shutdown, the pool kills the children just before this process exits. While the lock server is silent,
        each release takes as long as a command may. So after `AT_EXIT` seconds no other child's begins: the locks that
        are left end with their leases, and reservations with `lock_queue_ttl`.
        """
        end = time.monotonic() + AT_EXIT
        if self._releasing.acquire(timeout=AT_EXIT):  # waits for a release that a thread has begun
            for pid in tuple(self._runs):
                if time.monotonic() < end:
                    self._release(pid)
            self._releasing.release()

    def _watch(self, pid: int) -> None:
        while pid in self._runs:  # it stays there if the system has given the pid to another child meanwhile
            wait_for_end(pid)
            self._release(pid)

    def _release(self, pid: int) -> None:
        """Release the lock of the child `pid` if it is dead."""
        with self._releasing:
            if pid in self._runs and is_dead(pid):
                run = self._runs.pop(pid)
                # In a cold shutdown of this worker, it is an exit code, which may be 0, or True.
                is_cold = isinstance(state.should_terminate, int) and state.should_terminate is not False  # type: ignore[unreachable]
                if run.next is not None and (pid in self._condemned or is_cold):
                    run.next.call_off()
                self._condemned.discard(pid)
                try:
                    release_of_dead(run)
                except Exception:  # pragma: no cover - a bug must not leave the other dead children's locks
                    logger.exception("could not release the lock of a dead child process; it expires with its lease")


def wait_for_end(pid: int) -> None:
    """Wait until the process `pid` has ended, even if its parent has not reaped it yet."""
    with suppress(AttributeError, ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    while not is_dead(pid):  # the system has no waitid, as macOS before Python 3.13, or this is not the parent
        time.sleep(LOOK_EVERY)


def is_dead(pid: int) -> bool:
    """Whether the process `pid` has ended, even if its parent has not reaped it yet.

    If the system has reused `pid`, the answer is about the new process.
    """
    try:
        with suppress(AttributeError, ChildProcessError):  # see `wait_for_end`; or the pool has already reaped it
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # the process of another user; the id of a greenlet, in a pool without children
    return False


def release_of_dead(run: Run) -> None:
    """Release the key that a dead child held for `run`, and a reservation that the child did not use.

    If Redis does not answer, the keeper does so later. Of several keys, each is released by itself: they may be on
    different nodes of a Cluster, one of which does not answer.
    """
    server, options, holds, reserved = server_of(run.plan.app), run.options, run.holds, run.reserved
    for part in [(one,) for one in holds] if run.next is None and reserved is None else [holds]:
        release = partial(_release, run=run, holds=part, reserved=reserved)
        try:
            release(server.store)
        except LockUnavailable as error:
            text = "%s: its process ended, but its lock may not be released yet: %s; retried until the worker ends"
            logger.warning(text, run.name, error, extra=run.fields("died", error.key))
            ttl = options.lease if run.reservation is None else max(options.lease, options.queue_ttl)
            server.keeper.later(error.key, time.monotonic() + ttl, release)
    ASKED_KEYS.forget(run.nonce)  # now that the next attempt knows the key, if there is one


def _release(store: LockStore, run: Run, holds: tuple[Hold, ...], reserved: Hold | None) -> None:
    is_handed_over = _hand_over(store, run, *holds, reserved)
    for hold in holds:
        # This release leaves no note: if the broker delivers the message again, the message must run.
        if not is_handed_over and store.send(hold.ended().release()):
            about = run.fields("died", hold.demand.key)
            logger.warning("%s: its process died; its lock %s was released", run.name, hold.demand.key, extra=about)
        if hold.call is not None:
            store.pass_on(hold.demand, hold.call)
    if reserved is not None:
        store.give_up(reserved.demand, reserved.token.nonce, is_to_come=_is_still_to_come(store, run, reserved))


def _hand_over(store: LockStore, run: Run, *holds: Hold | None) -> bool:
    """Hand the key of a dead child over to the next attempt; return whether that was possible.

    If the child died before it took the key reserved for its message, the reservation is handed over.
    """
    for hold in holds:
        taken = hold and run.next and run.next.takes(hold.demand)
        if hold and taken and store.send(hold.handed_over(*taken).ended().release()):
            text = "%s: its process died; its lock %s is kept for its next attempt"
            logger.warning(text, run.name, hold.demand.key, extra=run.fields("died", hold.demand.key))
            return True
    return False


def _is_still_to_come(store: LockStore, run: Run, reserved: Hold) -> bool:
    """Whether the attempt before `run` still holds the key, and hands it over to the message when it ends.

    If so, releasing the reservation must leave the note `<key>:gone:<claim>`, which keeps that attempt from handing its
    key over. Otherwise it must not, because nothing would ever read the note: for example, when a child recycled by
    `worker_max_tasks_per_child` exits normally after its last run.
    """
    held = store.look(reserved.demand) if may_be_handed_a_key(run.retries, run.options) else None
    attempts = [holder.attempt for holder in held.holders] if held is not None else []
    return any(one is not None and one.task_id == run.task_id and one.retries < run.retries for one in attempts)


#: The children of this process.
CHILDREN = Children()
atexit.register(CHILDREN.release_dead)
