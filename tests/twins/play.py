"""Playing a plan: its callers send what it says, and what became of each leaf is written down."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery import chain, chord, group, states

from tests.lab.ledger import Run
from tests.twins.plan import FAR, OVER, SOON, Call, Leaf, Many, Plan, Tree, leaves, leaves_of
from tests.twins.stage import Stage
from tests.twins.tasks import ledger_of

#: Seconds after which a caller gives up a result of whose workflow nothing is left: Celery itself leaves it open.
QUIET = 0.4
#: Seconds in which a workflow must come to its end.
PATIENCE = 25.0
#: It has ended when so many looks in a row find nothing that waits or runs.
LOOKS = 3


class Ending(NamedTuple):
    """How a policy has ended a leaf without a run."""

    how: str
    """``returns`` or ``raises``, as another task did or by LockConflict; ``skipped``; ``expired``; or ``not sent``."""
    value: Any = None


@dataclass
class Record:
    """What became of a plan on one side."""

    ids: dict[str, str] = field(default_factory=dict)
    """The task id of each leaf that has one, by the leaf's name. What replaces a leaf has the leaf's."""
    duplicates: dict[str, str] = field(default_factory=dict)
    """Leaves that were not sent, and whose result they were given."""
    known: dict[str, frozenset[str]] = field(default_factory=dict)
    """For each leaf, the ids of the tasks that its caller knew to have ended when it sent the leaf's canvas."""
    outcomes: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """State and result, by task id."""
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    met: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    bodies: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def name_of(self, task_id: str | None) -> str | None:
        """The name of the first leaf that was sent with this id; the id itself where there is none."""
        names = [name for name, known in self.ids.items() if known == task_id and name not in self.duplicates]
        return min(names, key=lambda name: int(name[1:]), default=task_id)


