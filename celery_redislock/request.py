"""LockedRequest: the worker main process's side."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request

from .delivery import DELIVERY, Delivery, hide_headers
from .errors import LockKeyError, LockUnavailable
from .plan import LockPlan
from .policies import SentBack, Skipped
from .server import LockServer
from .tokens import mint_nonce

logger = logging.getLogger(__name__)

#: With these the pool says that a child has died, or that it is about to kill it.
DEATHS = (WorkerLostError, TimeLimitExceeded, Terminated, SystemExit, KeyboardInterrupt)
#: Between two looks whether a child is dead, in seconds.
LOOK = 0.02
#: A worker that ends waits so long for the releases that are on their way, in seconds.
LAST_RELEASES = 5.0


class LockedRequest(Request):
    """A request whose token begins with a nonce that the main process knows too.

    So it can release the lock of a child that has died. The nonce is minted for every delivery: a message cannot
    bring one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict[DELIVERY] = Delivery(mint_nonce(), time.monotonic())

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Release the lock of a child that died; send the event of a run that a policy has ended.

        Args:
            exc_info: Celery's.
            send_failed_event: Celery's.
            return_ok: Whether the child itself reported the error, and not the pool.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if not return_ok and isinstance(error, DEATHS):
            self._release_after_death()
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, Skipped):  # Celery ends both without an event
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        elif isinstance(error, SentBack):
            self.send_event("task-retried", exception=str(error), traceback="")
        return result

    def _release_after_death(self) -> None:
        task: Any = self.task
        pid: Any = self.worker_pid
        hide_headers(self._context)  # type: ignore[attr-defined] # retry_on_worker_lost sends a new attempt with them
        if pid in {None, os.getpid()} or task._lock_plan is None or not task._lock_plan.enabled:
            return
        name = f"task {task.name}[{self.id}]"
        _Release(pid, task._lock_plan, self.args, self.kwargs, self.request_dict[DELIVERY].nonce, name).start()


class _Release(threading.Thread):
    """Releases what a child held, once it is dead. A thread: the worker's event loop must not wait for Redis."""

    def __init__(self, pid: int, plan: LockPlan, args: Any, kwargs: Any, nonce: str, name: str) -> None:
        super().__init__(name="redislock-release", daemon=True)
        self._pid = pid
        self._plan = plan
        self._call = args, kwargs
        self._nonce = nonce
        self._task = name

    def run(self) -> None:
        # A child that the pool has not reaped yet counts as alive: that is the safe side. Were its number given to
        # another process in this very moment, the lease would end the lock.
        while _is_alive(self._pid):
            time.sleep(LOOK)
        try:
            key = self._plan.redis_key(*self._call)
        except (TypeError, LockKeyError):  # the child could not make it either, and held nothing
            return
        try:
            # No note: where the message comes again, it is to run again.
            if LockServer.of(self._plan.app).store.release(key, self._nonce):
                logger.warning("%s: its process is dead; its lock %s was released", self._task, key)
        except LockUnavailable as error:
            logger.warning(
                "%s: its process is dead; %s: it ends in %.0f s", self._task, error, self._plan.options.lease
            )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has changed its user
        return True
    return True


@atexit.register
def _finish_releases() -> None:
    """At a cold shutdown children die last: let their locks be released."""
    end = time.monotonic() + LAST_RELEASES
    for thread in threading.enumerate():
        if isinstance(thread, _Release):
            thread.join(max(0.0, end - time.monotonic()))
