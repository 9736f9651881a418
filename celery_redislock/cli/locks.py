"""Locks: reads and releases an app's locks for the command line.

All locks of a server are read page by page, so that no command keeps the server busy for long.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any

import redis
from celery import Celery
from redis.exceptions import AskError, ResponseError

from celery_redislock.app import keyprefix_of, server_of, settings_of
from celery_redislock.connection.connect import address, servers_behind
from celery_redislock.errors import shown
from celery_redislock.hold.held_lock import INTERVAL
from celery_redislock.options import resolve_settings
from celery_redislock.protocol.names import MAX_CAPACITY, Demand, LockPart, keys_of
from celery_redislock.protocol.tokens import RUNNING, Token, escape, known_as
from celery_redislock.task.plan import LockPlan

from .rows import FREE, Calls, Row
from .sentences import Say, duration, moment
from .workers import Counts, Waits

#: How many entries of its key table the server examines per SCAN, which takes about 0.3 ms. It serves other clients
#: between two pages, and also while it answers a page's pipeline, because it reads the commands a few at a time.
PAGE = 500
#: A key counts as no longer renewed if its last renewal is older than this share of its lease. A renewal is due every
#: third of the lease.
OVERDUE = 0.5


class Locks:
    """The locks of an app, as its lock server knows them.

    Args:
        app: The app, with its tasks loaded.

    Attributes:
        app: The app.
        prefix: The start of its tasks' keys, up to the opening brace.
        counts: The messages that wait in its workers. Until it is set, each process in line counts as one.

    Raises:
        LockConfigError: The app has no lock server.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.counts = Counts()
        self._server = server_of(app)
        self.prefix = f"{keyprefix_of(app)}{resolve_settings(settings_of(app)).prefix}:{{"

    @property
    def server(self) -> str:
        """The address of the lock server, without a password."""
        return address(self._server.client)

    @property
    def where(self) -> str:
        """The address of the lock server, without a password, and the prefix of the keys."""
        return f"{self.server}, with the prefix {shown(self.prefix.removesuffix(':{'))!r}"

    def all(self, match: str | None = None, task: str | None = None, *, foreign: bool = False) -> Iterator[Row]:
        """All holders, and all locks that are free while messages wait for them, in no particular order.

        Args:
            match: A pattern of keys, as for Redis' SCAN; None for all locks of the app's tasks.
            task: The name of the holder's task, or of a waiting task if the lock is free; None for any.
            foreign: Whether to include keys that are not `ours`, whatever they may hold.

        Raises:
            RedisError: Redis did not answer, or refused the command.
        """
        pattern = literal(self.prefix) + "*" if match is None else match
        name, seen, matches = task and known_as(task), set(), matcher(pattern)
        unseen = {lock for lock in self.counts.locks if matches(lock)}
        for row in self._scan(pattern):
            unseen.discard(row.part.lock)
            known = row.part.lock if row.state == "spent" else row.part.key  # all the permits of a rate are one row
            if known not in seen and (foreign or self.ours(row)) and row.is_of(name):
                seen.add(known)
                yield row
        for lock in sorted(unseen):  # they are free, or were just taken
            yield from (row for row in self.of(lock) if matches(row.part.key) and row.is_of(name))

    def ours(self, row: Row) -> bool:
        """Whether a key belongs to this package: it begins with the app's prefix, or holds a token."""
        return row.part.key.startswith(self.prefix) or row.token.since is not None

    def free(self, key: str) -> str:
        """A sentence about a key that nothing holds. A task's key may have been named without its prefix."""
        whole = shown(self.prefix + key.strip("{}") + "}")
        lacks = "" if key.startswith(self.prefix) else f"; the keys of tasks look like {whole}"
        lacks += "; `celery locks list | cat` shows whole keys" if "…" in key else ""
        lacks += "; it is a task's name: try `celery locks show --task`" if key in self.app.tasks else ""
        return f"{shown(key)} is free{lacks}."

    def of(self, key: str) -> list[Row]:
        """The holders of the lock `key` (several if it has a limit), and the place in its queue if reserved.

        A free lock has a row too if messages wait for it.

        Raises:
            RedisError: Redis did not answer, or refused the command.
        """
        if (part := LockPart.of(key)) is None:
            return []
        lock, names = part.lock, keys_of(part.lock)
        permits = [LockPart(names.permit(number), lock, "permit") for number in range(2, MAX_CAPACITY + 1)]
        rows = [*self._read([LockPart(lock, lock), *permits, LockPart(names.queued, lock, "queued")])]
        if not rows and lock in self.counts.locks:  # its messages may lack a free slot in their worker
            rows = [Row(LockPart(lock, lock), FREE, None, self.counts.locks[lock])]
        return rows

    def release(self, row: Row) -> bool:
        """Release the key of `row`, unless its holder has changed by now.

        As after every release, the first in line is called. A run that held the key goes on; its keeper notices the
        loss at the next renewal. If the key was reserved for a job, the job's window is closed too.

        Returns:
            Whether the key was released.

        Raises:
            LockUnavailable: Redis did not answer, or refused the command.
        """
        demand = Demand(row.part.lock, MAX_CAPACITY) if row.part.kind == "permit" else Demand(row.part.key)
        store, attempt = self._server.store, row.token.attempt
        if not store.release(demand, row.token, exactly=True):
            return False
        if row.token.is_reserved and attempt is not None and row.calls is None:
            names = keys_of(row.part.lock)
            closes = names.window(escape(row.token.task or "")), names.given(attempt.job)
            store.give_up(Demand(row.part.lock), row.token.nonce, is_to_come=False, closes=closes)
        return True

    def held(self, row: Row, now: datetime) -> str:
        """A sentence about a key: who holds it, since when and until when, and whether the process is alive."""
        key, info = row.part.key, row.info
        if info.state == "spent":
            plan, until = plan_of(self.app, row.token.task), datetime.now(UTC) + timedelta(seconds=row.ttl or 0.0)
            rate = plan.options.rate if plan is not None else None
            named = "" if rate is None or callable(rate) else f", {rate if isinstance(rate, str) else tuple(rate)},"
            return Say.SPENT(key=row.part.lock, rate=named, until=f"{until:%Y-%m-%d %H:%M:%S} UTC")
        if info.state not in RUNNING:
            kept = Say.KEPT(key=key, who=info.who, since=moment(info.since, now), ttl=duration(row.ttl or 0.0))
            return f"{kept} {Say.CALLS(calls=row.calls.said(now))}" if row.calls else kept
        ends = self._ends(row, now)
        if info.since is None:
            return Say.FOREIGN(key=key, ends=ends)
        held = Say.HELD(key=key, who=info._replace(state="held").who, since=moment(info.since, now), ends=ends)
        return f"{held} {Say.STOPPING(newer=row.token.asked_by)}" if row.token.asked_by else held

    def _ends(self, row: Row, now: datetime) -> str:
        """When the key ends, and whether the holder still renews it."""
        if row.ttl is None:
            return Say.NEVER_ENDS()
        ttl, plan = duration(row.ttl), plan_of(self.app, row.token.task)
        if plan is None or row.token.since is None or row.ttl > plan.options.lease:
            return Say.ENDS(ttl=ttl)
        lease, max_hold = plan.options.lease, plan.options.max_hold
        if max_hold is not None and (now - row.token.since).total_seconds() > max_hold:
            return Say.HELD_TOO_LONG(ttl=ttl)
        ago = lease - row.ttl
        if ago > OVERDUE * lease:
            return Say.NOT_RENEWED(ago=duration(ago), every=duration(INTERVAL * lease), ttl=ttl)
        return Say.RENEWED(ago=duration(ago))

    def to_json(self, row: Row) -> dict[str, Any]:
        """What ``--json`` prints for `row`."""
        told = row.info.to_json(scope_of(self.app, row.token.task), row.waiting)
        return told | row.calls.to_json() if row.calls else told

    def _scan(self, pattern: str) -> Iterator[Row]:
        """The locks whose keys match `pattern`. In rare cases the same lock is returned twice."""
        for node in servers_behind(self._server.client):
            cursor: Any = None
            while cursor != 0:
                answer: Any = node.scan(cursor or 0, match=_bytes(pattern), count=PAGE, _type="string")
                cursor, keys = answer
                parts = [LockPart.of(key.decode("utf-8", "surrogateescape")) for key in keys]
                yield from self._read([part for part in parts if part is not None], node)

    def _read(self, parts: Sequence[LockPart], first: redis.Redis | None = None) -> Iterator[Row]:
        """The rows of the parts whose keys hold something.

        While a hash slot of a Cluster moves, the node that is importing it answers only after ASKING.

        Args:
            parts: The parts.
            first: The node that most likely has them all; None if that is not known.
        """
        for node, asking in self._turns(first, parts):
            replies = zip(parts, _ask(node, parts, asking=asking), strict=True)
            parts = []
            for part, reply in replies:
                if any(isinstance(one, AskError) for one in reply[:2]):  # redis-py's MOVED error is a subclass of it
                    parts.append(part)
                elif row := self._row(part, *reply):
                    yield row
            if not parts:
                return

    def _turns(self, first: redis.Redis | None, parts: Sequence[LockPart]) -> Iterator[tuple[redis.Redis, bool]]:
        """The nodes to ask for `parts`, one after the other, each with whether to send ASKING."""
        if first is not None:
            yield first, False
        nodes = servers_behind(self._server.client, _bytes(parts[0].lock))  # of one key, first the node that has it
        yield from ((node, asking) for asking in (False, True) for node in nodes)

    def _row(self, part: LockPart, value: Any, left: Any, line: Any, calls: Any = None) -> Row | None:
        """The row of one key, by its replies; None if it holds nothing."""
        if isinstance(line, AskError):  # the line does not exist, or is briefly on another node
            line = ()
        replies = [value, left, line]
        for number, one in enumerate(replies):
            if isinstance(one, ResponseError) and str(one).startswith("WRONGTYPE"):
                replies[number] = b""  # such as a hash, with which no run can take the key
            elif isinstance(one, Exception):
                raise one
        value, left, line = replies
        if value is None:  # released in the meantime
            return None
        token, waits = Token.of(value), dict(self.counts.locks.get(part.lock, {}))
        outside = {room: rank for text, rank in line if (room := Token.of(text).nonce) not in self.counts.rooms}
        if outside:
            task = token.task or ""
            waits[task] = waits.get(task, Waits()) + Waits(len(outside), min(outside.values()))
        if isinstance(calls, ResponseError):  # as for the line, or the user may not ask, and no calls are merged
            calls = None
        merged = calls and Calls.of(token, *calls)
        return Row(part, token, left / 1000 if left >= 0 else None, waits, frozenset(outside), merged)


