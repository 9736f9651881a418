"""Wake: whatever interrupts it, and wherever, it can be set and waited for afterwards."""

from __future__ import annotations

import dis
import itertools
import sys
import threading

import pytest

from celery_redislock.connection.pool import Wake

#: Where CPython may run a signal handler or the garbage collector: after these instructions.
_MAY_BE_INTERRUPTED = {"CALL", "RESUME", "JUMP_BACKWARD", "CALL_FUNCTION_EX", "CALL_KW"}


class TimeLimit(Exception):
    """What a signal handler raises."""


def finish(call):
    """Call it in a thread of its own, which must end."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it hangs"


def each_place(call, handler):
    """Call `call`, and `handler` at each place in turn where it may be interrupted."""
    for place in itertools.count(1):
        armed, seen = [], []

        def trace(frame, event, _, armed=armed, seen=seen, place=place):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            before = [one.opname for one in dis.get_instructions(frame.f_code) if one.offset < frame.f_lasti][-1:]
            if armed and event == "opcode" and set(before) & _MAY_BE_INTERRUPTED:
                seen.append(frame)
                if len(seen) == place:
                    handler()
            return trace

        def run(trace=trace, armed=armed):
            try:
                sys.settrace(trace)
                call()  # not counted: from Python 3.12 on, a thread is told of opcodes only from the second call on
                armed.append(True)
                call()
            except TimeLimit:
                pass
            finally:
                sys.settrace(None)

        finish(run)
        if len(seen) < place:
            assert place > 2
            return
        yield place


def raises():
    raise TimeLimit


@pytest.fixture
def wake():
    return Wake()


def test_it_wakes_a_thread_that_waits_and_the_next_one_if_none_does(wake):
    assert not wake.wait(0)
    wake.set()
    wake.set()
    assert wake.wait(float("inf"))
    assert not wake.wait(-1)
    threading.Timer(0.01, wake.set).start()
    assert wake.wait(10)


def test_a_time_limit_at_any_point_of_set_leaves_it_free_for_others(wake):
    for _ in each_place(lambda: (wake.wait(0), wake.set()), raises):
        finish(wake.set)
        assert wake.wait(1)


def test_a_time_limit_at_any_point_of_a_wait_leaves_it_free_for_others(wake):
    for _ in each_place(lambda: wake.wait(0.01), raises):
        finish(wake.set)
        assert wake.wait(1)


def test_the_garbage_collector_may_set_it_in_the_thread_that_waits(wake):
    for _ in each_place(lambda: wake.wait(0.01), wake.set):
        wake.wait(0)
