"""One connection through the proxy."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.lab.resp import command_name, values

if TYPE_CHECKING:
    from tests.lab.proxy import Fault, Proxy
    from tests.lab.tls_end import TlsEnd


class Link(threading.Thread):
    """A client's connection to the proxy, and the proxy's own to the server for it: a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket | TlsEnd, port: int, *, lost: bool) -> None:
        super().__init__(name="lab-proxy", daemon=True)
        self.proxy = proxy
        self.client = client
        self.port = port
        """The client's."""
        self.server: socket.socket | None = None
        self.lost = lost
        """The connection was opened in a black hole, and reaches nobody."""
        self.is_redis = self.subscribed = self.replicates = self.silent = self.deaf = False
        self.commands, self.replies = bytearray(), bytearray()
        self.unanswered: deque[bytes] = deque()
        self.ended = threading.Event()
        self.forgotten = False
        """What the client sends next is lost, and answered with a reset."""

    def run(self) -> None:
        with self.client, suppress(OSError):
            if self.lost:
                self._pump(self.client, lambda data: None)
            else:
                with self.proxy.reach_server() as self.server:
                    back = threading.Thread(target=self._pump, args=(self.server, self._pass_reply), daemon=True)
                    back.start()
                    self._pump(self.client, self._pass_command)
                    back.join()
        self.proxy.forget(self)

    def cut(self) -> None:
        """Wake both threads: they find their connections closed."""
        for end in (self.client, self.server):
            if end:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self.ended.set()  # last: a reply that is held back must not get through

    def _pump(self, source: socket.socket | TlsEnd, pass_on: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.proxy.swallow():
                    pass_on(data)
        self.proxy.through.wait()  # a black hole does not tell the other side that this side has closed
        self.cut()

    def _pass_command(self, data: bytes) -> None:
        if self.forgotten:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.client.close()
            raise ConnectionAbortedError
        self.is_redis = self.is_redis or data.startswith(b"*")
        if self.is_redis and not self.replicates:
            self.commands += data
            for command in values(self.commands):  # noted before it is sent: its reply may come at once
                self.subscribed = self.subscribed or b"SUBSCRIBE" in command_name(command)
                self.replicates = self.replicates or command_name(command) == b"PSYNC"
                self.unanswered.append(command)
                self._meet(command)
        assert self.server
        if not self.deaf:
            self.server.sendall(data)

    def _meet(self, command: bytes) -> None:
        """Lose `command`, or hold it back, where a fault strikes it."""
        fault = self.proxy.fault_for(command, before=True)
        if fault and fault.drops:
            self.deaf = True
        elif fault:
            self._hold_back(fault)

    def _hold_back(self, fault: Fault) -> None:
        if fault.gate is None:
            self.ended.wait(fault.seconds)
        while fault.gate and not fault.gate.wait(0.01) and not self.ended.is_set():
            pass

    def _pass_reply(self, data: bytes) -> None:
        if not self.is_redis or self.replicates:  # what a primary streams to its replica is no reply
            self._deliver(data, b"")
            return
        self.replies += data
        for reply in values(self.replies):
            asked_for = self.unanswered and not self.subscribed and not reply.startswith(b">")
            self._deliver(reply, self.unanswered.popleft() if asked_for else b"")

    def _deliver(self, reply: bytes, command: bytes) -> None:
        if self.silent:
            return
        fault = self.proxy.fault_for(command)
        if fault and fault.drops:
            self.silent = True
            if not fault.hang:
                raise ConnectionAbortedError
            return
        if fault:
            self._hold_back(fault)
        self.client.sendall(reply.replace(*self.proxy.instead))
