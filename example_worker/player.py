"""The player: call the tasks of a scene and watch them until all are done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from celery import states

from .app import app
from .processes import Check
from .scenes import Call, Scene
from .verdict import Fate

#: How many seconds a scene may take. Messages that are not done by then count as lost.
PATIENCE = 20.0
#: Seconds between two checks of the results.
PAUSE = 0.1


@dataclass(frozen=True)
class Message:
    """A published call.

    It keeps only the id of the result. An AsyncResult would hold a subscription, and close it when the server may
    already be gone.
    """

    call: Call
    scene: Scene
    task_id: str

    @property
    def state(self) -> str:
        """The current state of the task in Celery."""
        return app.backend.get_state(self.task_id)

    def fate(self) -> Fate:
        """What happened to the message."""
        state = self.state
        reason = str(app.backend.get_result(self.task_id)) if state in states.EXCEPTION_STATES else ""
        return Fate(self.task_id, self.call.what, state, reason)


Watcher = Callable[[Counter[str], int], None]


def play(scene: Scene, watch: Watcher, check: Check) -> list[Message]:
    """Publish the calls of `scene` at their times, and wait until all are done.

    Args:
        scene: What to play.
        watch: Called regularly with the number of messages in each state, and the number not yet published.
        check: Raises DemoError if the worker has died.
    """
    start = time.monotonic()
    calls = list(scene.calls)
    messages: list[Message] = []
    while True:
        while calls and calls[0].at <= time.monotonic() - start:
            call = calls.pop(0)
            messages.append(Message(call, scene, call.task.apply_async().id))
        counts = Counter(message.state for message in messages)
        watch(counts, len(calls))
        check()
        done = not calls and counts.keys() <= states.READY_STATES
        if done or time.monotonic() - start > PATIENCE:
            return messages
        time.sleep(PAUSE)
