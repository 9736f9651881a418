"""The stage: servers, proxies and workers of one chaos run on one broker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.posts import Post, Target
from tests.lab.app import Config
from tests.lab.kinds import TIME_OUTS
from tests.lab.ledger import Ledger
from tests.lab.lock_servers import behind_proxy, lock_server_in
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, rabbitmq

POSTS = 3
#: Seconds without an ack after which the Redis broker delivers a message again. Some bodies run for longer.
VISIBILITY = 5
TRANSPORT = {
    "redis": {
        "visibility_timeout": VISIBILITY,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed as it gives messages back keeps the others from it for so long; by default 300 s.
        "unacked_mutex_expire": 2,
    },
    # Without this, a message is lost without an error if it is published just when the connection is cut.
    "rabbitmq": {"confirm_publish": True},
}


@dataclass(frozen=True)
class Cast:
    """Which workers are on a stage."""

    app: str = "chaos.worker"
    queue: str = "chaos"
    posts: int = POSTS
    settings: dict[str, Any] = field(default_factory=dict)
    """More settings of the workers and the publishers."""
    of_first_post: dict[str, Any] = field(default_factory=dict)
    """More settings of the workers of the first post."""


CHAOS = Cast(of_first_post={"worker_max_tasks_per_child": 10})


class Stage:
    """What the faults strike. `open_stage` makes it."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack, cast: Cast, locks: str) -> None:
        self.kind, self.folder = kind, folder
        self.ledger = Ledger(folder / "ledger")
        self.ledger.write({"event": "broker", "kind": kind})
        self.broker_server = _valkey(folder, "broker", stack)
        broker = self.broker_server.celery_url(0)
        if kind == "rabbitmq":
            (folder / "rabbitmq").mkdir()
            broker = stack.enter_context(rabbitmq(folder / "rabbitmq"))
        self.broker_proxy = stack.enter_context(Proxy(broker).serve())
        settings: dict[str, Any] = {
            "broker_transport_options": TRANSPORT[kind],
            "task_publish_retry": True,
            **cast.settings,
        }
        self.locks = stack.enter_context(lock_server_in(folder / "locks", locks))
        self.lock_proxy = stack.enter_context(behind_proxy(self.locks))
        if locks in {"cluster", "sentinel"}:  # a command may take the time-outs of two servers
            settings["redislock_client_options"] = TIME_OUTS
        #: The lock server of the drills, which no fault strikes.
        self.drill_locks = _valkey(folder, "drill-locks", stack)
        backend = self.broker_server.celery_url(1)
        self.config = Config(
            self.broker_proxy.url, backend, self.lock_proxy.url, str(self.ledger.path), cast.queue, settings
        )
        #: The same servers without the proxies, so that no fault strikes: for the load and the checks.
        self.direct = replace(self.config, broker=broker, locks=self.locks.url())
        self.servers = {"locks": Target(), "broker": Target()}
        configs = [replace(self.config, settings=settings | cast.of_first_post), *[self.config] * (cast.posts - 1)]
        self.posts = [Post(config, folder / f"post{number}", cast.app) for number, config in enumerate(configs)]
        for target in [*self.servers.values(), *self.posts]:
            stack.callback(target.close)
        for post in self.posts:
            post.do(post.start)
        for post in self.posts:
            post.wait()

    def wait(self) -> None:
        """Wait until the last faults are over."""
        for target in [*self.servers.values(), *self.posts]:
            target.wait()

    def mend(self) -> None:
        """Mend the proxies, and wait until every worker that should have ended is gone."""
        self.lock_proxy.mend()
        self.broker_proxy.mend()
        for post in self.posts:
            post.do(post.see_off)
        self.wait()


@contextmanager
def open_stage(kind: str, folder: Path, cast: Cast = CHAOS, locks: str = "one") -> Iterator[Stage]:
    """Servers, proxies and workers that run until the end of the block.

    Args:
        kind: The broker.
        folder: For the ledger, the logs and the servers.
        cast: The workers.
        locks: The kind of the lock server, as for `lock_server_in`.
    """
    with ExitStack() as stack:
        # While the targets are closed, which takes seconds, a second Ctrl+C must not leave processes behind.
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        opened = Stage(kind, folder, stack, cast, locks)
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        yield opened


def _valkey(folder: Path, name: str, stack: ExitStack) -> Valkey:
    (folder / name).mkdir()
    return stack.enter_context(Valkey(folder / name).serve())
