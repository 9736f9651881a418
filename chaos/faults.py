"""The faults: what each one does, and the seeded plan of which comes when.

Each writes one line into the ledger when it is over: ``fault``, with its name, ``from`` and ``until``, and the
processes that it struck.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import psutil

from celery_redislock.protocol.scripts import ACQUIRE, RELEASE, RENEW
from chaos.posts import Post, Target
from chaos.stage import Stage
from chaos.tasks import LEASE
from chaos.windows import RECOVERED
from tests.lab.cluster_locks import ClusterLocks

KILL_CHILD = "child killed"
KILL_WORKER = "worker killed whole"
STOP_WORKER = "worker stopped past its lease"
STOP_CHILD = "child stopped past its lease"
COLD = "cold shutdown"
WARM = "warm shutdown"
RESTART = "lock server restarted empty"
CUT_LOCKS = "lock server's connections cut"
DROP = "a reply of the lock server dropped"
REFUSE = "lock server refuses"
BLACKHOLE = "lock server in a black hole"
CUT_BROKER = "broker's connections cut"
#: The fuzz alone does this. Celery ends the children that it knows to be idle; one may just have been given a message.
SHRINK = "pool shrunk"

#: The scripts whose replies are dropped, and their names.
SCRIPTS = {ACQUIRE: "acquire", RELEASE: "release", RENEW: "renew"}
#: The least and the most seconds between two faults.
PAUSE = (0.3, 2.2)
#: After so many rounds of all faults nothing strikes for so many seconds: there, order and starvation are checked.
ROUNDS, CALM = 5, RECOVERED + 15.0
#: A process stands still for longer than its lease.
STANDSTILL = (LEASE + 0.5, LEASE + 2.0)
#: Some outages are shorter than a lease, and some longer.
OUTAGE = (1.0, 5.0)
#: Where no such command is sent for so many seconds, no reply is dropped: the fault has not struck.
DROP_WITHIN = 5.0
#: The broker takes no writes for so long at most; the cuts are made in a moment.
CUT_WITHIN = 5.0


class Strike(NamedTuple):
    """One fault of the plan."""

    pause: float
    name: str
    post: int
    seed: int


def plan(seed: str, posts: int) -> Iterator[Strike]:
    """The faults, without end: all in random order, then all in another, ...; and a calm now and then."""
    chance = random.Random(seed)
    for number in count():
        calm = CALM if number and number % ROUNDS == 0 else 0.0
        for name in chance.sample(list(FAULTS), len(FAULTS)):
            pause = chance.uniform(*PAUSE) + calm
            yield Strike(pause, name, chance.randrange(posts), chance.randrange(1 << 30))
            calm = 0.0


def start(stage: Stage, strike: Strike) -> None:
    """Begin a fault, as soon as what it strikes has recovered from the last fault."""
    target_of, act = FAULTS[strike.name]
    target = target_of(stage, strike)
    target.do(partial(act, stage, target, strike.name, random.Random(strike.seed)))


@contextmanager
def written_down(stage: Stage, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
    """Write down that the block is a fault. The block may change the line that it is given."""
    line = {"event": "fault", "name": name, "from": time.monotonic(), "struck": True, **facts}
    try:
        yield line
    finally:
        stage.ledger.write({**line, "until": time.monotonic()})


def _pids(post: Post) -> list[int]:
    return [post.worker.process.pid, *sorted(child.pid for child in post.worker.children())]


def _some_child(post: Post, chance: random.Random) -> int:
    children = _pids(post)[1:]
    return children[chance.randrange(len(children))] if children else 0


def _kill_child(stage: Stage, post: Post, name: str, chance: random.Random) -> None:
    child = _some_child(post, chance)
    if child:
        with written_down(stage, name, pids=[child], worker=post.worker.process.pid):
            post.worker.kill_child(child)


def _kill_worker(stage: Stage, post: Post, name: str, chance: random.Random) -> None:
    with written_down(stage, name, pids=_pids(post), worker=post.worker.process.pid):
        post.worker.kill()
    post.start()


def _stop_worker(stage: Stage, post: Post, name: str, chance: random.Random) -> None:
    with written_down(stage, name, pids=_pids(post), worker=post.worker.process.pid):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # a child that ends just now
            post.worker.pause()
        time.sleep(chance.uniform(*STANDSTILL))
        post.worker.resume()


def _stop_child(stage: Stage, post: Post, name: str, chance: random.Random) -> None:
    child = _some_child(post, chance)
    if child:
        struck = written_down(stage, name, pids=[child], worker=post.worker.process.pid)
        with suppress(ProcessLookupError, psutil.NoSuchProcess), struck:  # its hard time limit may end it meanwhile
            post.worker.pause_child(child)
            time.sleep(chance.uniform(*STANDSTILL))
            post.worker.resume_child(child)


def _shut_down(stage: Stage, post: Post, name: str, chance: random.Random) -> None:
    with written_down(stage, name, pids=_pids(post), worker=post.worker.process.pid):
        post.end(signal.SIGQUIT if name == COLD else signal.SIGTERM)
    post.start()


def _restart_locks(stage: Stage, target: Target, name: str, chance: random.Random) -> None:
    with written_down(stage, name):
        if isinstance(stage.locks, ClusterLocks):
            stage.locks.restart_one(chance.randrange(3))
        else:
            stage.locks.restart()


def _cut_locks(stage: Stage, target: Target, name: str, chance: random.Random) -> None:
    with written_down(stage, name):
        stage.lock_proxy.cut()


def _drop_reply(stage: Stage, target: Target, name: str, chance: random.Random) -> None:
    script = chance.choice([*SCRIPTS])
    nth, hang = chance.randint(1, 2 if script is RENEW else 5), chance.random() < 0.3
    with written_down(stage, name, script=SCRIPTS[script]) as line:
        fault = stage.lock_proxy.drop_reply(to=b"EVALSHA", where=script.sha.encode(), nth=nth, hang=hang)
        end = time.monotonic() + DROP_WITHIN
        while not fault.struck and time.monotonic() < end:
            time.sleep(0.05)
        line["struck"] = bool(fault.struck)


def _outage(stage: Stage, target: Target, name: str, chance: random.Random) -> None:
    with written_down(stage, name):
        if name == REFUSE:
            stage.lock_proxy.refuse()
        else:
            stage.lock_proxy.blackhole()
        time.sleep(chance.uniform(*OUTAGE))
        stage.lock_proxy.mend()


def _cut_broker(stage: Stage, target: Target, name: str, chance: random.Random) -> None:
    with written_down(stage, name, publishers=stage.kind == "rabbitmq"):
        if stage.kind == "rabbitmq":
            stage.broker_proxy.cut()
        else:
            _cut_waiting_consumers(stage)


def _cut_waiting_consumers(stage: Stage) -> None:
    """Cut every worker's connection that waits for a message, by which the worker loses its broker.

    Kombu loses a message that Redis has taken from the queue when the answer is lost: none may be taken meanwhile.
    Where such a connection is cut while it is idle, kombu 5.7 may read from it for ever, and its worker hangs.
    """
    client = stage.broker_server.client
    client.client_pause(int(CUT_WITHIN * 1000), all=False)  # writes, so also BRPOP
    try:
        for connection in client.client_list():
            if connection["cmd"] == "brpop" and "b" in connection["flags"]:
                client.client_kill_filter(_id=connection["id"])
    finally:
        client.client_unpause()


def _in_post(stage: Stage, strike: Strike) -> Post:
    return stage.posts[strike.post]


def _at(server: str) -> Callable[[Stage, Strike], Target]:
    return lambda stage, strike: stage.servers[server]


FAULTS: dict[str, tuple[Callable[[Stage, Strike], Any], Callable[..., None]]] = {
    KILL_CHILD: (_in_post, _kill_child),
    KILL_WORKER: (_in_post, _kill_worker),
    STOP_WORKER: (_in_post, _stop_worker),
    STOP_CHILD: (_in_post, _stop_child),
    COLD: (_in_post, _shut_down),
    WARM: (_in_post, _shut_down),
    RESTART: (_at("locks"), _restart_locks),
    CUT_LOCKS: (_at("locks"), _cut_locks),
    DROP: (_at("locks"), _drop_reply),
    REFUSE: (_at("locks"), _outage),
    BLACKHOLE: (_at("locks"), _outage),
    CUT_BROKER: (_at("broker"), _cut_broker),
}
