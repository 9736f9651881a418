"""LockAttributes: the options of a task, declared as its attributes for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery_redislock.options import ConflictPolicy, OnLost, OnOutage, Scope


class LockAttributes:
    """What may be set on a `LockedTask`. Durations are seconds.

    The class has annotations and no values: an option that is not set is looked up in the app's settings, and then in
    the defaults of `celery_redislock.options`.
    """

    lock_args: Sequence[str] | set[str] | frozenset[str] | None
    """Names of the parameters that make the key; ``()`` is one run per task; None, the default, is all of them."""

    lock_key: str | Callable[[Mapping[str, Any]], str] | None
    """A template over parameter names, ``"stock:{sku}"``, that several tasks can share; or a callable that takes the
    bound arguments and returns a string. Excludes `lock_args`."""

    lock_scope: Scope
    """How long the key is held: ``"run"``, the default, while the body runs; ``"job"`` from the publish to the end;
    ``"queue"``: one runs and one waits."""

    lock_on_conflict: ConflictPolicy | None
    """How a duplicate ends: ``"skip"``, ``"wait"``, ``"raise"`` or ``"join"``. By default ``"skip"`` where all
    arguments make the key, else ``"wait"``."""

    lock_lease: float
    """How long a lock outlives a dead holder. A living one renews it every third of that time. 30 by default."""

    lock_max_hold: float | None
    """Stop renewing the lock after this long, so that a hung task cannot hold it for ever. None, the default: never."""

    lock_wait_for: float | None
    """Fail with `LockConflict` after waiting in line for this long, or with `LockUnavailable` after waiting so long for
    a lock server that does not answer. None, the default: never."""

    lock_block_for: float
    """How long `lock_for` and eager runs block for a key. 10 by default."""

    lock_hold_on_retry: bool
    """Keep the key across the task's own ``self.retry()``. False by default; always so in scope ``"job"``."""

    lock_cooldown: float
    """Keep the key for this long after a success. 0 by default."""

    lock_queue_ttl: float
    """How long a key outlives a message that never starts, on top of its countdown or eta. 3600 by default."""

    lock_on_lost: OnLost
    """What happens when the lock is lost while the body runs: ``"warn"``, the default, logs a warning; ``"abort"``
    raises `LockLost` in the body."""

    lock_on_outage: OnOutage
    """What happens when Redis cannot be asked: ``"retry"`` later, the default; ``"raise"`` `LockUnavailable`; or
    ``"run"`` without the lock."""

    lock_limit: int | Callable[[Mapping[str, Any]], int]
    """How many runs may hold the key at once, 1 to 50; or a callable that takes the bound arguments and returns that
    number. 1 by default."""

    lock_fence: bool
    """Hand out a fencing number, ``self.lock.fence``. False by default."""
