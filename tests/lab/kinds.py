"""Which kind of lock server the acceptance tests have: one Valkey, or with LAB_LOCKS, by `make matrix`, another.

`lock_servers.py` has these servers.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import pytest

Kind = Literal["one", "cluster", "sentinel", "acl", "tls"]
KIND = os.environ.get("LAB_LOCKS", "one")
assert KIND in get_args(Kind), f"LAB_LOCKS={KIND} is not allowed; allowed: {', '.join(get_args(Kind))}"
ON_A_CLUSTER = KIND == "cluster"
#: Whether a command may take the time-outs of two servers.
TWICE = KIND in {"cluster", "sentinel"}
#: The time-outs where that is so: a lease may then be as short as with one server.
TIME_OUTS = {"socket_timeout": 0.25, "socket_connect_timeout": 0.25}
#: The app's `redislock_client_options`, where a test says nothing else.
OPTIONS = TIME_OUTS if TWICE else {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}


def left_out(why: str, *kinds: Kind) -> pytest.MarkDecorator:
    """Leave a test out where the lock server is of one of these kinds, with the reason."""
    return pytest.mark.skipif(KIND in kinds, reason=f"LAB_LOCKS={KIND}: {why}")


def needs_one_server(why: str) -> pytest.MarkDecorator:
    """Leave a test out where the lock server is anything but one Valkey on a unix socket, with the reason."""
    return left_out(why, "cluster", "sentinel", "acl", "tls")
