"""Playing a life: its callers call, its operations are done, and all that happens is written down."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery, states

from celery_redislock.protocol.names import GIVEN, GONE
from chaos.complaints import complaints_in
from chaos.coroner import Coroner
from chaos.faults import FAULTS, SHRINK, WARM, Strike, start, written_down
from chaos.posts import Post
from chaos.stage import Cast, Stage, open_stage
from chaos.tasks import LEASE, write_down_publishing
from chaos.windows import AT_ONCE
from fuzz import tasks
from fuzz.canvas import before, canvas
from fuzz.options import LONGEST, WINDOW
from fuzz.plan import DEPLOY, GROW, POSTS, PURGE, REVOKE, TERMINATE, TO_VISITORS, VISIT, Call, Life, Operation, Part
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger

APP, QUEUE = "fuzz.worker", "fuzz"
#: Parts of the names of keys that hold no lock: a note for a retry that was given up, a line in which a dead room
#: stands until it ends, and what is kept for a day: the last fence, and the calls of a ticket that ended without a run.
ALLOWED = (GONE, GIVEN, "}:line", "}:fence")
#: What a worker logs with a traceback because the task's options ask for the error.
ASKED_FOR = r"Task fuzz\.\w+\[\S+ raised unexpected: Lock(?:Unavailable|Lost)\("
#: Seconds in which all must come to its end when the last operation is over.
END = 75.0
#: Seconds for which a further worker stays, at least, and how many more they may be.
STAY, LONGER = 1.0, 5
#: Seconds in which the children of a pool that shrinks are gone.
GONE_WITHIN = 2.0
#: Seconds for which a caller waits for the end of a call.
PATIENCE = 4.0
#: Nothing moves any more when the ledger has not grown for so many seconds. What follows another task's result looks
#: for it at growing pauses, of up to half a minute.
QUIET, QUIET_IF_JOINED = 10.0, 35.0


def play(life: Life, broker: str, folder: Path) -> Ledger:
    """Play a life to its end, and return what was written down. The logs of its workers stay in the folder."""
    folder.mkdir()
    cast = Cast(APP, QUEUE, POSTS, {**life.settings, **_version(life, 0)})
    with open_stage(broker, folder, cast) as stage, ExitStack() as visits:
        _Player(life, stage, visits).play()
    for log in folder.glob("post*/*.log"):
        for text in complaints_in(log, ASKED_FOR):
            stage.ledger.write({"event": "complaint", "text": text})
    return stage.ledger


def _version(life: Life, number: int) -> dict[str, Any]:
    return {tasks.SPECS: [asdict(spec) for spec in life.deploys[number]], tasks.DEPLOY: number}


class _Player:
    def __init__(self, life: Life, stage: Stage, visits: ExitStack) -> None:
        self._life, self._stage, self._ledger = life, stage, stage.ledger
        self._visits = visits
        self._visitors: list[Post] = []
        self._apps: dict[int, Celery] = {}
        self._deployed = 0
        self._late = {spec.name: spec.is_late for spec in life.deploys[0]}
        self._ids: list[str] = []
        self._lock = threading.Lock()

    def play(self) -> None:
        """The calls and the operations, and what is left at the end."""
        publish_in_silence = write_down_publishing(self._ledger)
        coroner = Coroner(self._ledger)
        coroner.start()
        callers = [threading.Thread(target=self._call_all, args=(calls,), daemon=True) for calls in self._life.callers]
        self._app(0)
        for caller in callers:
            caller.start()
        for operation in self._life.operations:
            time.sleep(operation.strike.pause)
            self._do(operation)
        for caller in callers:
            caller.join()
        for visitor in self._visitors:
            visitor.wait()
        self._stage.wait()
        self._stage.mend()
        for visitor in self._visitors:
            visitor.see_off()
        self._ledger.write({"event": "over", "at": time.monotonic()})
        self._wait_for_the_end()
        self._write_down_the_end()
        coroner.enough.set()
        coroner.join()
        publish_in_silence()
        for app in self._apps.values():
            app.close()
        gc.collect()  # results unsubscribe when they are collected: while their server is still there

    # The callers.

    def _app(self, version: int) -> Celery:
        """The app as publishers have it in this version."""
        with self._lock:
            if version not in self._apps:
                self._apps[version] = app = make_app(self._config(self._stage.direct, version))
                tasks.define_tasks(app)
                app.finalize()
            return self._apps[version]

    def _config(self, config: Config, version: int) -> Config:
        return replace(config, settings={**config.settings, **_version(self._life, version)})

    def _call_all(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            time.sleep(call.pause)
            task_id = self._call(call)
            if call.waits and task_id:
                self._wait_for(task_id)

    def _wait_for(self, task_id: str) -> None:
        """Wait for the end of a job, but not for ever."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._meta(task_id)["status"] in states.READY_STATES:
                self._ledger.write({"event": "known", "task_id": task_id, "at": time.monotonic()})
                return
            time.sleep(0.002)

    def _call(self, call: Call) -> str | None:
        """Call, and return the id of the last job; None if the call was refused."""
        version = self._deployed
        app, asked_at = self._app(version), time.monotonic()
        line = {"event": "call", "shape": call.shape, "deploy": version, "asked_at": asked_at}
        line["names"], ids = (
            [part.name for part in call.parts],
            [f"{self._life.seed}.{part.name}" for part in call.parts],
        )
        try:
            if call.is_alone:
                result = self._send(app, call.parts[0], ids[0])
                ids, line["duplicate"] = [result.id], getattr(result, "duplicate", False)
            else:
                signatures = [self._signature(app, *one) for one in zip(call.parts, ids, strict=True)]
                canvas(call.shape, signatures, app).apply_async()
        except Exception as error:  # noqa: BLE001 - whatever it is, the oracle is told
            line["error"] = f"{type(error).__name__}: {error}"
        self._ledger.write({**line, "ids": ids, "returned_at": time.monotonic()})
        if "error" not in line and not line.get("duplicate"):
            for number, (part, task_id) in enumerate(zip(call.parts, ids, strict=True)):
                kind = "late" if self._late[part.task] else "early"
                after = "".join(ids[one] for one in before(call.shape)[number][-1:])
                self._ledger.write({"event": "sent", "task_id": task_id, "kind": kind, "after": after})
            self._ids += ids
        return None if "error" in line else ids[-1]

    def _send(self, app: Celery, part: Part, task_id: str) -> Any:
        options = dict(part.options)
        if options.get("task_id"):
            options["task_id"] = task_id
        task: Any = app.tasks[f"fuzz.{part.task}"]
        return task.apply_async(kwargs=self._arguments(part), **options)

    def _signature(self, app: Celery, part: Part, task_id: str) -> Any:
        task: Any = app.tasks[f"fuzz.{part.task}"]
        return task.signature(kwargs=self._arguments(part), immutable=True).set(task_id=task_id)

    def _arguments(self, part: Part) -> dict[str, Any]:
        spec = next(spec for spec in self._life.deploys[0] if spec.name == part.task)
        item = "" if spec.has_all_arguments else part.name
        does = {"does": part.does, "seconds": part.seconds, "times": part.times}
        return {"key": part.key, "other": part.other, "item": item, **does}

    # The operations.

    def _do(self, operation: Operation) -> None:
        name, strike = operation.name, operation.strike
        if name in FAULTS:
            start(self._stage, strike)
        else:
            _OPERATIONS[name](self, strike)

    def _deploy(self, strike: Strike) -> None:
        """Restart the workers one after the other with the next version; publishers have it between them."""
        version = self._deployed + 1

        def restart(post: Post, number: int) -> None:
            self._end(post)
            post.config = self._config(post.config, version)
            post.start()
            if number == 0:
                self._deployed = version

        self._ledger.write({"event": "deploy", "version": version, "at": time.monotonic()})
        for number, post in enumerate(self._stage.posts):
            post.do(partial(restart, post, number))
            post.wait()

    def _end(self, post: Post) -> None:
        """End a worker with a warm shutdown."""
        pids = [post.worker.process.pid, *(child.pid for child in post.worker.children())]
        with written_down(self._stage, WARM, pids=pids, worker=pids[0]):
            post.end(signal.SIGTERM)

    def _visit(self, strike: Strike) -> None:
        """A further worker joins the queue, may be struck by a fault, and leaves the queue with a warm shutdown."""
        folder = self._stage.folder / f"post{POSTS + len(self._visitors)}"
        visitor = Post(self._config(self._stage.config, self._deployed), folder, APP)
        self._visits.callback(visitor.close)
        self._visitors.append(visitor)

        chance = random.Random(strike.seed)
        name = chance.choice((None, *TO_VISITORS))

        def stay() -> None:
            visitor.start()
            self._ledger.write({"event": "visit", "worker": visitor.worker.process.pid, "at": time.monotonic()})
            time.sleep(STAY)
            if name is not None:
                _, act = FAULTS[name]
                act(self._stage, visitor, name, chance)
            time.sleep(strike.seed % LONGER)
            visitor.replace_dead()  # an error in kombu may have ended it
            self._end(visitor)

        visitor.do(stay)

    def _scale(self, strike: Strike, *, grows: bool) -> None:
        """A worker's pool grows or shrinks by one or two children, but never to none."""
        post, by = self._stage.posts[strike.post], 1 + strike.seed % 2
        control: Any = self._app(self._deployed).control

        def scale() -> None:
            there, since, gone = {child.pid for child in post.worker.children()}, time.monotonic(), list[int]()
            less = min(by, len(there) - 1)
            if grows:
                told = control.pool_grow(by, destination=[post.name], reply=True)
            elif less:
                told = control.pool_shrink(less, destination=[post.name], reply=True)
                while len(gone) < less and time.monotonic() < since + GONE_WITHIN:
                    time.sleep(0.05)
                    gone = sorted(there - {child.pid for child in post.worker.children()})
            else:
                return
            line = {"event": "fault", "name": SHRINK, "struck": True, "pids": gone} if gone else {"event": "scaled"}
            line = {**line, "worker": post.worker.process.pid, "grows": grows, "told": told}
            self._ledger.write({**line, "from": since, "until": time.monotonic()})

        def act() -> None:
            with suppress(psutil.NoSuchProcess):  # the worker has ended by itself
                scale()

        post.do(act)

    def _revoke(self, strike: Strike, *, terminate: bool) -> None:
        """Revoke one of the last calls."""
        if self._ids:
            task_id = self._ids[-1 - strike.seed % min(8, len(self._ids))]
            line = {"event": "revoked", "task_id": task_id, "terminate": terminate, "at": time.monotonic()}
            self._ledger.write(line)
            self._app(self._deployed).control.revoke(task_id, terminate=terminate)

    def _purge(self, strike: Strike) -> None:
        since = time.monotonic()
        self._app(self._deployed).control.purge()
        self._ledger.write({"event": "purged", "from": since, "at": time.monotonic()})

    # The end.

    def _wait_for_the_end(self) -> None:
        """Wait until all calls have ended, or nothing moves any more."""
        end, size, quiet_since = time.monotonic() + END, -1, time.monotonic()
        joins = any(spec.policy == "join" for deploy in self._life.deploys for spec in deploy if spec.options)
        quiet = QUIET_IF_JOINED if joins else QUIET
        while self._open() and time.monotonic() < min(end, quiet_since + quiet):
            if self._ledger.path.stat().st_size != size:
                size, quiet_since = self._ledger.path.stat().st_size, time.monotonic()
            time.sleep(0.2)

    def _open(self) -> bool:
        return any(self._meta(task_id)["status"] not in states.READY_STATES for task_id in self._ids)

    def _meta(self, task_id: str) -> dict[str, Any]:
        backend = self._app(0).backend
        meta: dict[str, Any] = backend.get_task_meta(task_id, cache=False)
        return meta

    def _write_down_the_end(self) -> None:
        for task_id in self._ids:
            meta = self._meta(task_id)
            result = meta["result"]
            how = f"{type(result).__name__}: {result}" if isinstance(result, BaseException) else result
            self._ledger.write({"event": "final", "task_id": task_id, "state": meta["status"], "result": how})
        for key in self._left():
            self._ledger.write({"event": "key", "key": key, "holder": self._value(key)})

    def _left(self) -> list[str]:
        """The keys that are left when leases, cooldowns, windows and rates have passed."""
        end = time.monotonic() + LEASE + WINDOW + LONGEST + AT_ONCE
        while True:
            keys = [key.decode() for key in self._stage.locks.held()]
            left = [key for key in keys if not any(part in key for part in ALLOWED)]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def _value(self, key: str) -> str:
        try:
            holder: Any = self._stage.locks.client.get(key)
            return (holder or b"").decode("utf-8", "replace")
        except redis.ResponseError:  # it holds more than a text
            return ""


_OPERATIONS: dict[str, Callable[[_Player, Strike], None]] = {
    DEPLOY: _Player._deploy,
    GROW: partial(_Player._scale, grows=True),
    SHRINK: partial(_Player._scale, grows=False),
    VISIT: _Player._visit,
    REVOKE: partial(_Player._revoke, terminate=False),
    TERMINATE: partial(_Player._revoke, terminate=True),
    PURGE: _Player._purge,
}
