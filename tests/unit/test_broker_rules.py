"""Our rules for what a broker may do, above all for one of the shape of SQS. These tests ask no SQS.

SQS delivers a message again after a visibility timeout that each queue has of its own, twelve hours at most. It delays
a message by fifteen minutes at most. And it marks no message as redelivered, but counts how often it was received.
"""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_redislock import LockedTask
from celery_redislock.message.delivery import was_delivered_before
from celery_redislock.message.republish import OVERDUE, Broker
from celery_redislock.worker.server_check import FORGETFUL, broker_warnings
from celery_redislock.worker.waiting_message import LONGEST_WAIT
from tests.lab.arrivals import arrived

#: A queue's own visibility timeout where nobody has set one, kombu's default for a queue that it makes, the longest.
SQS_TIMEOUTS = [30, 1800, 12 * 3600]


def broker_with(timeout: float) -> Broker:
    app = Celery("rules", broker="memory://", set_as_current=False)
    app.conf.broker_transport_options = {"visibility_timeout": timeout}
    return Broker(app)


@pytest.mark.parametrize("timeout", SQS_TIMEOUTS)
@pytest.mark.parametrize("delay", [0, 1, 30, 900, 86400])
def test_no_countdown_of_ours_lasts_until_the_broker_delivers_the_message_again(timeout: float, delay: float) -> None:
    """The worker keeps a message until its countdown is over, and the broker counts meanwhile."""
    countdown = broker_with(timeout).countdown(delay)
    assert 0 <= countdown <= min(delay, timeout / 2)


def test_no_pause_of_ours_is_longer_than_sqs_can_delay_a_message() -> None:
    from celery_redislock.policy.wait import LONGEST_PAUSE

    assert LONGEST_PAUSE <= 900


@pytest.mark.parametrize("timeout", SQS_TIMEOUTS)
def test_a_message_leaves_the_line_before_the_broker_delivers_it_again_and_a_run_expects_a_copy_in_time(
    timeout: float,
) -> None:
    broker = broker_with(timeout)
    assert LONGEST_WAIT * timeout < OVERDUE * timeout < timeout
    assert LONGEST_WAIT * timeout < broker.overdue_after < timeout


@pytest.mark.parametrize("timeout", SQS_TIMEOUTS)
@pytest.mark.parametrize("is_sent_back_only", [True, False])
def test_a_note_lives_until_a_copy_has_come_and_has_waited(timeout: float, is_sent_back_only: bool) -> None:
    assert broker_with(timeout).note_ttl(is_sent_back_only=is_sent_back_only) > 2 * timeout


def received(count: str | None, redelivered: bool = False) -> dict[str, Any]:
    """A request's dict as Celery makes it of a message that kombu has from SQS."""
    attributes = {} if count is None else {"ApproximateReceiveCount": count}
    return {
        "id": "id",
        "delivery_info": {"redelivered": redelivered},
        "properties": {"delivery_info": {"sqs_message": {"Attributes": attributes}, "sqs_queue": "https://sqs"}},
    }


@pytest.mark.parametrize(
    ("count", "redelivered", "expected"),
    [("1", False, False), ("2", False, True), ("17", False, True), (None, False, False), (None, True, True)],
)
def test_a_message_that_was_received_before_may_be_a_copy_though_it_is_not_marked_as_redelivered(
    count: str | None, redelivered: bool, expected: bool
) -> None:
    app = Celery("rules", broker="memory://", set_as_current=False)
    app.conf.redislock_url = "redis://nowhere.invalid/0"

    @app.task(base=LockedTask, name="late", acks_late=True, shared=False)
    def late() -> None: ...

    delivered = arrived(app.tasks["late"], received(count, redelivered))
    assert delivered.is_redelivered is expected
    assert delivered.may_be_a_copy is expected
    assert delivered.has_begun is expected


def test_a_message_that_tells_no_such_number_is_no_copy() -> None:
    strange = ({}, None, "x", {"sqs_message": None}, {"sqs_message": {"Attributes": {"ApproximateReceiveCount": "x"}}})
    for properties in (None, {}, *({"delivery_info": one} for one in strange)):
        assert not was_delivered_before({"id": "id", "properties": properties})


def test_a_worker_says_that_its_broker_forgets_and_that_a_visibility_timeout_is_not_known() -> None:
    for transport in sorted(FORGETFUL):
        (line,) = broker_warnings(transport, {"visibility_timeout": 5})
        assert line.startswith(f"the broker {transport} deletes a message when it delivers it: ")
    (line,) = broker_warnings("sqs", {})
    assert "set visibility_timeout in broker_transport_options" in line
    assert [*broker_warnings("SQS", {"visibility_timeout": 30})] == []
    for transport in ("redis", "rediss", "sentinel", "amqp", "pyamqp", "gcpubsub", "azureservicebus", "confluentkafka"):
        assert [*broker_warnings(transport, {})] == []
