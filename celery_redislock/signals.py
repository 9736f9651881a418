"""Signals: connect receivers to them as you do to the signals in `celery.signals`.

The ``sender`` is the task. A lock outside tasks sends no signals. Every receiver must accept ``**kwargs``.

Celery logs what a receiver raises; the run and its lock are not affected. Receivers are called one after the other, in
the thread that sends the signal: a slow one delays the run. A soft time limit raised in a receiver ends only the
receiver.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = [
    "lock_acquired",
    "lock_conflict",
    "lock_lost",
    "lock_merged",
    "lock_released",
    "lock_replaced",
    "lock_superseded",
    "lock_unavailable",
]

#: A run has acquired its key; its body starts next. Arguments: ``lock`` (the `HeldLock`, with ``key``, ``lease``,
#: ``fence`` and ``remaining``), ``waited`` (seconds since its message first met a conflict or an outage; 0.0 if none).
lock_acquired = Signal(name="lock_acquired", providing_args=["lock", "waited"])

#: A run or a publish has found its key held. Arguments: ``key`` (in Redis), ``holder`` (`LockInfo`), ``policy`` (what
#: happens next: the name of a policy; ``"always waits"`` for a message that no policy applies to; or
#: ``"return existing"`` for a call that is not sent).
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "policy"])

#: A run has sent the release of its key, even if it had lost the key. Not sent if Redis cannot be reached.
#: Arguments: ``lock``.
lock_released = Signal(name="lock_released", providing_args=["lock"])

#: A run has lost its key before releasing it. Sent once per lock: from a separate thread, or from the run if the run
#: itself notices the loss. Arguments: ``lock``, ``reason`` (text, for people).
lock_lost = Signal(name="lock_lost", providing_args=["lock", "reason"])

#: A run or a publish could not ask Redis for its key. Arguments: ``key`` (in Redis), ``error`` (`LockUnavailable`).
lock_unavailable = Signal(name="lock_unavailable", providing_args=["key", "error"])

#: A call was merged into a message that waits in the queue, so nothing was sent. Arguments: ``key`` (in Redis),
#: ``task_id`` (that of the message).
lock_merged = Signal(name="lock_merged", providing_args=["key", "task_id"])

#: A run ends as REVOKED because a newer call has replaced it (`lock_on_conflict="replace"`). Arguments: ``key`` (in
#: Redis), ``task_id`` (that of the newer call's message).
lock_replaced = Signal(name="lock_replaced", providing_args=["key", "task_id"])

#: A run ends as REVOKED because a run with a newer call has begun. Arguments: ``key`` (in Redis), ``task_id`` (that of
#: the newer run).
lock_superseded = Signal(name="lock_superseded", providing_args=["key", "task_id"])
