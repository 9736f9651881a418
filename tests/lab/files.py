"""The file system as a broker, mended: kombu's readers take a file that its writer has opened and not written yet.

The message in it is lost then, and the reader raises JSONDecodeError.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from kombu.transport.filesystem import Channel, Transport
from kombu.utils.json import dumps


class WholeFiles(Channel):
    """A message gets its name when its file is whole."""

    def _put(self, queue: str, payload: Any, **_: Any) -> None:
        name = f"{round(time.monotonic() * 1000)}_{uuid4()}.{queue}.msg"
        unfinished = Path(self.data_folder_out, f".{name}")
        unfinished.write_text(dumps(payload))
        unfinished.rename(unfinished.with_name(name))


def write_whole() -> None:
    """From now on, in this process, messages in files are written so."""
    Transport.Channel = WholeFiles
