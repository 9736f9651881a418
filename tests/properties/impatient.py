"""Connections to a proxy on which a time-out takes no time: nobody waits for an answer that the proxy has lost."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import redis

from tests.lab.proxy import Proxy

#: Seconds between two looks whether the proxy has lost the answer.
TURN = 0.01


def impatient(proxy: Proxy) -> type[redis.Connection]:
    """The class of the connections to `proxy`."""

    class Impatient(redis.Connection):
        def _connect(self) -> ImpatientSocket:
            return ImpatientSocket(super()._connect(), proxy)  # type: ignore[no-untyped-call]

    return Impatient


class ImpatientSocket(socket.socket):
    """Is called instead of `connected`, and times out as soon as nothing can come any more."""

    def __init__(self, connected: socket.socket, proxy: Proxy) -> None:
        timeout, port = connected.gettimeout(), connected.getsockname()[1]
        super().__init__(fileno=connected.detach())
        self.settimeout(timeout)
        self._is_mute = lambda: proxy.is_mute(port)

    def __del__(self) -> None:
        self.close()  # without a warning, which the tests ignore where a plain socket is left to the garbage collector

    def recv(self, *args: Any) -> bytes:
        self._wait()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._wait()
        return super().recv_into(*args)

    def _wait(self) -> None:
        """Wait until something can be read, as long as something may come."""
        timeout = self.gettimeout()
        if timeout == 0:
            return
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            mute = self._is_mute()  # first: what was passed on before can be read
            if select.select([self], [], [], TURN)[0]:
                return
            if mute or time.monotonic() > end:
                raise TimeoutError("timed out")
