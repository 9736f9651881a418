"""The key of a call: the same wherever it is made and however the call is written, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_redislock import LockedTask
from celery_redislock.keys.arguments import UNSAFE, printable
from celery_redislock.protocol.names import LockKeys, redis_key
from celery_redislock.protocol.tokens import Attempt
from tests.unit.wire import hostile_text, key_maker, over_the_wire, wire_form

from .calls import Body, arguments, bodies, plain_parameters, spellings
from .steps import CHOSEN, TIME_LIMIT

pytestmark = pytest.mark.timeout(TIME_LIMIT)
names = count()


@CHOSEN
@given(st.data())
def test_a_call_has_one_key_however_it_is_written_and_on_both_sides_of_the_wire(data: st.DataObject) -> None:
    body = data.draw(bodies())
    bound = data.draw(arguments(body))
    one, other = (data.draw(spellings(body, bound)) for _ in range(2))
    make_name = key_maker(body).name
    assert make_name(*one) == make_name(*over_the_wire(*other))


@settings(CHOSEN, max_examples=CHOSEN.max_examples * 4)
@given(st.data())
def test_two_calls_have_one_key_exactly_where_a_worker_gets_equal_arguments(data: st.DataObject) -> None:
    body = data.draw(bodies())
    one, other = (data.draw(arguments(body)) for _ in range(2))
    plain = plain_parameters(body)
    if plain and data.draw(st.booleans()):  # two calls that are equal but for one argument, if at all
        other, parameter = one.copy(), data.draw(st.sampled_from(plain))
        one[parameter], other[parameter] = data.draw(_lookalikes), data.draw(_lookalikes)
    make_name = key_maker(body).name
    key, its_key = (make_name(*data.draw(spellings(body, bound))) for bound in (one, other))
    assert (key == its_key) == (by_parameter(one) == by_parameter(other))


_lookalikes = st.sampled_from([1, "1", True, 1.0, [1], [], {}])


def by_parameter(bound: Mapping[str, Any]) -> dict[str, str]:
    return {parameter: wire_form(value) for parameter, value in bound.items()}


@pytest.fixture(scope="module")
def app() -> Iterator[Celery]:
    """An app whose broker is in memory: what is published is read as a worker reads it."""
    with Celery("keys", broker="memory://", set_as_current=False) as app:
        app.conf.update(redislock_url="redis://127.0.0.1:1/0", task_default_queue="keys")
        yield app


def received(app: Celery) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the message in the queue."""
    with app.connection_for_read() as connection, connection.SimpleQueue("keys") as queue:
        message = queue.get(timeout=5)
        message.ack()
        args, kwargs, _ = message.payload
    return args, kwargs


@settings(CHOSEN, max_examples=CHOSEN.max_examples // 2)
@given(st.data())
def test_the_worker_makes_the_publishers_key_of_the_message(app: Celery, data: st.DataObject) -> None:
    body = data.draw(bodies())
    task = locked_task(app, body)
    bound = data.draw(arguments(body))
    args, kwargs = data.draw(spellings(body, bound))
    task.apply_async(args, kwargs)
    its_args, its_kwargs = received(app)
    assert task.lock_for(*args, **kwargs).key == task.lock_for(*its_args, **its_kwargs).key


def locked_task(app: Celery, body: Body) -> Any:
    return app.task(body, name=f"t{next(names)}", base=LockedTask, shared=False)


#: Text of which a caller makes an argument, a task's id or a lock's name to be taken for another.
_hostile = hostile_text("{}:%a1 *\n>&~=?!/", st.sampled_from([":line", ":permit:2", ":note:", ":gone:", "%7D"]), 8)


def all_keys(name: str, task_id: str) -> set[str]:
    """What a lock with this name has in Redis, with a message of this id."""
    keys = LockKeys(redis_key("redislock", printable(name, UNSAFE)))
    note, gone = keys.note(Attempt(task_id, 0, 0)), keys.gone("nonce")
    return {keys.queued, keys.fence, keys.line, note, gone, *(keys.permit(number) for number in (1, 2, 50))}


@CHOSEN
@given(_hostile.filter(bool), _hostile.filter(bool), _hostile, _hostile)
def test_no_name_and_no_id_forges_a_key_of_another_lock(one: str, other: str, an_id: str, its_id: str) -> None:
    its_keys, keys = all_keys(one, an_id), all_keys(other, its_id)
    assert len({key_slot(key.encode()) for key in keys}) == 1, "one lock is in one hash slot of a Cluster"
    assert one == other or not its_keys & keys
    assert len(keys) == 8
