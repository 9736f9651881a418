"""Signals, of Celery's own kind: connect receivers to them as to those of `celery.signals`.

The ``sender`` is the task. A lock outside tasks sends no signals. Every receiver must accept ``**kwargs``.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["lock_acquired", "lock_conflict", "lock_lost", "lock_released", "lock_unavailable"]

#: A run has taken its key. Arguments: ``lock`` (the held lock), ``waited`` (seconds since its message first met a
#: conflict or an outage; 0.0 where it had not to wait).
lock_acquired = Signal(name="lock_acquired", providing_args=["lock", "waited"])

#: A run, or a publish, has found its key held by another. Arguments: ``key``, ``holder`` (`LockInfo`), ``policy`` (what
#: happens now: a policy's name, ``"come back"`` for a copy, a successor or work that has begun, ``"return existing"``
#: at a publish).
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "policy"])

#: A run has released its key. Arguments: ``lock``.
lock_released = Signal(name="lock_released", providing_args=["lock"])

#: A run has lost its key before it released it. It is sent from a thread of its own, or from the run where the run
#: itself notices the loss. Arguments: ``lock``, ``reason``.
lock_lost = Signal(name="lock_lost", providing_args=["lock", "reason"])

#: A run, or a publish, could not ask Redis for its key. Arguments: ``key``, ``error`` (`LockUnavailable`).
lock_unavailable = Signal(name="lock_unavailable", providing_args=["key", "error"])
