"""A holder counts on no more than the server has granted, in whatever order renewals are sent, met and answered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from celery_redislock.hold import held_lock
from celery_redislock.hold.held_lock import Renewal, Term

LEASE, SHORT, LONG = 10.0, 4.0, 60.0
#: Seconds between two events: what is shortened does not end before the last of them.
TICK = 0.25
#: What may become of a renewal: it is answered, or its sender gives up before or after the server has met it.
FATES = [("send", "meet", "answered"), ("send", "meet", "unanswered"), ("send", "unanswered", "meet")]

#: How a renewal is sent, for each of those who may send one.
SENDERS: dict[str, Callable[[Term], Renewal]] = {
    "keeper": lambda one: one.renewing(),
    "shorten": lambda one: one.extending(SHORT),
    "lengthen": lambda one: one.extending(LONG),
}
Event = tuple[int, str]


def orders(left: Sequence[tuple[Event, ...]]) -> Iterator[tuple[Event, ...]]:
    """All orders of the events of some renewals, each of which keeps its own order."""
    if not any(left):
        yield ()
    for number, events in enumerate(left):
        if events:
            rest = [*left[:number], events[1:], *left[number + 1 :]]
            yield from ((events[0], *order) for order in orders(rest))


def play(clock: SimpleNamespace, senders: Sequence[str], order: Sequence[Event]) -> tuple[float, float]:
    """What the holder counts on at the end, and when the server ends the key; it is checked after each event."""
    clock.now = 0.0
    one, ends, sent = Term(LEASE), LEASE, {}
    one.start_lease(clock.now)
    for number, event in order:
        clock.now += TICK
        if event == "send":
            sent[number] = SENDERS[senders[number]](one)
        elif event == "meet":
            ends = clock.now + sent[number].ttl
        else:
            getattr(one, event)(sent[number])
        assert one.deadline <= ends, (senders, order)
        assert one.renew_at < one.deadline, (senders, order)
    return one.deadline, ends


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(held_lock, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


#: Each sends one renewal after the other.
THREADS = [[pair[:1], pair[1:]] for pair in itertools.product(SENDERS, repeat=2)]


@pytest.mark.parametrize(
    ("threads", "fates"),
    [
        *[(pair, FATES) for pair in THREADS],
        ([("keeper",), ("shorten",), ("lengthen",)], [FATES[0], FATES[2]]),
        ([("keeper", "keeper"), ("shorten",)], FATES),
        ([("keeper", "keeper"), ("lengthen",)], FATES),
    ],
)
def test_nobody_counts_on_more_than_the_server_has_granted(
    clock: SimpleNamespace, threads: list[tuple[str, ...]], fates: list[tuple[str, ...]]
) -> None:
    senders = [sender for thread in threads for sender in thread]
    for each in itertools.product(fates, repeat=len(senders)):
        events = iter([tuple((number, event) for event in fate) for number, fate in enumerate(each)])
        for order in orders([sum((next(events) for _ in thread), ()) for thread in threads]):
            play(clock, senders, order)


@pytest.mark.parametrize("senders", list(itertools.permutations(SENDERS)))
def test_what_is_answered_before_the_next_is_sent_counts_in_full(
    clock: SimpleNamespace, senders: tuple[str, ...]
) -> None:
    deadline, ends = play(clock, senders, [(number, event) for number in range(3) for event in FATES[0]])
    assert deadline > (ends - 2 * TICK) * 0.98


def test_the_keeper_does_not_take_back_what_was_asked_for(clock: SimpleNamespace) -> None:
    one = Term(LEASE)
    one.start_lease(0.0)
    one.answered(one.extending(LONG))
    clock.now = 20.0
    assert one.renewing().ttl == LONG - 20.0
    clock.now = LONG
    assert one.renewing().ttl == LEASE


def test_a_time_without_end_has_none(clock: SimpleNamespace) -> None:
    one = Term(float("inf"))
    one.start_lease(0.0)
    assert one.deadline == one.renew_at == float("inf")
