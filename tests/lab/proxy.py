"""A TCP proxy that does to a connection what a network, a crash or a silent server does."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from tests.lab.link import Link
from tests.lab.resp import command_name
from tests.lab.servers import wait_until
from tests.lab.tls_end import TlsEnd


@dataclass
class Fault:
    """What happens to certain commands, or to the replies to them. `Proxy` makes it."""

    to: bytes
    where: bytes
    nth: int | None
    drops: bool
    hang: bool = False
    before: bool = False
    """The fault strikes the command itself, before the server has heard of the command."""
    seconds: float = 0.0
    gate: threading.Event | None = None
    """What is hit is held back until the gate is open."""
    met: int = 0
    seen: set[bytes] | None = None
    """The commands that were hit, if each is hit only once however often it is sent."""
    struck: int = 0
    """How often the fault has struck. By then the server has run the command, unless the fault strikes `before`."""

    def strikes(self, command: bytes) -> bool:
        """Count `command`, or a reply to it, and tell whether it is hit."""
        name = command_name(command) if command else b""
        if self.to not in {b"", name} or self.where not in command:
            return False
        if self.seen is not None:
            if command in self.seen:
                return False
            self.seen.add(command)
        self.met += 1
        hit = self.nth in {None, self.met}
        self.struck += hit
        return hit

    def let_go(self) -> None:
        """Pass on what `Proxy.hold` has held back."""
        assert self.gate
        self.gate.set()

    def wait(self) -> None:
        """Wait until the fault has struck."""
        wait_until(lambda: self.struck, f"{self.to or b'anything'!r}, or a reply to it, is hit", 10)


class Proxy:
    """Listens on a loopback port, and passes every connection on to the server behind `url`.

    Redis' replies can be dropped and delayed one by one: on a connection they come in the order of its commands (but
    for one that has subscribed: there no reply is matched). Anything else, as AMQP or what a primary streams to its
    replica, is passed on untouched, and chunk by chunk if it is delayed.

    Args:
        url: The URL of a server on loopback or a unix socket, as redis-py, Celery or kombu spell it.
        tls: Clients speak TLS to the proxy, by this context, and it speaks plainly to the server.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self.lead_to(url)
        # Bound for the proxy's whole life: nobody else is given its port while nothing listens there.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.port: int = self._port.getsockname()[1]
        query = parse_qs(parts.query)
        db = query.get("db", query.get("virtual_host", ["0"]))[0]
        at_port = url.replace(f":{parts.port}", f":{self.port}")
        self.url = at_port if parts.port else f"redis://{parts.netloc}127.0.0.1:{self.port}/{db}"
        self._tls = tls
        self.swallowed = 0
        """How many chunks of data have been lost in a black hole."""
        self.through = threading.Event()
        """Not set while the proxy is a black hole."""
        self.through.set()
        self.instead: tuple[bytes, bytes] = b"", b""
        """Words in the replies, and the words of the same length that the client reads in their place."""
        self._listener: socket.socket | None = None
        self._faults: list[Fault] = []
        self._links: set[Link] = set()
        self._lock = threading.RLock()

    @contextmanager
    def serve(self) -> Iterator[Proxy]:
        self._listen()
        try:
            yield self
        finally:
            self.refuse()
            self.through.set()
            for link in list(self._links):
                link.join()
            self._port.close()

    def lead_to(self, url: str) -> None:
        """Pass new connections on to this server, as a name does whose address has changed; the others stay."""
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port) if parts.port else parts.path

    def drop_reply(self, to: bytes = b"", where: bytes = b"", nth: int = 1, *, hang: bool = False) -> Fault:
        """Lose one reply after the server has sent it, and close its connection.

        Args:
            to: The command's name as the client sends it, in capitals (redis-py's `incr` sends INCRBY); any if empty.
                To an EVALSHA the reply is NOSCRIPT where the script was not loaded before.
            where: What the command contains: a key, a script's digest.
            nth: Which of the replies that fit is lost, counted from now on.
            hang: Keep the connection open and silent instead, so that the client must time out.
        """
        return self._add(Fault(to, where, nth, drops=True, hang=hang))

    def drop_first_replies(self, to: bytes = b"", where: bytes = b"") -> Fault:
        """Lose the reply to each command that fits when it is sent for the first time, but not when it is repeated."""
        return self._add(Fault(to, where, None, drops=True, seen=set()))

    def drop_command(self, to: bytes = b"", where: bytes = b"", nth: int = 1) -> Fault:
        """Lose one command, of which the server never hears; its connection stays open and silent. As `drop_reply`."""
        return self._add(Fault(to, where, nth, drops=True, hang=True, before=True))

    def delay(self, seconds: float, to: bytes = b"", where: bytes = b"", nth: int | None = None) -> Fault:
        """Hold back every reply that fits, or the nth, and with it what comes after it on its connection."""
        return self._add(Fault(to, where, nth, drops=False, seconds=seconds))

    def hold(self, to: bytes = b"", where: bytes = b"", nth: int | None = 1, *, before: bool = False) -> Fault:
        """Hold back one reply or every one, or with `before` the command itself, until `Fault.let_go`."""
        return self._add(Fault(to, where, nth, drops=False, before=before, gate=threading.Event()))

    def cut(self) -> None:
        """Close all present connections."""
        with self._lock:
            for link in self._links:
                link.cut()

    def forget_all(self) -> None:
        """Forget all present connections, as a gateway does with those that are idle; nothing tells the client."""
        with self._lock:
            for link in self._links:
                link.forgotten = True

    def refuse(self) -> None:
        """Close all present connections and refuse new ones, until `mend`."""
        with self._lock:
            if self._listener:
                self._listener.shutdown(socket.SHUT_RDWR)  # else the listener's thread sleeps on in accept()
                self._listener.close()
                self._listener = None
            self.cut()

    def blackhole(self) -> None:
        """Accept everything and answer nothing, until `mend`: what is sent meanwhile is lost, in both directions."""
        with self._lock:
            self.through.clear()

    def mend(self) -> None:
        """Be a plain proxy again. Connections that were there in a black hole are closed: they have lost data."""
        with self._lock:
            self._faults.clear()
            if not self.through.is_set():
                self.cut()  # first: they must not pass on what came after the loss
                self.through.set()
            if self._listener is None:
                self._listen()

    def is_mute(self, port: int) -> bool:
        """Whether the client that is connected from `port` hears nothing any more, also of what it has sent before."""
        with self._lock:
            return any(link.port == port and (link.silent or link.deaf) for link in self._links)

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), name="lab-proxy", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed by `refuse`
            while True:
                client, (_, port) = listener.accept()
                with self._lock:
                    if self._listener is not listener:
                        client.close()
                        return
                    lost = not self.through.is_set()
                    end = TlsEnd(client, self._tls) if self._tls and not lost else client
                    link = Link(self, end, port, lost=lost)
                    self._links.add(link)
                    link.start()

    def reach_server(self) -> socket.socket:
        """For a link: its own connection to the server."""
        if isinstance(self._server, tuple):
            return socket.create_connection(self._server)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._server)
        return server

    def fault_for(self, command: bytes, *, before: bool = False) -> Fault | None:
        """For a link: the first fault that hits `command`, or the reply to it. Every fault counts the command."""
        with self._lock:
            faults = [fault for fault in self._faults if fault.before is before]
            return next(iter([fault for fault in faults if fault.strikes(command)]), None)

    def swallow(self) -> bool:
        """For a link: whether what has just come is lost in a black hole."""
        if self.through.is_set():
            return False
        with self._lock:
            self.swallowed += 1
        return True

    def forget(self, link: Link) -> None:
        """For a link that has ended."""
        with self._lock:
            self._links.discard(link)
