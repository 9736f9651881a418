"""Coverage of what is killed: for `make coverage`, a process of the lab writes down what it ran before its SIGKILL.

coverage.py loads this module as its plugin in each Python process, and writes at each ``os._exit``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

#: Set by coverage.py for the processes that are started under it.
MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ

#: Neither Celery nor billiard uses it, nor do they reset it in a pool's child.
LEAVE = signal.SIGUSR2


def coverage_init(_registry: Any, _options: Any) -> None:
    """What coverage.py calls where it begins; forked processes inherit the handler."""
    signal.signal(LEAVE, lambda *_: os._exit(0))


def kill_group(pid: int) -> None:
    """SIGKILL for the group that this process leads; what is measured there is written before."""
    if MEASURED:
        _leave(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _leave(pid: int) -> None:
    """Have Python processes leave, the children first; meanwhile their main process stands still and replaces none."""
    import psutil  # not above: it would be imported before gevent patches what it imports

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        main = psutil.Process(pid)
        if _is_still(main) or main.exe() != os.path.realpath(sys.executable):
            return
        main.suspend()
        children = main.children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(LEAVE)
        _wait(children)
        main.send_signal(LEAVE)
        main.resume()
        _wait([main])


def _wait(processes: list[Any]) -> None:
    """Wait for their ends, which nobody may have noticed yet; a process that hangs loses what it ran."""
    end = time.monotonic() + 3
    while time.monotonic() < end and not all(map(_is_still, processes)):
        time.sleep(0.01)


def _is_still(process: Any) -> bool:
    """Whether it has ended, or has been told to stand still."""
    import psutil

    try:
        return process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED}
    except psutil.NoSuchProcess:
        return True
