"""The drills: what an operator meets on an ordinary day, and no fault of the plan makes. Each has workers of its own.

They run while nothing strikes, side by side, on a lock server that no fault reaches. Their keys begin with ``drill``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from chaos.hall import Hall
from chaos.posts import CHILDREN
from chaos.stage import Stage

#: Tasks without a lock, and for how many seconds each runs.
STRANGERS, SLOW = 15, 3.0
#: How many messages wait for the key of a drill, and for how many seconds each runs.
WAITERS, MOMENT = 8, 0.05
#: The queue of the worker that has nothing else to do.
IDLE = "drill-idle"
#: For how many seconds a worker runs an unrelated task, and the key is still held when that worker is told to end.
LONG, HELD = 12.0, 1.0
#: For how many seconds the broker is away. The slow tasks end meanwhile, and what was fetched finds its key held.
AWAY = 5.0


class Drills:
    """All drills, each in a thread."""

    def __init__(self, stage: Stage) -> None:
        self._threads = ThreadPoolExecutor(len(DRILLS))
        self._drills = [self._threads.submit(self._run, stage, drill) for drill in DRILLS]

    @staticmethod
    def _run(stage: Stage, drill: Callable[[Hall], None]) -> None:
        with Hall(stage, drill.__name__) as hall:
            drill(hall)
            hall.wait_for_the_end()

    def wait(self) -> None:
        """Wait for their end; raise what one of them raised."""
        self._threads.shutdown()
        for drill in self._drills:
            _result_of(drill)


def _result_of(drill: Future[None]) -> None:
    drill.result()


def backlog(hall: Hall) -> None:
    """A worker has fetched a backlog of slow tasks without a lock, and messages wait in it for a key.

    Others wait for that key in a worker that has nothing else to do.
    """
    full, idle = hall.start_worker(), hall.start_worker(queue=IDLE)
    with hall.holding_the_key():
        hall.send("late", MOMENT, WAITERS)
        hall.wait_for_waiters(full, WAITERS)
        hall.send("slow", SLOW, STRANGERS)
        hall.send("late", MOMENT, WAITERS, queue=IDLE)
        hall.wait_for_waiters(idle, WAITERS)


def drain(hall: Hall) -> None:
    """A worker that runs a long, unrelated task is told to end, while messages wait in it; another one is idle."""
    leaving = hall.start_worker()
    with hall.holding_the_key():
        hall.send("slow", LONG)
        hall.send("late", MOMENT, WAITERS)
        hall.wait_for_waiters(leaving, WAITERS)
        hall.start_worker()
        hall.write("drain", worker=leaving.process.pid)
        leaving.process.send_signal(signal.SIGTERM)
        time.sleep(HELD)


def outage(hall: Hall) -> None:
    """A worker with a pool of threads loses its broker, and finds keys held meanwhile."""
    proxy = hall.behind_proxy()
    worker = hall.start_worker("-P", "threads", broker=proxy.url)
    with hall.holding_the_key():
        hall.send("slow", SLOW, CHILDREN)
        hall.send("late", MOMENT, WAITERS)
        hall.wait_until(lambda: worker.output().count("] received") >= CHILDREN + WAITERS, "the messages are fetched")
        proxy.refuse()
        time.sleep(AWAY)
        proxy.mend()


DRILLS = (backlog, drain, outage)
