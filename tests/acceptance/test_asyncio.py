"""Tasks that are published from an event loop, by callers and by the bodies of tasks."""

from __future__ import annotations

import asyncio

import pytest

from tests.lab.servers import wait_until


@pytest.mark.parametrize("name", ["async_page", "async_job"])
def test_a_body_that_publishes_its_own_key_from_a_loop_is_followed_by_what_it_sent(
    tasks, start_worker, ledger, nothing_is_left, name
):
    """The thread that publishes knows the run: what it sends is no duplicate, and has a parent and a root."""
    start_worker(2)
    first = getattr(tasks, name).delay("k", 1, 4)
    ids = [first.id]
    wait_until(lambda: len(ledger.runs()) == 4, "all pages")
    for number in range(1, 5):
        result = first.app.AsyncResult(ids[-1])
        parent, root, children = result.get(timeout=20)
        assert (parent, root) == (ids[-2] if number > 1 else None, ids[0])
        assert len(children) == (number < 4)
        ids += children
    assert ledger.overlaps() == []
    assert ledger.items() == ["1", "2", "3", "4"]
    nothing_is_left()


SENT = {"work": [False, False], "job": [True, True], "queued": [False, True]}


@pytest.mark.parametrize("name", SENT)
def test_messages_of_each_scope_are_sent_and_answered_as_without_a_loop(tasks, start_worker, ledger, gate, name):
    task = getattr(tasks, name)

    async def main():
        first = await task.adelay("k", "first", str(gate))
        await asyncio.to_thread(wait_until, lambda: ledger.items() == ["first"], "it runs")
        more = [await task.aapply_async(("k", item), {"seconds": 0.0}, priority=3) for item in ("second", "third")]
        gate.open()
        return [one.duplicate for one in more], await asyncio.to_thread(first.get, 20)

    start_worker(3)
    assert asyncio.run(main()) == (SENT[name], "first")
    assert ledger.overlaps() == []
