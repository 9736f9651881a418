"""A worker in a thread of the user's tests, by `celery.contrib.testing`; in a process of its own, whose default app and
logging it changes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.lab.workers import ROOT

REFUSALS = """
import os
import time
from threading import Barrier

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.utils.timer2 import Timer

from celery_redislock import LockedTask
from celery_redislock.signals import lock_conflict
from celery_redislock.testing import busy

SLOTS = 8
app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]
at_once = Barrier(SLOTS)

starts = []
is_alive, start = Timer.is_alive, Timer.start


def seen_late(timer):
    alive = is_alive(timer)
    time.sleep(0.01)
    return alive


def counted(timer):
    starts.append(timer)
    start(timer)


Timer.is_alive, Timer.start = seen_late, counted


@app.task(base=LockedTask, rate_limit="1000000/s")
def task(item): ...


@lock_conflict.connect
def wait_for_the_others(**_):
    at_once.wait(10)


with start_worker(app, pool="threads", concurrency=SLOTS, perform_ping_check=False), busy(task.lock_for(7)):
    skipped = [task.delay(7) for _ in range(SLOTS)]
    for result in skipped:
        result.get(timeout=20, propagate=False)
print({result.state for result in skipped}, len(starts) <= 1)
"""


IN_TURN = """
import os
import threading
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_redislock import LockedTask, locked

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]


@app.task
def name_of_thread():
    return threading.current_thread().name


@app.task(base=LockedTask, lock_key="a")
def waits():
    with locked("b", block_for=5):
        return name_of_thread()


@app.task(base=LockedTask, lock_key="b")
def other(): ...


with start_worker(app, pool="solo", perform_ping_check=False):
    thread = name_of_thread.delay().get(timeout=20)
    with other.lock_for():
        with waits.lock_for():
            result = waits.delay()
            while not waits.lock_info().waiting_processes: time.sleep(0.01)
        while not other.lock_info().waiting_processes: time.sleep(0.01)
    print(result.get(timeout=30) == thread)
"""


RUNNING = """
import os
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_redislock import LockedTask

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]


@app.task(
    base=LockedTask,
    lock_args=["page"],
    lock_scope="queue",
    lock_arguments="latest",
    lock_on_conflict="replace",
)
def render(page, text):
    for _ in range(1000 if text == "old" else 0): time.sleep(0.01)
    return text


@app.task(base=LockedTask, bind=True, lock_scope="job")
def report(self, day):
    while self.lock_info("sunday") is None: time.sleep(0.01)
    return day


def until_held(task, *args):
    while (info := task.lock_info(*args)) is None or info.state != "held": time.sleep(0.01)


with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
    old = render.delay(7, "old")
    until_held(render, 7)
    print(render.delay(7, "new").get(timeout=20), old.get(timeout=20, propagate=False))
    first = report.delay("monday")
    until_held(report, "monday")
    second = report.delay("monday")
    with report.lock_for("sunday"):
        print(second.duplicate, second.id == first.id, second.get(timeout=20))
"""


BLOCKED = """
import os
import threading
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_redislock import LockedTask

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]


@app.task(base=LockedTask, lock_key="k", lock_block_for=20)
def task(): ...


def block():
    with task.lock_for(): print("has the key")


blocked = threading.Thread(target=block)
with task.lock_for():
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        task.delay()
        while task.lock_info().waiting_processes != 1: time.sleep(0.01)
        time.sleep(0.1)
        blocked.start()
        time.sleep(0.5)
began = time.monotonic()
blocked.join()
print(time.monotonic() - began < 10)
"""


TWO_WORKERS = """
import os
import threading
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import task_received
from celery.worker import state

from celery_redislock import LockedTask

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]
app.conf.task_routes = {"in_first": {"queue": "first"}, "in_second": {"queue": "second"}}


@app.task(base=LockedTask, name="in_first", lock_key="k1")
def in_first(item): return item


@app.task(base=LockedTask, name="in_second", lock_key="k2")
def in_second(item): return item


