"""Signals, of Celery's own kind: connect receivers as to `celery.signals`.

``sender`` is the task; a lock outside tasks sends none. Every receiver must accept ``**kwargs``.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["lock_acquired", "lock_conflict", "lock_lost", "lock_released", "lock_unavailable"]

#: The key is held. Arguments: ``lock`` (the held lock).
lock_acquired = Signal(name="lock_acquired", providing_args=["lock"])

#: The key is held by another. Arguments: ``key``, ``holder`` (`LockInfo`), ``policy`` (what happens now:
#: a policy's name, ``"come back"`` for a copy, a successor or begun work, ``"return existing"`` at a publish).
lock_conflict = Signal(name="lock_conflict", providing_args=["key", "holder", "policy"])

#: The key was given back. Arguments: ``lock``.
lock_released = Signal(name="lock_released", providing_args=["lock"])

#: The key was lost while it was held. Sent from a thread of its own, or from the run that finds it.
#: Arguments: ``lock``, ``reason``.
lock_lost = Signal(name="lock_lost", providing_args=["lock", "reason"])

#: Redis could not be asked for the key. Arguments: ``key``, ``error`` (`LockUnavailable`).
lock_unavailable = Signal(name="lock_unavailable", providing_args=["key", "error"])
