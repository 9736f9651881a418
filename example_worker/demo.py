"""The demo: play the scenes, draw what happened, and judge it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain

import redis
from celery import states
from kombu.exceptions import OperationalError
from rich.console import Console

from celery_redislock.protocol.names import NOTE

from . import ledger, private
from .app import app
from .ledger import Ledger
from .player import Message, play
from .processes import Check, DemoError, wait_until
from .progress import Progress
from .scenes import Scene, all_scenes
from .timeline import SKIPPED, WAITED, Look, timeline
from .verdict import Fate, Verdict, judge, paused

#: How many columns the picture has at most.
WIDTH = 100
#: How long a lock may outlive its task's result, in seconds: Celery stores the result before the lock is released.
RELEASE = 1.0


def demonstrate(console: Console, check: Check) -> Verdict:
    """Play all scenes with the worker that runs, draw what happened, and judge it.

    Args:
        console: Where to show it.
        check: Raises DemoError where the demo's own worker has died.

    Raises:
        DemoError: No server or no worker answers, or the worker has died.
    """
    client = _connect()
    wait_until(_worker_answers, "a worker to answer", check)
    scenes = all_scenes()
    with _empty_ledger(client):
        messages = _play(console, scenes, check)
        entries = _of(messages, ledger.read(client))
        fates = [message.fate() for message in messages]
        keys_left = _keys_left(client)
    for message in messages:
        app.backend.forget(message.task_id)
    _draw(console, scenes, messages, entries)
    _show_a_skip(console, fates)
    expected = {message.call.what: message.scene.runs_each for message in messages}
    return judge(fates, entries.runs, keys_left, expected)


@contextmanager
def swept() -> Iterator[None]:
    """At the end of the block delete all keys that begin with the demo's name: queues, results and locks.

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
        raise DemoError(f"the Redis server cannot be used: {str(error).strip()}") from error
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


def _play(console: Console, scenes: Sequence[Scene], check: Check) -> list[Message]:
    with Progress(console, scenes) as progress:
        return list(chain.from_iterable(play(scene, partial(progress.show, scene), check) for scene in scenes))


def _of(messages: Sequence[Message], entries: Ledger) -> Ledger:
    """Of the ledger's `entries` those of these `messages`: with ``--no-worker``, the user's workers may still be busy
    with messages of an earlier demo that was interrupted."""
    ids = {message.task_id for message in messages}
    return Ledger(
        [run for run in entries.runs if run.task_id in ids],
        [refusal for refusal in entries.refusals if refusal.task_id in ids],
    )


def _keys_left(client: redis.Redis) -> list[str]:
    """The locks that are still held once all is done. A note for copies of a message holds nothing, and ends alone."""
    deadline = time.monotonic() + RELEASE
    while True:
        found = [key.decode() for key in client.scan_iter(f"{private.LOCKS}:*", count=1000)]
        keys = [key for key in found if NOTE not in key]
        if not keys or time.monotonic() > deadline:
            return keys
        time.sleep(0.05)


def _draw(console: Console, scenes: Sequence[Scene], messages: Sequence[Message], entries: Ledger) -> None:
    looks = {message.task_id: Look(message.call.mark, message.scene.style) for message in messages}
    console.print()
    console.print(timeline(entries, looks, min(console.width, WIDTH)))
    console.print()
    for scene in scenes:
        runs = [run for run in entries.runs if looks[run.task_id].style == scene.style]
        pauses = f" {paused(runs)}" if scene.is_serial else ""
        _legend(console, scene.marks, f"bold {scene.style}", f"{scene.title}: {scene.legend}{pauses}")
    _legend(console, WAITED, "yellow", "the key was held: it waits in line")
    _legend(console, SKIPPED, "yellow", "the key was held: skipped, as the duplicate of its holder")
    console.print()


def _legend(console: Console, mark: str, style: str, meaning: str) -> None:
    console.print(f"  [{style}]{mark:>3}[/]  {meaning}", soft_wrap=True)


def _show_a_skip(console: Console, fates: Sequence[Fate]) -> None:
    fate = next((fate for fate in fates if fate.state == states.REVOKED), None)
    if fate is not None:
        console.print(
            f"a skipped call for {fate.what} ended as {fate.state}, {fate.reason!r}\n", markup=False, soft_wrap=True
        )