class Side:
    """One side of a pair of twins.

    Args:
        stage: Where it is played.
        plan: What is played.
        name: Its name, which is that of its ledger and a part of its keys and ids.
        endings: None for the locked side; for the plain twin, how policies have ended leaves of the locked side.
    """

    def __init__(self, stage: Stage, plan: Plan, name: str, endings: dict[str, Ending] | None = None) -> None:
        self._stage, self._plan, self._name = stage, plan, name
        self._is_locked, self._endings = endings is None, endings or {}
        self._ledger = ledger_of(stage.app, name)
        self._record = Record()

    def play(self) -> Record:
        """Play the plan to its end."""
        threads = [threading.Thread(target=self._caller, args=(caller,)) for caller in self._plan.callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comes_to_rest = self._comes_to_rest()
        self._read()
        if not comes_to_rest:
            self._record.problems.append("it does not come to rest")
            self._stage.start()
        return self._record

    def _comes_to_rest(self) -> bool:
        """Wait until several looks have found nothing: one may miss what is on its way from a queue to a child."""
        end, quiet = time.monotonic() + PATIENCE, 0
        while quiet < LOOKS and time.monotonic() < end:
            quiet = quiet + 1 if self._stage.is_quiet() and not self._ledger.running() else 0
            time.sleep(0.02)
        return quiet == LOOKS

    # The callers.

    def _caller(self, calls: tuple[Call, ...]) -> None:
        known: frozenset[str] = frozenset()
        for call in calls:
            if self._ending(call.tree).how == "not sent":
                continue
            self._record.known |= {leaf.name: known for leaf in leaves_of(call.tree)}
            try:
                result = self._send(call)
            except Exception as error:  # noqa: BLE001 - whatever it is, no call may raise it
                self._record.problems.append(f"{call.tree} cannot be sent: {error!r}")
                return
            if self._has_ended(result):
                known |= {one.id for one in (result, *getattr(result, "results", ()))}

    def _send(self, call: Call) -> Any:
        signature = self._signature(call.tree, has_id=isinstance(call.tree, Many))
        if call.is_stamped:
            signature.stamp(stamp="of the caller")
        result = signature.apply_async()
        if isinstance(call.tree, Leaf):
            if getattr(result, "duplicate", False):
                self._record.duplicates[call.tree.name] = result.id
            self._record.ids[call.tree.name] = result.id
        return result

    def _has_ended(self, result: Any) -> bool:
        """Wait for a result, but not for what will never come. The caller goes on the moment that there is one."""
        looks, end = itertools.count(1), time.monotonic() + PATIENCE
        quiet_since = time.monotonic()
        while not result.ready():
            time.sleep(0.001)
            if next(looks) % 20 == 0 and (self._stage.has_messages() or self._ledger.running()):
                quiet_since = time.monotonic()
            if time.monotonic() > min(quiet_since + QUIET, end):
                return False
        return True

    # From a plan to Celery's signatures.

    def _signature(self, tree: Tree, *, has_id: bool = True) -> Any:
        if isinstance(tree, Leaf):
            return self._leaf(tree, has_id=has_id)
        parts = [self._signature(part) for part in tree.parts]
        app = self._stage.app
        if tree.kind == "chord":
            return chord(parts[:-1], parts[-1], app=app)
        return chain(*parts, app=app) if tree.kind == "chain" else group(parts, app=app)

    def _leaf(self, leaf: Leaf, *, has_id: bool = True) -> Any:
        name = leaf.task if self._is_locked else "plain"
        ending = self._ending(leaf)
        signature = self._stage.app.tasks[f"twins.{name}"].signature(
            kwargs={"key": f"{self._name}.{leaf.key}", "node": self._node(leaf)}, immutable=leaf.is_immutable
        )
        if has_id:
            self._record.ids[leaf.name] = task_id = f"{self._name}.{leaf.name}"
            signature.set(task_id=task_id)
        if leaf.countdown:
            signature.set(countdown=leaf.countdown)
        if leaf.expires:
            signature.set(expires=self._expires(leaf))
        for link in leaf.links:
            signature.link(self._signature(link))
        for errback in () if ending.how == "skipped" else leaf.errbacks:
            signature.link_error(self._signature(errback).set(immutable=True))
        return signature

    def _expires(self, leaf: Leaf) -> float | None:
        """In the plain twin nothing depends on the time."""
        if leaf.expires == SOON and not self._is_locked:
            return OVER if self._ending(leaf).how == "expired" else FAR
        return leaf.expires

    def _node(self, leaf: Leaf) -> dict[str, Any]:
        """What the body of a leaf is told."""
        ending = self._ending(leaf)
        ends = None if ending.how in {"", "expired"} else [ending.how, ending.value]
        calls = [self._signature(call, has_id=False) for call in leaf.calls if self._ending(call).how != "not sent"]
        becomes = self._becomes(leaf) if leaf.becomes else None
        node = {"name": leaf.name, "side": self._name, "does": leaf.does, "times": leaf.times, "seconds": leaf.seconds}
        return {**node, "lingers": leaf.lingers, "ending": ends, "calls": calls, "becomes": becomes}

    def _becomes(self, leaf: Leaf) -> Any:
        """What replaces a leaf has its id; of a chain that is the last step."""
        if isinstance(leaf.becomes, Leaf):
            return self._signature(leaf.becomes, has_id=False)
        first, last = leaf.becomes.parts
        return chain(self._signature(first), self._signature(last, has_id=False), app=self._stage.app)

    def _ending(self, tree: Tree) -> Ending:
        return self._endings.get(tree.name, Ending("")) if isinstance(tree, Leaf) else Ending("")

    # What became of it.

    def _read(self) -> None:
        record = self._record
        for line in self._ledger.lines():
            if line["event"] == "called":
                record.ids[line["name"]] = line["id"]
                if line["duplicate"]:
                    record.duplicates[line["name"]] = line["id"]
            elif line["event"] in {"node", "met"}:
                record.ids.setdefault(line["name"], line["id"])
                (record.runs if line["event"] == "node" else record.met)[line["name"]].append(line)
        record.bodies = self._ledger.runs()
        record.outcomes = {task_id: self._outcome(task_id) for task_id in record.ids.values()}
        if self._stage.broker.drops_expired:
            self._revoke_what_was_dropped()

    def _revoke_what_was_dropped(self) -> None:
        """Take for revoked what has expired and no worker has received: the broker has dropped it."""
        record = self._record
        for leaf in leaves(self._plan):
            task_id, is_received = record.ids.get(leaf.name, ""), leaf.name in {*record.runs, *record.met}
            is_open = record.outcomes.get(task_id) == (states.PENDING, None)
            if leaf.expires in {OVER, SOON} and is_open and not is_received:
                record.outcomes[task_id] = states.REVOKED, "dropped by the broker"

    def _outcome(self, task_id: str) -> tuple[str, Any]:
        meta = self._stage.app.backend.get_task_meta(task_id, cache=False)
        return meta["status"], meta["result"]