def _ask(node: redis.Redis, parts: Sequence[LockPart], *, asking: bool) -> list[tuple[Any, ...]]:
    """Read what `_row` needs to know about each key, in one round trip."""
    pipeline: Any = node.pipeline(transaction=False)
    reads = [[*_reads(part)] for part in parts]
    for command, *arguments in chain(*reads):
        if asking:
            pipeline.execute_command("ASKING")
        getattr(pipeline, command)(*arguments)
    replies = iter(pipeline.execute(raise_on_error=False)[1 if asking else 0 :: 2 if asking else 1])
    return [tuple(islice(replies, len(read))) for read in reads]


def _reads(part: LockPart) -> Iterator[tuple[Any, ...]]:
    """The commands that read a key, its time to live in milliseconds, its lock's line, and the calls that wait."""
    key, names = _bytes(part.key), keys_of(part.lock)
    yield from (("get", key), ("pttl", key), ("zrange", _bytes(names.line), 0, -1, False, True))
    if part.kind == "queued":
        yield "hmget", _bytes(names.pending), "claim", "count", "due"


def silent(rows: Iterable[Row], answered: Container[str]) -> list[str]:
    """A sentence for each worker that did not answer although one of its runs holds a key.

    Args:
        rows: The keys and their holders.
        answered: The names of the workers that answered.
    """
    workers = [row.token.hostname or "" for row in rows if row.token.attempt is not None and row.token.is_running]
    return [Say.SILENT(worker=one) for one in dict.fromkeys(workers) if "@" in one and one not in answered]


def scope_of(app: Celery, task: str | None) -> str | None:
    """The `lock_scope` of a task; None if the app has no locked task with this name."""
    plan = plan_of(app, task)
    return None if plan is None else str(plan.options.scope)


def plan_of(app: Celery, task: str | None) -> LockPlan | None:
    """The `LockPlan` of a task; None if the app has no locked task with this name."""
    return getattr(app.tasks.get(task), "lock_plan", None) if task else None


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def literal(text: str) -> str:
    """`text` as a pattern that matches only itself."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)


def matcher(pattern: str) -> Callable[[str], object]:
    """A function that matches keys against `pattern` as Redis' SCAN does."""
    # fnmatch escapes with brackets instead of a backslash, and negates a set with "!" instead of "^".
    like = re.sub(r"\\(.)|\[\^", lambda found: f"[{found[1]}]" if found[1] else "[!", pattern, flags=re.DOTALL)
    return re.compile(fnmatch.translate(like)).match
