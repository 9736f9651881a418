"""Join decisions: what a run does whose message has joined another task, by the policy ``join``. Pure functions."""

from __future__ import annotations

from enum import Enum, auto

from celery_redislock.options import LockOptions


class Joining(Enum):
    """What a run does that has joined another task."""

    END = auto()
    """End with the other task's outcome."""
    ASK = auto()
    """Ask for the key. While somebody holds it, the other task may still get an outcome, and this run comes back."""
    COME_BACK = auto()
    """Release the key and come back: the other task is between two attempts and holds no key."""
    RUN = auto()
    """Run the body: the other task has died without an outcome."""


def on_joining(*, is_ready: bool, will_run_again: bool, has_key: bool, waited: float, options: LockOptions) -> Joining:
    """What a run does that has joined another task.

    Args:
        is_ready: Whether the other task has an outcome.
        will_run_again: Whether the other task's state is RETRY.
        has_key: Whether this run holds the key, so that the other task does not run.
        waited: Seconds since this run's message first had to wait.
        options: The task's options. A task in state RETRY that has not run for `lock_queue_ttl` counts as dead.
    """
    if is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if will_run_again and waited < options.queue_ttl else Joining.RUN
