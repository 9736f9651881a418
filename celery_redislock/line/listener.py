"""Listener: the thread that listens on a room's channel for keys that are offered to the room."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError

from celery_redislock.connection.pool import Wake
from celery_redislock.errors import describe

logger = logging.getLogger(__name__)
_random = random.SystemRandom()

#: Seconds between two checks of whether the thread must stop.
LOOK_EVERY = 1.0
#: After this many seconds of silence, the listener tests the connection, which may have died unnoticed.
SILENCE = 5.0
#: The shortest and the longest pause before the next attempt to subscribe, in seconds.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
#: The pause if the Redis user has no permission to subscribe, in seconds.
PAUSE_OF_THE_DEAF = 60.0


class Listener:
    """Subscribes to channels on its own connection, and subscribes again whenever the subscription ends.

    Args:
        client: The client that provides the connection.
        channels: From `names.channel_of`: the room's own, and that of all rooms.
        on_message: Called with the text of each message. Also called with None when the subscription starts or ends,
            because messages may have been missed.

    Attributes:
        hears: Whether the subscription is active, as far as the listener knows.
    """

    def __init__(self, client: Any, channels: Sequence[str], on_message: Callable[[str | None], object]) -> None:
        self.hears = self._said = self._stopped = False
        self._client = client
        self._channels = channels
        self._on_message = on_message
        self._wake = Wake()
        self._failures = 0

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="redislock-listener", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread within about a second."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            pause = self._pause()
            try:
                self._listen()
            except NoPermissionError as error:
                self._deaf(error)
                pause = PAUSE_OF_THE_DEAF
            # Debug only: the store logs outages. A client that decodes replies may fail on bytes that are not text.
            except (RedisError, UnicodeDecodeError) as error:
                logger.debug("no subscription to %s: %s", self._channels[0], describe(error))
            except BaseException:  # pragma: no cover - a bug in this class: waiters must still get their hints
                logger.exception("the subscription to %s failed; trying again", self._channels[0])
            if self.hears:
                self.hears, pause = False, SHORTEST_PAUSE
                self._on_message(None)
            self._wake.wait(pause)

    def _listen(self) -> None:
        with self._client.pubsub() as subscription:
            subscription.subscribe(*self._channels)
            heard_at, asked = time.monotonic(), False
            while not self._stopped:
                message = subscription.get_message(timeout=LOOK_EVERY)
                now = time.monotonic()
                if message is not None:
                    heard_at, asked = now, False
                    self._heard(message)
                elif now - heard_at > SILENCE:
                    if asked or not self.hears:
                        raise RedisConnectionError("the server is silent")
                    subscription.subscribe(self._channels[0])  # not PING, which the user may not be allowed to send
                    heard_at, asked = now, True

    def _heard(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe" and not self.hears:
            self.hears, self._failures = True, 0
            self._on_message(None)
        elif message["type"] == "message":
            text = message["data"]  # bytes, unless a Cluster's client decodes replies
            self._on_message(text if isinstance(text, str) else text.decode("utf-8", "surrogateescape"))

    def _pause(self) -> float:
        self._failures = min(self._failures + 1, 10)
        return min(SHORTEST_PAUSE * float(2**self._failures), LONGEST_PAUSE) * _random.uniform(0.5, 1.0)

    def _deaf(self, error: NoPermissionError) -> None:
        if not self._said:
            self._said = True
            text = "no right to subscribe to %s: %s; waiters check every second; allow the user channels %s:*"
            logger.warning(text, self._channels[0], describe(error), self._channels[0].rpartition(":")[0])
