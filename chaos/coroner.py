"""The coroner: sees when a process that ran a body dies, whoever killed it."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from contextlib import suppress

from chaos.windows import DEATH_NOTED
from tests.lab.ledger import Ledger


class Coroner(threading.Thread):
    """Follows the ledger, watches every process that begins a body, and writes down its death."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(name="chaos-coroner", daemon=True)
        self.enough = threading.Event()
        self._ledger = ledger
        self._poll = select.poll()
        self._watched: dict[int, int] = {}

    def run(self) -> None:
        """Watch until `enough` is set."""
        self._ledger.path.touch()
        with self._ledger.path.open() as lines:
            rest = ""
            while not self.enough.is_set():
                *whole, rest = (rest + lines.read()).split("\n")
                for line in whole:
                    self._watch(json.loads(line))
                for process, _ in self._poll.poll(20):
                    self._report(process)

    def _watch(self, line: dict[str, object]) -> None:
        pid = line.get("pid")
        if line["event"] == "start" and isinstance(pid, int) and pid not in self._watched.values():
            with suppress(ProcessLookupError):  # it is dead already; whoever killed it has written that down
                process = os.pidfd_open(pid)
                self._watched[process] = pid
                self._poll.register(process, select.POLLIN)

    def _report(self, process: int) -> None:
        self._ledger.died(self._watched.pop(process), time.monotonic() - DEATH_NOTED)
        self._poll.unregister(process)
        os.close(process)
