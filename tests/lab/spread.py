"""How pytest-xdist spreads the tests over its processes with ``--dist loadfile``."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling


class Spread(LoadFileScheduling):
    """A module goes to one process, but each acceptance test to the process that is free first.

    Acceptance tests share nothing but the servers of their process, and mostly wait. A module of them may take minutes,
    in which the other processes have nothing left to do.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith("tests/acceptance/") else super()._split_scope(nodeid)
