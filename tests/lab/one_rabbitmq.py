"""One RabbitMQ for all processes of pytest-xdist, each with its own virtual host: a start takes seconds of a CPU.

The main process starts it when the first of the others asks for it, and ends it after the tests.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.lab.servers import rabbitmq


class OneRabbitMQ:
    """The node and the socket at which a process asks for its address."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        self.door = str(self.folder / "door")
        self.hosts: list[str] = []
        self._is_over = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.door)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # refused if the node has not started
            connection.connect(self.door)
        self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> None:
        server = ""
        with ExitStack() as stack, self._socket:
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    if self._is_over:
                        return
                    server = server or stack.enter_context(rabbitmq(self.folder, self.hosts)).rpartition("/")[0]
                    connection.sendall(server.encode())


def url_of(door: str, host: str) -> str:
    """The AMQP URL of a virtual host, after the node has started."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(door)
        server = connection.makefile().read()
    assert server, "RabbitMQ could not be started: the main process of pytest says why"
    return f"{server}/{host}"
