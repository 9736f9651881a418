"""Which errors are refusals of the lock server."""

from __future__ import annotations

import sys

import pytest
import redis

from celery_redislock.connection.outage import is_refusal


@pytest.mark.parametrize("own", [redis.ReadOnlyError, ValueError])
@pytest.mark.parametrize("of_server", [True, False])
def test_a_refusal_that_the_caller_handles_is_not_that_of_the_lock_server(
    own: type[Exception], of_server: bool
) -> None:
    """Behind Sentinels, redis-py handles a refusal of the server itself, and raises another error."""
    try:
        _raise(own())
    except own:
        assert _counts_as_refusal(of_server) is of_server
    assert _counts_as_refusal(of_server) is of_server


def _counts_as_refusal(of_server: bool) -> bool:
    outer = sys.exception()
    try:
        _lose_the_connection(of_server)
    except redis.ConnectionError as error:
        return is_refusal(error, outer)
    raise AssertionError


def _lose_the_connection(of_server: bool) -> None:
    if not of_server:
        raise redis.ConnectionError("Connection closed by server")
    try:
        _raise(redis.ReadOnlyError())
    except redis.ReadOnlyError:
        raise redis.ConnectionError("The previous master is now a slave")  # noqa: B904 # as redis-py does


def _raise(error: Exception) -> None:
    raise error
