"""What the worker's main process hears of the runs that begin in its children, through a real pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.protocol.tokens import mint_nonce
from celery_redislock.worker.early_acks import EARLY_ACKS, EarlyAcks, ack_what_has_begun
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
        acks.accepted(nonce, message)
        begins_in_a_child(acks, nonce)
    acks.read()
    assert {message.acks for message in messages.values()} == {1}


def test_a_begin_that_another_thread_reads_amid_the_acceptance_acks_the_message(acks: EarlyAcks) -> None:
    reading = threading.Thread(target=acks.read)

    class Nonce(str):
        """Lets the other thread read once the acceptance has found no begin, just before the message is noted."""

        looks = 0

        def __hash__(self) -> int:
            self.looks += 1
            if self.looks == 2:
                reading.start()
                reading.join(0.5)  # it cannot end where the acceptance keeps it out, as it must
            return super().__hash__()

    message, nonce = Message(), Nonce(mint_nonce())
    begins_in_a_child(acks, nonce)
    acks.accepted(nonce, message)
    reading.join()
    assert message.acks == 1


def test_what_has_failed_is_not_kept_and_is_acked_only_if_it_had_begun(acks: EarlyAcks) -> None:
    refused, unheard = Message(), Message()
    one, other = mint_nonce(), mint_nonce()
    acks.accepted(one, refused)
    begins_in_a_child(acks, other)
    acks.failed(one, refused)
    acks.failed(other, unheard)  # its child has died before the acceptance was heard
    assert (refused.acks, unheard.acks) == (0, 1)
    assert not acks.has_accepted
    assert not acks.has_begun(other)


def test_a_worker_that_shuts_down_acks_a_run_that_has_begun_also_where_it_has_not_heard_the_acceptance(
    app, config, tasks
):
    """Its event loop will hear nothing more, and the broker would deliver the message again."""
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
        ack_what_has_begun()
        assert [request.acknowledged for request in requests] == [True, False]
        assert len(acks) == 1
        for request in requests:
            state.task_ready(request)
