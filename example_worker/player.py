"""The player: call the tasks of some scenes and watch them until all are done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery import states

from .app import app
from .processes import Check
from .scenes import Call, Scene
from .verdict import Fate, kind_of

#: How many seconds scenes may take. Messages that are not done by then count as lost.
PATIENCE = 20.0
#: Seconds between two checks of the results.
PAUSE = 0.1


@dataclass(frozen=True)
class Message:
    """A call that was published.

    It keeps only the id of the result. An AsyncResult would hold a subscription, and close it when the server may
    already be gone.
    """

    call: Call
    scene: Scene
    task_id: str
    is_merged: bool = False
    """Nothing was sent: the call is part of another one's message."""

    @property
    def state(self) -> str:
        """The current state of the task in Celery."""
        return app.backend.get_state(self.task_id)

    def fate(self) -> Fate:
        """What happened to the message."""
        state = self.state
        reason = str(app.backend.get_result(self.task_id)) if state in states.READY_STATES else ""
        return Fate(self.task_id, self.call.what, state, reason if reason != "None" else "")


Watcher = Callable[[Scene, Counter[str], int], None]


def play(scenes: Sequence[Scene], watch: Watcher, check: Check, messages: list[Message]) -> None:
    """Publish the calls of `scenes` at their times, and wait until all are done.

    Args:
        scenes: What to play at the same time.
        watch: Called regularly with a scene, the number of its calls that ended in each way, and of those that did not.
        check: Raises DemoError if the worker has died.
        messages: Each call is appended as soon as it is made.
    """
    start = time.monotonic()
    calls = sorted(((call, scene) for scene in scenes for call in scene.calls), key=lambda pair: pair[0].at)
    while True:
        while calls and calls[0][0].at <= time.monotonic() - start:
            call, scene = calls.pop(0)
            result = call.task.apply_async()
            messages.append(Message(call, scene, result.id, getattr(result, "duplicate", False)))
        fates = [(message, message.fate()) for message in messages if message.scene in scenes]
        for scene in scenes:
            kinds = Counter(kind_of(fate, message.is_merged) for message, fate in fates if message.scene is scene)
            watch(scene, kinds, len(scene.calls) - kinds.total())
        check()
        done = not calls and all(fate.state in states.READY_STATES for _, fate in fates)
        if done or time.monotonic() - start > PATIENCE:
            return
        time.sleep(PAUSE)
