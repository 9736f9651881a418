"""What the unit tests share: the way of a call through the broker, key makers, and text that means harm."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_redislock.keys.key_maker import KeyMaker

#: What no message may show.
SECRET = "hunter2hunter2"  # noqa: S105


def key_maker(function: Callable[..., Any], task: str = "t", **options: Any) -> KeyMaker:
    """The key maker of a task with the parameters of `function`."""
    return KeyMaker(task, inspect.signature(function), **options)


def over_the_wire(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A call as the worker gets it: through kombu's own JSON and back."""
    content_type, encoding, payload = dumps((args, kwargs), "json")
    received_args, received_kwargs = loads(payload, content_type, encoding, accept=[content_type])
    return received_args, received_kwargs


def wire_form(value: Any) -> str:
    """What kombu writes for `value`, dict keys sorted: two values with one wire form are one to the worker."""
    _, _, payload = dumps(value, "json")
    return json.dumps(json.loads(payload), sort_keys=True)


def hostile_text(special: str, others: st.SearchStrategy[str], max_size: int = 20) -> st.SearchStrategy[str]:
    """Text of which about half is `special`; `st.text` over both would hardly ever choose those."""
    return st.lists(st.sampled_from(special) | others, max_size=max_size).map("".join)
