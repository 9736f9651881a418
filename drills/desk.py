"""The desk: an operator's tools, `why`, `list` and the alerts, and the servers and workers that they look at."""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from celery.bin.base import CLIContext
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from celery_redislock.cli.commands import locks
from celery_redislock.cli.sentences import Say
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger
from tests.lab.servers import Valkey, free_port
from tests.lab.web import page
from tests.lab.workers import Worker, kept, worker

#: Within so many seconds of a fault, `why` must name its cause.
SOON = 10.0
#: The alerts of docs/monitoring.md have their times in minutes; a drill lasts seconds. A minute is taken for a second.
FASTER = 60.0
#: Seconds between two scrapes.
EVERY = 0.5
#: For how long a body runs that is not to end in its drill, in seconds.
LONG = 120.0

_WORKER = "celery_redislock_worker_"


@dataclass
class Seen:
    """What a drill has seen."""

    drill: str
    fault: str
    cause: str = ""
    """The sentences of `why` that name the cause, in the order in which they were first said."""
    after: float = 0.0
    """How many seconds after the fault all of them were said."""
    on_page: float = 0.0
    """How many seconds after the fault the web page said all of them."""
    listed: str = ""
    """What `list` said."""
    alerts: dict[str, float] = field(default_factory=dict)
    """The alerts that were raised, and when, in seconds after the fault."""
    untrue: list[str] = field(default_factory=list)
    """Sentences that were said, but are not true in this drill."""