received, threads, shut_down = [], {}, state.maybe_shutdown


@task_received.connect
def receive(request, **_):
    received.append(request.id)
    threads[request.delivery_info["routing_key"]] = threading.current_thread()


def maybe_shutdown():  # what stops a worker that is embedded reaches all workers of its process
    if "second" not in threads or threading.current_thread() is not threads.get("first"): shut_down()


state.maybe_shutdown = maybe_shutdown


def worker(queue):
    return start_worker(app, pool="threads", concurrency=2, queues=[queue], perform_ping_check=False, hostname=queue)


def wait(sent):
    while {result.state for result in sent} != {"RETRY"}: time.sleep(0.01)
    time.sleep(0.2)


def results(sent): return [result.get(timeout=10) for result in sent]


with worker("first"):
    with worker("second"):
        with in_first.lock_for(), in_second.lock_for():
            firsts, seconds = [in_first.delay(i) for i in range(2)], [in_second.delay(i) for i in range(3)]
            wait([*firsts, *seconds])
        print(results(firsts), results(seconds))
        lock = in_first.lock_for()
        lock.acquire()
        firsts = [in_first.delay(i) for i in range(2)]
        wait(firsts)
    del threads["second"]
    lock.release()
    print(results(firsts), len(received))
"""


ONE_AFTER_ANOTHER = """
import gc
import os
import sys
import threading
import time
from pathlib import Path

from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_redislock import LockedTask

app = Celery("shop", broker=sys.argv[1], backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]


@app.task(base=LockedTask, lock_args=["item"])
def task(item): return item


def left():
    gc.collect()
    starters = [one for one in threading.enumerate() if one.name == "redislock-starter"]
    links = [Path(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    return len([one for one in links if one.is_fifo()]), len(starters)


def embed(item):
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        with task.lock_for(item):
            result = task.delay(item)
            while result.state != "RETRY": time.sleep(0.01)
        result.get(timeout=20)


embed(0)
most, _ = left()
for item in range(1, 4): embed(item)
end = time.monotonic() + 10
while (left()[0] > most or left()[1]) and time.monotonic() < end: time.sleep(0.05)
print(left()[0] <= most, left()[1])
"""


def printed_by(program, locks, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "REDIS_URL": locks.url(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_that_refuse_runs_at_the_same_time_start_one_timer(locks):
    """Where Celery has no event loop, its timer is a thread, which the first call to it starts, and no lock guards."""
    assert printed_by(REFUSALS, locks) == "{'REVOKED'} True\n"


def test_what_has_waited_runs_in_the_one_thread_of_a_solo_pool(locks):
    """In the thread that gives everybody their turn it would wait in vain for another key."""
    assert printed_by(IN_TURN, locks) == "True\n"


def test_a_run_is_replaced_and_is_the_job_of_a_duplicate_as_in_any_worker(locks):
    """Celery does not tell the runs of such a worker its name, and a host without one is that of an eager run."""
    replaced, duplicate = printed_by(RUNNING, locks).splitlines()
    assert replaced.startswith("new replaced by ")
    assert duplicate == "True True monday"


def test_a_worker_that_stops_leaves_blocked_callers_in_its_process_in_line(locks):
    """They wait in another room than its messages, which it hands over."""
    assert printed_by(BLOCKED, locks) == "has the key\nTrue\n"


def test_each_of_two_workers_in_a_process_keeps_its_own_messages_and_starts_them(locks):
    """When the second one stops, the messages of the first one wait on."""
    assert printed_by(TWO_WORKERS, locks) == "[0, 1] [0, 1, 2]\n[0, 1] 7\n"


@pytest.mark.parametrize("has_event_loop", [True, False])
def test_a_worker_that_has_stopped_leaves_neither_a_pipe_nor_a_thread(locks, broker_server, has_event_loop):
    broker = broker_server.celery_url(2) if has_event_loop else "memory://"
    assert printed_by(ONE_AFTER_ANOTHER, locks, broker) == "True 0\n"
