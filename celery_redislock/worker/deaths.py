"""Deaths: reports which children of the pool have died, immediately on Linux, and by polling elsewhere.

Celery itself may notice a killed child five seconds late: its event loop checks when the child's pipe closes, which may
be before the child is dead, and then only every five seconds. A worker without an event loop checks every 0.8 s, but
waits another `worker_lost_wait` (10 s by default) for the child's result before it counts the run as ended.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from contextlib import suppress

#: Seconds between two checks of a process whose death the system does not report.
LOOK_EVERY = 0.2


class Deaths:
    """Waits for processes to die.

    On Linux, `wait` sleeps until a process dies: each process has a file descriptor, its pidfd, which becomes
    readable at its death, even before the parent reaps it. A process without a pidfd, as on macOS, is polled.
    """

    def __init__(self) -> None:
        #: The pidfd of each watched process; None if it has none and is polled.
        self._watched: dict[int, int | None] = {}
        self._changing = threading.Lock()
        self._selector = selectors.DefaultSelector()
        reader, self._writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(self._writer, False)
        self._selector.register(reader, selectors.EVENT_READ)

    def watch(self, pid: int) -> None:
        """Watch the process `pid`, so that `wait` reports its death. Thread-safe."""
        if pid in self._watched:
            return
        with self._changing:
            if pid in self._watched:
                return
            try:
                fd = os.pidfd_open(pid)
            except (AttributeError, OSError):  # macOS, no free descriptors, or already dead
                self._watched[pid] = None
                with suppress(BlockingIOError):
                    os.write(self._writer, b"!")
            else:
                self._watched[pid] = fd
                self._selector.register(fd, selectors.EVENT_READ, pid)

    def is_heard_of(self, pid: int) -> bool:
        """Whether the system reports the death of `pid` at once, so that it is not polled."""
        return self._watched.get(pid) is not None

    def wait(self) -> list[int]:
        """Wait until at least one watched process has died; stop watching the dead ones and return their pids."""
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
        """Stop watching `pid`, whose process has died. If the pid has been reused, poll it and return False."""
        with self._changing:
            fd = self._watched.pop(pid)
            if fd is not None:
                self._selector.unregister(fd)  # children inherit the descriptor, so closing it is not enough
                os.close(fd)
            if is_dead(pid):
                return True
            self._watched[pid] = None
            return False


def is_dead(pid: int) -> bool:
    """Whether the process `pid` has ended, even if its parent has not reaped it yet.

    If the system has reused `pid`, the answer is about the new process.
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
    """Like `is_dead`, but without a pidfd: the system has no pidfds, or no free descriptors."""
    try:
        if hasattr(os, "waitid") and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
    except OverflowError:
        return False
    except ChildProcessError:
        pass  # the pool has already reaped it, or its parent is a fork server
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it is alive, but belongs to another user
    return False
