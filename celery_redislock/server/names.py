"""The names of all that a lock has in Redis. Nobody else builds one."""

from __future__ import annotations

import functools

#: Between the lock's name and an attempt; between the lock's name and a claim.
NOTE, GONE = ":note:", ":gone:"


class LockKeys:
    """The Redis keys of one lock, all in one slot of a Cluster.

    What is between braces in a name, its hash tag, decides about the slot. A lock whose name has one shares it with
    what belongs to the lock; else the whole name becomes the tag of the others. (A name with a closing brace but no tag
    cannot, and is of no use in a Cluster.)

    Attributes:
        lock: What the lock's holder owns.
        queued: The place of the one message that may wait in the queue, in scope ``queue``.
        waiters: Who blocks until the lock is released.
        wake: The list by which a release wakes one of them.
        fence: The last fencing number.
    """

    __slots__ = ("_stem", "fence", "lock", "queued", "waiters", "wake")

    def __init__(self, lock: str) -> None:
        start = lock.find("{")
        tagged = "}" in lock if start < 0 else lock.find("}", start) != start + 1 and "}" in lock[start:]
        self.lock = lock
        self._stem = stem = lock if tagged else f"{{{lock}}}"
        self.queued, self.fence = f"{stem}:queued", f"{stem}:fence"
        self.waiters, self.wake = f"{stem}:waiters", f"{stem}:wake"

    def note(self, attempt: object) -> str:
        """The note that an attempt is over, for copies of its message."""
        return f"{self._stem}{NOTE}{attempt}"

    def gone(self, claim: str) -> str:
        """The note that nobody will come for the lock with this claim."""
        return f"{self._stem}{GONE}{claim}"


#: Made once for the locks that are asked for most; each run asks for the names of its lock.
keys_of = functools.lru_cache(1024)(LockKeys)


def redis_key(prefix: str, name: str) -> str:
    """The Redis key of the lock `name`, as `KeyMaker` makes one. The braces are its hash tag."""
    return f"{prefix}:{{{name}}}"
