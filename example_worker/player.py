"""The player: calls the tasks of a scene and watches until all are done."""

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

#: Seconds that a scene may take. A message that is not done by then counts as lost.
PATIENCE = 20.0
#: Seconds between two looks at the results.
PAUSE = 0.1


@dataclass(frozen=True)
class Message:
    """A call that was published.

    It keeps only the id of its result. Celery's AsyncResult would hold a subscription, and end it when the server may
    be gone already.
    """

    call: Call
    scene: Scene
    task_id: str

    @property
    def state(self) -> str:
        """Celery's state of the message so far."""
        return app.backend.get_state(self.task_id)

    def fate(self) -> Fate:
        """What has become of the message."""
        state = self.state
        reason = str(app.backend.get_result(self.task_id)) if state in states.EXCEPTION_STATES else ""
        return Fate(self.task_id, self.call.what, state, reason)


Watcher = Callable[[Counter[str], int], None]


def play(scene: Scene, watch: Watcher, check: Check) -> list[Message]:
    """Publish the calls of `scene` at their times, and wait until all are done.

    Args:
        scene: What to play.
        watch: Told again and again how many messages are in which state, and how many are still to be published.
        check: Raises DemoError where the worker has died.
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
