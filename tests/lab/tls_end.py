"""The server's end of TLS, which one thread reads while another writes: an SSLSocket is not made for that."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress


class TlsEnd:
    """As much of a socket as a link needs; the first `recv` shakes hands."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext) -> None:
        self._raw = raw
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._lock = threading.Lock()

    def __enter__(self) -> TlsEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def recv(self, size: int) -> bytes:
        """Some bytes, or none at the end; ssl.SSLError, an OSError, where the client does not speak TLS."""
        while (data := self._read(size)) is None:
            coded = self._raw.recv(size)
            if not coded:
                return b""
            with self._lock:
                self._received.write(coded)
        return data

    def sendall(self, data: bytes) -> None:
        with self._lock:
            self._tls.write(data)
            self._raw.sendall(self._to_send.read())

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def _read(self, size: int) -> bytes | None:
        """What has been received; None where more must be received first."""
        with self._lock:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                return None
            except ssl.SSLZeroReturnError:  # the client has ended it
                return b""
            finally:
                with suppress(OSError):
                    self._raw.sendall(self._to_send.read())
