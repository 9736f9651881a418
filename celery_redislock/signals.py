"""Signals, of Celery's own kind: connect receivers to them as to those of `celery.signals`.

The ``sender`` is the task. A lock outside tasks sends no signals. Every receiver must accept ``**kwargs``.

What a receiver raises is logged by Celery, and neither the run nor its lock notices. Receivers are called where it
happens, one after the other: a slow one delays the run, and a soft time limit that strikes in one ends only that one.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["lock_acquired", "lock_conflict", "lock_lost", "lock_released", "lock_unavailable"]

#: A run has taken its key; its body comes next. Arguments: ``lock`` (the `HeldLock`, with ``key``, ``lease``, ``fence``
#: and ``remaining``), ``waited`` (seconds since its message first met a conflict or an outage; 0.0 if it did not).
lock_acquired = Signal(name="lock_acquired", providing_args=["lock", "waited"])

#: A run, or a publish, has found its key held by another. Arguments: ``key`` (in Redis), ``holder`` (`LockInfo`),
#: ``policy`` (what happens now: a policy's name, ``"come back"`` for a copy, a successor or work that has begun,
#: ``"return existing"`` at a publish).
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "policy"])

#: A run has sent the release of its key, also of one that it has lost. It is not sent where Redis cannot be told.
#: Arguments: ``lock``.
lock_released = Signal(name="lock_released", providing_args=["lock"])

#: A run has lost its key before it released it. Sent once for each lock, from a thread of its own, or from the run
#: where the run itself notices the loss. Arguments: ``lock``, ``reason`` (text, for people).
lock_lost = Signal(name="lock_lost", providing_args=["lock", "reason"])

#: A run, or a publish, could not ask Redis for its key. Arguments: ``key`` (in Redis), ``error`` (`LockUnavailable`).
lock_unavailable = Signal(name="lock_unavailable", providing_args=["key", "error"])
