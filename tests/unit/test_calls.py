"""The bodies of merged calls: what is written is read, and nothing in the lock server makes a worker run code."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError

from celery_redislock import LockConfigError
from celery_redislock.message.calls import read_call, write_call
from celery_redislock.protocol.replies import Granted

APP = Celery("calls", broker="memory://")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(st.lists(VALUES), st.dictionaries(st.text(), VALUES))
def test_what_is_written_is_read(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert read_call(APP, write_call("t", "json", args, kwargs)) == (args, kwargs)


def test_any_number_of_lines_in_an_argument_changes_nothing() -> None:
    assert read_call(APP, write_call("t", "json", ("\n\n",), {"a": b"\n"})) == (["\n\n"], {"a": b"\n"})


@pytest.mark.parametrize("serializer", ["pickle", "application/x-python-serialize"])
def test_pickle_is_refused_when_a_call_is_written(serializer: str) -> None:
    with pytest.raises(LockConfigError, match="could run code in your workers; set serializer='json'"):
        write_call("t", serializer, (), {})


def test_a_pickle_in_the_lock_server_is_not_read_even_if_the_app_accepts_pickle() -> None:
    app = Celery("calls", broker="memory://")
    app.conf.accept_content = ["json", "pickle"]
    body = b"application/x-python-serialize binary\n" + pickle.dumps(((), {}))
    with pytest.raises(ContentDisallowed):
        read_call(app, body)


def test_a_serializer_that_the_app_does_not_accept_is_not_read() -> None:
    app = Celery("calls", broker="memory://")
    app.conf.accept_content = ["yaml"]
    with pytest.raises(ContentDisallowed):
        read_call(app, write_call("t", "json", (), {}))


@pytest.mark.parametrize(
    "body", [None, b"", b"\n", b"application/json utf-8\n", b"application/json utf-8\n[", b"a b c\n[]"]
)
def test_a_damaged_body_is_an_error(body: bytes | None) -> None:
    with pytest.raises((ContentDisallowed, DecodeError, ValueError)):
        read_call(APP, body)


def test_arguments_that_cannot_be_serialized_are_the_callers_error() -> None:
    with pytest.raises(EncodeError):
        write_call("t", "json", (object(),), {})


@pytest.mark.parametrize(
    ("reply", "grant"),
    [
        ([b"granted"], Granted(1.0)),
        ([b"granted", 3], Granted(1.0, permit=3)),
        ([b"granted", 1, 9], Granted(1.0, 9)),
        ([b"granted", 1, None, 7], Granted(1.0, number=7)),
        ([b"granted", 1, 9, 7, b"a", b"b"], Granted(1.0, 9, 1, 7, (b"a", b"b"))),
    ],
)
def test_a_grant_is_read_whatever_was_asked_for(reply: list[Any], grant: Granted) -> None:
    assert Granted.of(reply, 1.0) == grant
