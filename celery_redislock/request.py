"""LockedRequest: the worker main process's side."""

from __future__ import annotations

from time import monotonic
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.worker.request import Request

from .execution import DELIVERY, Delivery
from .policies import SentBack, Skipped
from .tokens import mint_nonce


class LockedRequest(Request):
    """A request whose token begins with a nonce that the main process knows too.

    So it can release the lock of a child that has died. The nonce is minted for every delivery: a message cannot
    bring one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict[DELIVERY] = Delivery(mint_nonce(), monotonic())

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Send the event of a run that a policy has ended, which Celery ends without one."""
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, Skipped):
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        elif isinstance(error, SentBack):
            self.send_event("task-retried", exception=str(error), traceback="")
        return result
