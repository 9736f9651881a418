"""LockAttributes: the options of a task, declared as its attributes for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery_redislock.options import ConflictPolicy, OnLost, OnOutage, Scope


class LockAttributes:
    """What may be set on a `LockedTask`. Durations are seconds.

    The class has annotations and no values: an option that is not set is looked up in the app's settings, and then in
    the defaults of `celery_redislock.options`. The tables of docs/options.md are made of these texts.
    """

    lock_args: Sequence[str] | set[str] | frozenset[str] | None
    """Names of the parameters that make the key; ``()`` is one run per task; None, the default, is all of them."""

    lock_key: str | Callable[[Mapping[str, Any]], str] | None
    """A template over parameter names, ``"stock:{sku}"``, that several tasks can share; or a callable that takes the
    bound arguments and returns a string. Excludes `lock_args`."""

    lock_scope: Scope
    """How long the key is held: ``"run"``, the default, while the body runs; ``"job"`` from the publish to the end;
    ``"queue"``: one runs and one waits. See docs/jobs.md."""

    lock_on_conflict: ConflictPolicy | None
    """How a duplicate ends: ``"skip"``, ``"wait"``, ``"raise"`` or ``"join"``. By default ``"skip"`` where all
    arguments make the key, else, and in scope ``"queue"``, ``"wait"``. See docs/conflicts.md."""

    lock_lease: float
    """How long a lock outlives a dead holder. A living one renews it every third of that time. 30 by default."""

    lock_max_hold: float | None
    """Stop renewing the lock after this long, so that a hung task cannot hold it for ever. None, the default: never."""

    lock_wait_for: float | None
    """Fail with `LockConflict` after waiting in line for this long (``"wait"``, ``"join"``), or with `LockUnavailable`
    after waiting so long for a lock server that does not answer. None, the default: never."""

    lock_block_for: float
    """How long `lock_for` and eager runs block for a key. 10 by default."""

    lock_hold_on_retry: bool
    """Keep the key across the task's own ``self.retry()``. False by default; always so in scope ``"job"``."""

    lock_cooldown: float
    """Keep the key for this long after a success. 0 by default."""

    lock_queue_ttl: float
    """For scopes ``"job"`` and ``"queue"``, and a retry that is left the key: how long the key outlives a message that
    never starts, on top of its countdown or eta, and at most until the message expires. 3600 by default."""

    lock_on_lost: OnLost
    """What happens when the lock is lost while the body runs: ``"warn"``, the default, logs a warning; ``"abort"``
    raises `LockLost` in the body. A call into C gets it when it returns. Under gevent and eventlet nothing is raised:
    use ``self.lock.check()`` there."""

    lock_on_outage: OnOutage
    """What happens when Redis cannot be asked: ``"retry"`` later, until it can, the default; ``"raise"``
    `LockUnavailable`; or ``"run"`` without the lock."""

    lock_limit: int | Callable[[Mapping[str, Any]], int]
    """How many runs may hold the key at once, 1 to 50; or a callable that takes the bound arguments and returns that
    number. 1 by default. See docs/limits.md."""

    lock_fence: bool
    """Hand out a fencing number, ``self.lock.fence``. False by default. See docs/fencing.md."""
