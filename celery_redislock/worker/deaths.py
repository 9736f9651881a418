"""Deaths: which children of the pool have died. Linux tells at once; elsewhere a look is taken now and then.

Celery itself may notice a killed child only five seconds later: its pool looks when the child's pipe has closed, which
may be before the child is dead, and then by a timer.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from contextlib import suppress

#: Seconds between two looks at a process of which the system does not tell.
LOOK_EVERY = 0.2


class Deaths:
    """Waits for the deaths of processes, without waking up before one has died.

    On Linux each process has a file descriptor, its pidfd, that can be read from its death on, though nobody has waited
    for the process yet. A process without one, as on macOS, is looked at.
    """

    def __init__(self) -> None:
        #: The pidfd of each process that is watched; None where it has none and is looked at.
        self._watched: dict[int, int | None] = {}
        self._changing = threading.Lock()
        self._selector = selectors.DefaultSelector()
        reader, self._writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(self._writer, False)
        self._selector.register(reader, selectors.EVENT_READ)

    def watch(self, pid: int) -> None:
        """Have `wait` tell of the death of the process `pid`. For any thread."""
        if pid in self._watched:
            return
        with self._changing:
            if pid in self._watched:
                return
            try:
                fd = os.pidfd_open(pid)
            except (AttributeError, OSError):  # macOS; no descriptor is left; or it has died
                self._watched[pid] = None
                with suppress(BlockingIOError):
                    os.write(self._writer, b"!")
            else:
                self._watched[pid] = fd
                self._selector.register(fd, selectors.EVENT_READ, pid)

    def is_heard_of(self, pid: int) -> bool:
        """Whether `wait` hears of the death of `pid` at once."""
        return self._watched.get(pid) is not None

    def wait(self) -> list[int]:
        """Wait until processes that are watched have died; return them, which are watched no longer."""
        while True:
            looked_at = [pid for pid, fd in self._watched.copy().items() if fd is None]
            ended = [pid for pid in looked_at if is_dead(pid)]
            for key, _ in self._selector.select(0 if ended else LOOK_EVERY if looked_at else None):
                if key.data is None:
                    os.read(key.fd, 4096)
                else:
                    ended.append(key.data)
            if dead := [pid for pid in ended if self._is_over(pid)]:
                return dead

    def _is_over(self, pid: int) -> bool:
        """Watch `pid`, whose process has ended, no longer; return False if the system has given it to a new process."""
        with self._changing:
            fd = self._watched.pop(pid)
            if fd is not None:
                self._selector.unregister(fd)  # children have inherited the descriptor, so closing it would not do
                os.close(fd)
            if is_dead(pid):
                return True
            self._watched[pid] = None
            return False


def is_dead(pid: int) -> bool:
    """Whether the process `pid` has ended, even if nobody has waited for it yet.

    If the system has given `pid` to a new process, the answer is about that one.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return _has_ended(pid)
    except OverflowError:
        return False  # the id of a greenlet, in a pool without children
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


def _has_ended(pid: int) -> bool:
    """As `is_dead`, where the system has no pidfd, or has none left."""
    try:
        if hasattr(os, "waitid") and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
    except OverflowError:
        return False
    except ChildProcessError:
        pass  # the pool has already waited for it, or its parent is not this process but a fork server
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it runs, as another user
    return False
