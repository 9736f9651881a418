"""Workers: what the workers of the app answer, over the broker, by Celery's remote control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import describe
from celery_redislock.shown import shown

if TYPE_CHECKING:
    from celery import Celery


import threading
from collections.abc import Callable
from typing import TypeVar


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


Answer = TypeVar("Answer")

#: Seconds that a broker or a result backend has for an answer. Celery's own commands wait for a silent one for ever.
PATIENCE = 4.0


def patiently(ask: Callable[[], Answer], waits: float = 0.0) -> Answer:
    """What `ask` returns.

    Args:
        ask: Asks. A thread in which it takes longer than it may is left behind: it ends with the process.
        waits: For how many seconds it waits by itself, besides `PATIENCE`.

    Raises:
        TimeoutError: It took longer.
        Exception: What `ask` has raised.
    """
    done: list[Answer] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(ask())
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="redislock-ask", daemon=True)
    thread.start()
    thread.join(PATIENCE + waits)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {PATIENCE + waits:g} s")
    return done[0]
