"""Children: what each child of a worker's pool runs, so that nothing stays locked when one dies."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery_redislock.app import server_of
from celery_redislock.errors import LockKeyError, LockUnavailable
from celery_redislock.server.lock_server import LockServer
from celery_redislock.server.tokens import known_by
from celery_redislock.shown import shown
from celery_redislock.task.plan import LockPlan

logger = logging.getLogger(__name__)

#: Between two looks whether a child has died, in seconds. Celery itself notices a killed child up to five seconds
#: later: it looks as soon as the child's pipe has closed, which may be before the child is dead, and then by a timer.
LOOK = 0.2


class Left(NamedTuple):
    """What a message says was left to it: the key in Redis, and the claim that opens it."""

    key: str
    claim: str


class Run(NamedTuple):
    """What a child was given."""

    task_id: str
    plan: LockPlan
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    nonce: str
    left: Left | None
    """To its message; the child may have died before it could use it. None once the message goes on by itself."""
    retries: int

    @property
    def is_to_come(self) -> bool:
        """Whether the run before may leave the key to the message only when it ends."""
        return self.plan.hands_over_to(self.retries)

    @property
    def key(self) -> str | None:
        """The key in Redis; None where the child could not make it either, and held nothing."""
        try:
            return self.plan.redis_key(self.args, self.kwargs)
        except (TypeError, LockKeyError):
            return None

    @property
    def name(self) -> str:
        """For log lines."""
        return f"task {self.plan.task}[{shown(self.task_id)}]"


class Children:
    """Watches the children of this process, and releases what a dead one held.

    In a thread: the worker's event loop must not wait for Redis. A child that is still alive is never touched,
    whatever its main process has been told about it: at a hard time limit Celery reports before it kills.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._thread: threading.Thread | None = None
        self._releasing = threading.Lock()

    def accepted(self, pid: int, run: Run) -> None:
        """The child `pid` begins `run`, and so has ended its last one. Called in the main thread."""
        self._runs[pid] = run
        if self._thread is None:
            atexit.register(self.release_dead)  # at a cold shutdown children die last
            self._thread = threading.Thread(target=self._watch, name="redislock-children", daemon=True)
            self._thread.start()

    def goes_on(self, pid: Any, nonce: str) -> None:
        """The message of that run comes again, sent by the child `pid`: what was left to it is still needed.

        The child itself may end then: it is recycled, or its worker shuts down.
        """
        run = self._runs.get(pid)
        if run is not None and run.nonce == nonce:
            self._runs[pid] = run._replace(left=None)

    def release_dead(self) -> None:
        """Release what children held that are dead now."""
        with self._releasing:  # at the end of the process: until the thread has done its part
            for pid in [pid for pid in self._runs.copy() if _is_dead(pid)]:
                _release(self._runs.pop(pid))

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            try:
                self.release_dead()
            except Exception:
                logger.exception("the locks of dead children could not be released; they end with their leases")


def expect_copies(runs: Sequence[Run]) -> None:
    """The connection to the broker was lost: it delivers again what `runs` have not acked.

    The copy may wait in the queue, unseen, until its run has released the key. In a thread, as above.
    """
    threading.Thread(target=_expect_copies, args=(runs,), name="redislock-copies", daemon=True).start()


def _expect_copies(runs: Sequence[Run]) -> None:
    for run in runs:
        key = run.key
        try:
            if key is not None:
                server_of(run.plan.app).store.expect_copy(key, known_by(run.nonce))
        except LockUnavailable as error:
            logger.warning("%s: %s: its message comes again and may run once more", run.name, error)


def _release(run: Run) -> None:
    key = run.key
    if key is None:
        return
    server = server_of(run.plan.app)
    try:
        # No note: where the message comes again, it is to run again.
        if server.store.release(key, known_by(run.nonce)):
            logger.warning("%s: its process died; its lock %s was released", run.name, key)
        if run.left is not None:
            server.give_up(*run.left, is_to_come=_is_still_to_come(server, run, run.left.key), now=True)
    except LockUnavailable as error:
        logger.warning("%s: its process died; %s: it ends in %.0f s", run.name, error, run.plan.options.lease)
        if run.left is not None:  # what is left to a message lives for longer than a lease
            server.give_up(*run.left, is_to_come=run.is_to_come)


def _is_still_to_come(server: LockServer, run: Run, key: str) -> bool:
    """Whether the run before still holds `key`, so that it can leave it to the message of `run` when it ends.

    A run that holds its key no more never holds it again. So it is for each child that is recycled after a retry: that
    retry has run, and a note that it is not to come would be for nobody.
    """
    held = server.store.look(key) if run.is_to_come else None
    attempt = held.holder.attempt if held is not None else None
    return attempt is not None and attempt.task_id == run.task_id and attempt.retries < run.retries


def _is_dead(pid: int) -> bool:
    """Whether the process has ended, also where its parent has not been told yet.

    Were the number given to another process at once, the lease would end the lock.
    """
    try:
        if hasattr(os, "waitid") and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
    except ChildProcessError:
        pass  # the pool has been told, or a fork server is its parent
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it has changed its user
    return False
