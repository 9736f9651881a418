"""Calls: the arguments of calls that are merged into one message, as the lock server keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_redislock.errors import LockConfigError

#: A call's arguments: the positional ones, and the keyword arguments.
Arguments = tuple[list[Any], dict[str, Any]]
#: A call with a longer body, in bytes, is not merged but sent.
LONGEST_BODY = 65_536
#: Serializers that may run code as they read: with them, a client that may write to the lock server could run code in
#: the workers.
_UNSAFE = {"pickle", "application/x-python-serialize"}


def check_serializer(task: str, serializer: Any) -> None:
    """Refuse a serializer that runs code when it reads.

    Raises:
        LockConfigError: The serializer is pickle.
    """
    if serializer in _UNSAFE:
        raise LockConfigError(
            f"{task}: lock_arguments is not allowed with the serializer {serializer!r}: merged arguments are kept in "
            "the lock server, and a client that may write to it could run code in your workers; set serializer='json'"
        )


def write_call(task: str, serializer: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The body of a call: a line with its content type and encoding, and the serialized arguments.

    Raises:
        LockConfigError: The serializer is pickle.
        EncodeError: The arguments cannot be serialized.
    """
    check_serializer(task, serializer)
    content_type, encoding, payload = dumps((list(args), dict(kwargs)), serializer)
    return f"{content_type} {encoding}\n".encode() + (payload.encode() if isinstance(payload, str) else payload)


def read_call(app: Celery, body: bytes | None) -> Arguments:
    """The arguments in a body that `write_call` has made.

    Raises:
        ContentDisallowed: The app does not accept its content type, or that is pickle.
        DecodeError, ValueError: The body is damaged.
    """
    head, _, payload = (body or b"").partition(b"\n")
    content_type, encoding = head.decode().split(" ")
    accepted = {*prepare_accept_content(app.conf.accept_content)} - _UNSAFE  # type: ignore[misc]
    args, kwargs = loads(payload, content_type, encoding, accept=accepted)
    return list(args), dict(kwargs)
