"""What the worker's main process hears of the runs that begin in its children, through a real pipe."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import pytest
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.protocol.tokens import mint_nonce
from celery_redislock.worker.early_acks import EARLY_ACKS, EarlyAcks
from celery_redislock.worker.request import locked_request


class Message:
    """What is acked; it counts how often."""

    def __init__(self) -> None:
        self.acks = 0

    def acknowledge(self) -> None:
        self.acks += 1


@pytest.fixture
def acks(monkeypatch: pytest.MonkeyPatch) -> Iterator[EarlyAcks]:
    """Those of a main process."""
    ends, acks = os.pipe(), EarlyAcks()
    monkeypatch.setattr(os, "pipe", lambda: ends)
    acks.open()
    yield acks
    for end in ends:
        os.close(end)


def begins_in_a_child(acks: EarlyAcks, nonce: str) -> None:
    if not (pid := os.fork()):
        try:
            acks.report_begin(nonce)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_message_is_acked_once_whichever_is_heard_first_its_acceptance_or_its_begin(acks: EarlyAcks) -> None:
    accepted_first, begun_first = Message(), Message()
    one, other = mint_nonce(), mint_nonce()
    acks.expect(one, accepted_first)
    acks.expect(other, begun_first)

    acks.accepted(one, accepted_first)
    acks.read()
    assert accepted_first.acks == 0
    begins_in_a_child(acks, one)
    acks.read()

    begins_in_a_child(acks, other)
    acks.read()
    acks.accepted(other, begun_first)
    acks.read()

    assert (accepted_first.acks, begun_first.acks) == (1, 1)
    assert not acks.has_accepted


def test_many_begins_are_heard_at_once(acks: EarlyAcks) -> None:
    messages = {mint_nonce(): Message() for _ in range(250)}
    for nonce, message in messages.items():
        acks.expect(nonce, message)
        acks.accepted(nonce, message)
        begins_in_a_child(acks, nonce)
    acks.read()
    assert {message.acks for message in messages.values()} == {1}


@pytest.mark.parametrize("look", [1, 2])
def test_a_message_whose_begin_another_thread_reads_amid_its_acceptance_is_acked_and_not_kept(
    acks: EarlyAcks, look: int
) -> None:
    reading = threading.Thread(target=acks.read)

    class Nonce(str):
        """Lets the other thread read just before the acceptance is noted, or just after."""

        looks = 0

        def __hash__(self) -> int:
            self.looks += 1
            if self.looks == look:
                reading.start()
                reading.join()
            return super().__hash__()

    message, nonce = Message(), mint_nonce()
    acks.expect(nonce, message)
    begins_in_a_child(acks, nonce)
    acks.accepted(Nonce(nonce), message)
    assert not reading.is_alive()
    assert message.acks == 1
    assert not acks.has_accepted


def test_what_has_failed_is_not_kept_and_is_acked_only_if_it_had_begun(acks: EarlyAcks) -> None:
    refused, unheard = Message(), Message()
    one, other = mint_nonce(), mint_nonce()
    acks.expect(one, refused)
    acks.expect(other, unheard)
    acks.accepted(one, refused)
    begins_in_a_child(acks, other)
    acks.failed(one)
    acks.failed(other)  # its child has died before the acceptance was heard
    assert (refused.acks, unheard.acks) == (0, 1)
    assert not acks.has_accepted


def test_only_what_a_child_has_accepted_is_kept(acks: EarlyAcks) -> None:
    """Celery drops messages that never run, and also those whose results it has read."""
    messages = {mint_nonce(): Message() for _ in range(2)}
    kept = [weakref.ref(message) for message in messages.values()]
    for nonce, message in messages.items():
        acks.expect(nonce, message)
    accepted = [*messages][1]
    acks.accepted(accepted, messages.pop(accepted))
    messages.clear()
    del message
    assert [one() is None for one in kept] == [True, False]
    begins_in_a_child(acks, accepted)
    acks.read()
    assert kept[1]() is None


def test_a_worker_that_shuts_down_acks_a_run_that_has_begun_also_where_it_has_not_heard_the_acceptance(
    app, config, tasks
):
    """Its event loop hears nothing more, and the broker would deliver the message again: a signal makes it read."""
    EARLY_ACKS.open()
    tasks.counted.delay("a key", "begun")
    tasks.counted.delay("a key", "queued")
    acks = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        requests = []
        for message in (app.amqp.queues[config.queue](channel).get() for _ in range(2)):
            request = locked_request("lab.counted", Request)(
                message, on_ack=lambda *given: acks.append(given), app=app, task=tasks.counted, headers=message.headers
            )
            assert request.delivery.acks_at_begin
            state.task_reserved(request)
            requests.append(request)
        begins_in_a_child(EARLY_ACKS, requests[0].delivery.nonce)
        EARLY_ACKS.read()
        assert [request.acknowledged for request in requests] == [True, False]
        assert len(acks) == 1
        for request in requests:
            state.task_ready(request)
