"""How pytest-xdist spreads the tests over its processes with ``--dist loadfile``."""

from __future__ import annotations

from zlib import crc32

from xdist.scheduler import LoadFileScheduling

#: These take a quarter of a minute, and begin first: else each process would wait for the last of them.
LONG = (
    "test_a_lock_server_that_loses_its_data_loses_no_message",
    "test_a_run_whose_begin_the_main_process_has_not_read",
    "test_in_three_deployments_no_two_runs_overlap",
    "test_330_of_330_pages",
    "test_each_step_shows_what_comes_as_pasted",
    "test_every_command_of_the_pages_runs",
    "test_no_account_is_in_two_at_once",
    "test_one_that_takes_turns_is_told_its_group",
    "test_seventy_tasks_come_through_an_outage",
    "test_stop_each_other_until_the_last_one_runs",
    "test_the_first_screen_shows_what_comes_as_pasted",
    "test_totals_are_exact_over_fifty_recycled_children",
)


class Spread(LoadFileScheduling):
    """A module goes to one process, but each acceptance test to the process that is free first.

    Acceptance tests share nothing but the servers of their process, and mostly wait. A module of them may take minutes,
    in which the other processes have nothing left to do.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if is_spread(nodeid) else super()._split_scope(nodeid)


def is_spread(nodeid: str) -> bool:
    """Whether a test goes to the process that is free first, whatever its module."""
    return nodeid.startswith("tests/acceptance/")


def place_of(nodeid: str) -> int:
    """A key by which the tests are sorted: modules that go as a whole, the tests of `LONG`, and the others mixed.

    Otherwise those of a module in which all tests wait would run at the same time, and leave the processors idle.
    """
    if not is_spread(nodeid):
        return 0
    return 1 if any(name in nodeid for name in LONG) else 2 + crc32(nodeid.encode())
