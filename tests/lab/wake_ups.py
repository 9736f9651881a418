"""Wake-ups: whether the lock servers of this session drop every PUBLISH, so that nobody who waits is ever woken up.

``make matrix`` runs the acceptance tests so: a wake-up is only a hint, and whoever waits must look by itself in time.
"""

from __future__ import annotations

import os

import pytest

DROPS_PUBLISH = os.environ.get("LAB_DROPS_PUBLISH") == "1"
#: Who waits and hears nothing looks when the holder's lease ends. Where every PUBLISH is dropped, that is soon.
SETTINGS = {"redislock_lease": 2.0} if DROPS_PUBLISH else {}
#: The lease of a task that names none, in seconds.
LEASE = SETTINGS.get("redislock_lease", 30.0)
#: Why a test is left out, more than once.
A_MINUTE = "who has seen that the key is reserved for a message looks again in a minute"


def counts_on_wake_ups(why: str) -> pytest.MarkDecorator:
    """Leave a test out where nobody is woken up, with the reason."""
    return pytest.mark.skipif(DROPS_PUBLISH, reason=f"every PUBLISH is dropped: {why}")


def few(many: int) -> int:
    """So many messages; fewer where every PUBLISH is dropped: each has its turn at a look, five seconds after the last.

    Args:
        many: How many messages wait for one key.
    """
    return min(many, 4) if DROPS_PUBLISH else many