class Desk:
    """Servers, workers and tools of one drill, which end with the block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self._end = ExitStack()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._made("metrics"))
        self.broker = self._end.enter_context(Valkey(self._made("broker")).serve())
        self.locks = self._end.enter_context(Valkey(self._made("locks"), free_port()).serve())
        self.config = Config(
            self.broker.celery_url(0),
            self.broker.celery_url(1),
            self.locks.url(),
            str(folder / "ledger"),
            settings={"lab_metrics": True, "worker_prefetch_multiplier": 100},
            tasks=["job", "work"],
        )
        self.ledger = Ledger(folder / "ledger")
        self.app = make_app(self.config)
        self._page = self._end.enter_context(page(self.app))
        self.seen = Seen(name, "")
        self._began = 0.0
        self._ports: list[int] = []
        self._watching = threading.Event()
        self._pending: dict[str, float] = {}

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    @contextmanager
    def open(self) -> Iterator[Desk]:
        """The desk, until the end of the block."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        with self._end:
            watcher.start()
            try:
                yield self
            finally:
                self._watching.set()
                watcher.join()
                self.app.close()

    # What is looked at.

    def use_locks_at(self, url: str, **options: Any) -> None:
        """Have the app and later workers use another lock server."""
        settings = {**self.config.settings, **({"redislock_client_options": options} if options else {})}
        self.config = replace(self.config, locks=url, settings=settings)
        self.app.close()
        self.app = make_app(self.config)
        self._page = self._end.enter_context(page(self.app))

    def task(self, name: str) -> Any:
        """The lab's task of this name."""
        return self.app.tasks[f"lab.{name}"]

    def start_worker(self, processes: int = 2, *options: str, **settings: Any) -> Worker:
        """A worker that is ready, with its metrics served."""
        port = free_port()
        self._ports.append(port)
        config = replace(self.config, settings={**self.config.settings, **settings, "lab_metrics_port": port})
        return self._end.enter_context(worker(config, self.folder, processes, *options))

    def hold(self) -> str:
        """The id of a task that runs, holds its key and does not end."""
        task_id = str(self.task("work").delay("k", "holder", LONG).id)
        self.wait_until(lambda: "holder" in self.ledger.items())
        return task_id

    def wait_in_line(self, number: int, workers: int = 1) -> list[str]:
        """The ids of so many tasks whose messages wait for the key of the holder."""
        ids = [str(self.task("work").delay("k", f"waiter {one}").id) for one in range(number)]
        self.wait_until(lambda: kept(self.app, workers) >= number, 60.0)
        return ids

    def start_another_worker(self) -> Worker:
        """A worker that receives all messages from now on: those before it fetch no more."""
        self.app.control.cancel_consumer(self.config.queue, reply=True, timeout=5, limit=1)
        return self.start_worker()

    @staticmethod
    def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Wait until `condition` is true.

        Raises:
            TimeoutError: It was not in time.
        """
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("the drill did not come about")
            time.sleep(0.05)

    # The fault, and the operator's tools.

    def strikes(self, fault: str) -> None:
        """Note that the fault strikes now."""
        self.seen.fault, self._began = fault, time.monotonic()

    def run(self, *command: str) -> str:
        """What a command of ``celery locks`` prints."""
        return CliRunner().invoke(locks, command, obj=CLIContext(self.app, no_color=True, workdir=None)).output

    def why(self, task_id: str, *causes: Say | str, untrue: tuple[Say, ...] = ()) -> None:
        """Ask why a task has not run, until these sentences are said.

        Args:
            task_id: Its id.
            causes: The sentences that name the cause; or words of an error.
            untrue: Sentences that would not be true after the fault.
        """
        with ThreadPoolExecutor() as both:
            shown = both.submit(self._until, lambda: self.look(task_id), causes, untrue)
            after, said = self._until(lambda: self.run("why", task_id), causes, untrue)
            self.seen.on_page = max(self.seen.on_page, shown.result()[0])
        self.seen.after = max(self.seen.after, after)
        self.seen.cause = "\n".join(filter(None, [self.seen.cause, said.strip()]))
        self.seen.listed = self.seen.listed or self.run("list").strip()

    def _until(self, ask: Callable[[], str], causes: Sequence[Say | str], untrue: Sequence[Say]) -> tuple[float, str]:
        """Ask until the causes are said. Return how many seconds after the fault that was, and what was said."""
        said = ""
        while not all(says(said, one) for one in causes):
            if time.monotonic() - self._began > 6 * SOON:
                raise TimeoutError(f"{[str(one) for one in causes]} are not said in:\n{said}")
            said = ask()
            self.seen.untrue += [one.name for one in untrue if says(said, one)]
        return time.monotonic() - self._began, said

    def look(self, task_id: str) -> str:
        """What the web page of a task says, line by line; it has been open since before the fault."""
        with urlopen(f"{self._page}/task?{urlencode({'id': task_id})}", timeout=6 * SOON) as answer:
            (section,) = re.findall(r'<section class="card why">(.*?)</section>', answer.read().decode(), re.DOTALL)
        return "\n".join(html.unescape(text) for text in re.findall(r"<p>(.*?)</p>", section, re.DOTALL))

    def wait_for_alert(self, name: str, seconds: float = 40.0) -> None:
        """Wait until the alert of docs/monitoring.md is raised."""
        self.wait_until(lambda: name in self.seen.alerts, seconds)

    # The alerts.

    def _watch(self) -> None:
        """Scrape the workers, and evaluate the alerts, until the end."""
        while not self._watching.wait(EVERY):
            for name, holds, lasts in self._conditions():
                now = time.monotonic()
                if not holds or not self._began:
                    self._pending.pop(name, None)
                elif now - self._pending.setdefault(name, now) >= lasts:
                    self.seen.alerts.setdefault(name, now - self._began)

    def _conditions(self) -> Iterator[tuple[str, bool, float]]:
        """Each alert: its name, whether its condition holds now, and for how many seconds that must last."""
        samples = [sample for port in self._ports for sample in scraped(port)]
        oldest = max((one.value for one in samples if one.name == f"{_WORKER}oldest_wait_seconds"), default=0.0)
        up = [one.value for one in samples if one.name == f"{_WORKER}server_up"]
        lost = [one.value for one in samples if one.name == "celery_redislock_lost_total"]
        yield "OldestWait", oldest > 300 / FASTER, 120 / FASTER
        yield "LockServerAway", 0.0 in up, 120 / FASTER
        yield "LockLost", sum(lost) > 0, 0.0


def scraped(port: int) -> list[Any]:
    """The samples that a worker serves; none if it does not answer."""
    with suppress(OSError, ValueError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]
    return []


def says(text: str, sentence: Say | str) -> bool:
    """Whether `text` has the sentence, whatever is filled in, or the words."""
    words = sentence.value if isinstance(sentence, Say) else sentence
    return re.search(".*?".join(map(re.escape, re.split(r"\{\w+\}", words))), text) is not None
