"""Workers: what the workers of the app answer, over the broker, by Celery's remote control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import describe
from celery_redislock.shown import shown

from .deadline import patiently

if TYPE_CHECKING:
    from celery import Celery


class Workers:
    """The workers that answer.

    Args:
        app: The app.
        timeout: Seconds to wait for answers; 0 asks nobody. A worker that has not answered by then may be busy, stopped
            or gone.

    Attributes:
        problem: Why no worker could be asked, in words; None as long as the broker has taken all questions.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self.problem: str | None = None

    def ask(
        self, command: str, arguments: dict[str, Any] | None = None, to: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The answers by the names of the workers; empty where none answers.

        Args:
            command: The name of the remote control command.
            arguments: Its arguments.
            to: The names of the workers that are asked; None for all. If all of these answer, it takes no longer.
        """
        if not self._timeout:  # Celery would wait for ever
            self.problem = "--timeout is 0"
            return {}
        try:
            replies = patiently(
                lambda: self._app.control.broadcast(
                    command, arguments=arguments or {}, destination=to, reply=True, timeout=self._timeout
                ),
                waits=self._timeout,
            )
        except Exception as error:  # noqa: BLE001 - each broker has its own
            self.problem = describe(error)
            return {}
        answers = {shown(str(name)): answer for reply in replies or () for name, answer in reply.items()}
        return {name: answer for name, answer in answers.items() if not _is_error(answer)}


def _is_error(answer: Any) -> bool:
    """Whether a worker has refused: it has no such command, as one without the plugin."""
    return isinstance(answer, dict) and "error" in answer
