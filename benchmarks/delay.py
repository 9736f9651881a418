"""A TCP proxy that makes every round trip to a server longer: ``python -m benchmarks.delay PORT SECONDS``.

A process of its own, so that it never waits for the interpreter of those who are measured.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def delayed(url: str, round_trip: float) -> Iterator[str]:
    """Yields the URL of the server at `url` as it is from afar.

    Args:
        url: Of a server on a loopback port.
        round_trip: What is added to each round trip, in seconds; where it is 0, there is no proxy.
    """
    if not round_trip:
        yield url
        return
    port = urlsplit(url).port
    command = [sys.executable, "-m", "benchmarks.delay", str(port), str(round_trip)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield url.replace(f":{port}", f":{int(process.stdout.readline())}")
        finally:
            process.kill()


class Delay:
    """Passes on what comes, half a round trip later."""

    def __init__(self, port: int, round_trip: float) -> None:
        self.port, self.one_way = port, round_trip / 2
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.peers: dict[socket.socket, socket.socket] = {}
        self.on_their_way: deque[tuple[float, socket.socket, bytes]] = (
            deque()
        )  # all take equally long: the first is due

    def serve(self) -> None:
        """Pass on until the process ends."""
        while True:
            wait = max(0.0, self.on_their_way[0][0] - time.monotonic()) if self.on_their_way else None
            # Not epoll, whose time-outs are whole milliseconds.
            readable, _, _ = select.select([self.listener, *self.peers], [], [], wait)
            for one in readable:
                self._accept() if one is self.listener else self._read(one)
            while self.on_their_way and self.on_their_way[0][0] <= time.monotonic():
                _, to, data = self.on_their_way.popleft()
                self._send(to, data)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self.port))
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peers[one] = other

    def _read(self, one: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            data = one.recv(1 << 16)
        to = self.peers[one] if data else self.peers.pop(one)
        self.on_their_way.append((time.monotonic() + self.one_way, to, data))
        if not data:
            one.close()

    def _send(self, to: socket.socket, data: bytes) -> None:
        if not data:
            self.peers.pop(to, None)
            to.close()
            return
        with suppress(OSError):  # closed meanwhile
            to.sendall(data)


if __name__ == "__main__":
    delay = Delay(int(sys.argv[1]), float(sys.argv[2]))
    print(delay.listener.getsockname()[1], flush=True)
    delay.serve()
