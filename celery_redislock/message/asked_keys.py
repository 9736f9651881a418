"""AskedKeys: for which key each run has asked, so that the main process knows what a child held that has died.

The child makes the key's name, by the user's own code where `lock_key` is a callable or an argument has a ``__json__``.
The main process never runs that code, which may take its time, fail or end the process.
"""

from __future__ import annotations

import io
import os
import select
import threading
from contextlib import suppress

#: The length of a nonce, and of the length of the key that follows it, in bytes.
_NONCE, _SIZE = 22, 4
#: A pipe takes so many bytes at once or not at all, so the writes of two children never mix.
_MOST = select.PIPE_BUF
_CHUNK = 65_536


class AskedKeys:
    """The keys that the runs of one worker have asked for.

    A child tells by a pipe that it has inherited. What is in the pipe outlives the child.
    """

    def __init__(self) -> None:
        self._pipe: io.FileIO | None = None
        self._writer = -1
        self._main = 0
        self._rest = b""
        self._keys: dict[str, str] = {}
        self._reading = threading.Lock()

    def open(self) -> None:
        """Make the pipe. The worker's main process calls it once, before it forks its children."""
        if self._main != os.getpid():
            reader, self._writer = os.pipe()
            for end in (reader, self._writer):
                os.set_blocking(end, False)
            self._pipe = io.FileIO(reader, closefd=False)
            self._main = os.getpid()

    def asks(self, nonce: str, key: str) -> None:
        """Tell that the run of the delivery `nonce` asks for `key`. Called where the run is, before it asks.

        While the pipe is full, nothing is told: the key of a child that dies then ends with its lease.
        """
        if self._main == os.getpid():
            self._keys[nonce] = key
        elif self._pipe is not None:
            name = key.encode(errors="surrogatepass")
            told = b"%b%0*d%b" % (nonce.encode(), _SIZE, len(name), name)
            if len(told) <= _MOST:
                with suppress(BlockingIOError):
                    os.write(self._writer, told)

    def key_of(self, nonce: str) -> str | None:
        """The key that the run of the delivery `nonce` has asked for; None where it has not asked. For any thread."""
        self.read()
        return self._keys.get(nonce)

    def forget(self, nonce: str) -> None:
        """Forget the run of the delivery `nonce`, which is over."""
        self._keys.pop(nonce, None)

    def read(self) -> None:
        """Read what the children have told. Called in the main process, at any time."""
        if self._pipe is None:
            return
        with self._reading:
            while chunk := self._pipe.read(_CHUNK):
                self._note(self._rest + chunk)
                if len(chunk) < _CHUNK:
                    return

    def _note(self, told: bytes) -> None:
        start = 0
        while (begin := start + _NONCE + _SIZE) <= len(told):
            end = begin + int(told[begin - _SIZE : begin])
            if end > len(told):
                break
            nonce = told[start : start + _NONCE].decode()
            self._keys[nonce] = told[begin:end].decode(errors="surrogatepass")
            start = end
        self._rest = told[start:]


#: Those of this process, and of the children that it forks.
ASKED_KEYS = AskedKeys()
