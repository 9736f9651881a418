"""The demo: play the scenes, draw what happened, and check it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import redis
from kombu.exceptions import OperationalError
from rich.console import Console
from rich.text import Text

from celery_redislock.protocol.names import NOTE

from . import ledger, private
from .app import app
from .ledger import Ledger
from .player import Message, play
from .processes import Check, DemoError, wait_until
from .progress import Progress
from .scenes import Scene, all_scenes
from .timeline import FREE, REFUSED, WAITED, Look, timeline
from .verdict import RAN, REPLACED, SKIPPED, Fate, Verdict, judge, kind_of, took_together

#: The maximum width of the picture, in columns.
WIDTH = 100
#: How many seconds a lock may outlive its task's result. Celery stores the result before the lock is released.
RELEASE = 1.0


def demonstrate(console: Console, check: Check) -> Verdict:
    """Play all scenes with the running worker, draw what happened, and check it.

    Args:
        console: Where to draw.
        check: Raises DemoError if the demo's own worker has died.

    Raises:
        DemoError: The server or the worker does not answer, or the worker has died.
    """
    client = _connect()
    wait_until(_worker_answers, "a worker to answer", check)
    scenes = all_scenes()
    with _empty_ledger(client):
        calls = _play(console, scenes, client, check)
        messages = [call for call in calls if not call.is_merged]
        entries = _of(messages, ledger.read(client))
        fates = [message.fate() for message in messages]
        keys_left = _keys_left(client)
    for message in messages:
        app.backend.forget(message.task_id)
    _draw(console, list(chain(*scenes)), messages, entries)
    _show_examples(console, fates, calls)
    sent = Counter(message.call.what for message in messages)
    expected = {message.call.what: message.scene.runs_each or sent[message.call.what] for message in messages}
    return judge(fates, len(calls) - len(messages), entries.runs, keys_left, expected)


@contextmanager
def swept() -> Iterator[None]:
    """At the end of the block, delete all keys that start with the demo's name: queues, results and locks.

    Raises:
        DemoError: The server does not answer.
    """
    client = _connect()
    try:
        yield
    finally:
        with suppress(redis.RedisError):
            for key in client.scan_iter(f"{private.PREFIX}*", count=1000):
                client.unlink(key)


def _connect() -> redis.Redis:
    try:
        client: redis.Redis = app.backend.client  # type: ignore[attr-defined]  # the stubs know no Redis backend
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise DemoError(f"cannot use the Redis server: {str(error).strip()}") from error
    return client


def _worker_answers() -> bool:
    try:
        return bool(app.control.ping(timeout=0.5))
    except OperationalError:  # the broker is not up yet
        return False


@contextmanager
def _empty_ledger(client: redis.Redis) -> Iterator[None]:
    client.delete(private.LEDGER)
    try:
        yield
    finally:
        client.delete(private.LEDGER)


def _play(console: Console, scenes: Sequence[Sequence[Scene]], client: redis.Redis, check: Check) -> list[Message]:
    calls: list[Message] = []

    def picture() -> Text:
        return _picture(console, calls, ledger.read(client), time.time())

    with Progress(console, list(chain(*scenes)), picture) as progress:
        for together in scenes:
            play(together, progress.show, check, calls)
    return calls


def _of(messages: Sequence[Message], entries: Ledger) -> Ledger:
    """Only the `entries` of these `messages`. With ``--no-worker``, workers may still run those of an earlier demo."""
    ids = {message.task_id for message in messages}
    return Ledger(
        [run for run in entries.runs if run.task_id in ids],
        [refusal for refusal in entries.refusals if refusal.task_id in ids],
    )


def _keys_left(client: redis.Redis) -> list[str]:
    """The locks that are still held when everything is done. Notes for redelivered messages are not locks."""
    deadline = time.monotonic() + RELEASE
    while True:
        found = [key.decode() for key in client.scan_iter(f"{private.LOCKS}:*", count=1000)]
        keys = [key for key in found if NOTE not in key]
        if not keys or time.monotonic() > deadline:
            return keys
        time.sleep(0.05)


def _picture(console: Console, messages: Sequence[Message], entries: Ledger, now: float = 0.0) -> Text:
    looks = {message.task_id: Look(message.call.mark, message.scene.style) for message in messages}
    return timeline(_of(messages, entries), looks, min(console.width, WIDTH), now)


def _draw(console: Console, scenes: Sequence[Scene], messages: Sequence[Message], entries: Ledger) -> None:
    scene_of = {message.task_id: message.scene for message in messages}
    console.print()
    console.print(_picture(console, messages, entries))
    console.print()
    for scene in scenes:
        runs = [run for run in entries.runs if scene_of[run.task_id] is scene]
        took = f" ({took_together(runs)})" if scene.is_serial else ""
        _legend(console, scene.marks, f"bold {scene.style}", f"{scene.legend}{took}")
    _legend(console, WAITED, "yellow", "waits in line: the key is held")
    _legend(console, REFUSED, "yellow", "skipped: an equal call holds the key")
    _legend(console, FREE, "dim", "the process is free")
    console.print()


def _legend(console: Console, mark: str, style: str, meaning: str) -> None:
    console.print(f"  [{style}]{mark:>3}[/]  {meaning}", soft_wrap=True)


def _show_examples(console: Console, fates: Sequence[Fate], calls: Sequence[Message]) -> None:
    """A skipped call, a replaced one, and what the calls that were merged have returned."""
    for kind in (SKIPPED, REPLACED):
        fate = next((fate for fate in fates if kind_of(fate) == kind), None)
        if fate is not None:
            console.print(f"A {kind} call: {fate.state}, {fate.reason}", markup=False, soft_wrap=True)
    merged = {call.task_id for call in calls if call.is_merged}
    for fate in fates:
        if fate.task_id in merged and kind_of(fate) == RAN:
            console.print(f"{fate.what}, of merged calls: it ran with {fate.reason}", markup=False, soft_wrap=True)
    console.print()
