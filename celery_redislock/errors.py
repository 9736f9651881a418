"""The errors, `LockInfo`, which they carry, and how names, runs and events are written for the log.

All errors share one base class, and keep their details in attributes. The ``args`` of an error are its constructor's
arguments, so that pickle and Celery's result backends can rebuild it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from celery.exceptions import Ignore, ImproperlyConfigured, SoftTimeLimitExceeded
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

#: Longer names are cut to this many characters.
MAX_SHOWN = 200
#: The limit for errors, and for the names of locks, which people must be able to find in Redis.
LONGEST = 1000


class LockInfo(NamedTuple):
    """Who holds a key, read from its token."""

    key: str
    """The key in Redis."""
    task_id: str | None
    """The id of the task that holds the key; None if the holder is not a task."""
    task: str | None
    """The name of that task; None if the holder is not a task."""
    hostname: str | None
    """The worker or host that holds the key; None if another library's lock holds it."""
    since: datetime | None
    """When the holder acquired the key, by its host's clock: an aware datetime in UTC."""
    ttl: float | None
    """Seconds until the key expires unless it is renewed; None for a key without expiry."""
    state: str = "held"
    """``"held"``: the holder is running. ``"stopping"``: it is running, and is asked to stop, because a newer call
    replaces it. ``"queued"``: the key is reserved for a task that has not started yet.
    ``"sending"``: it is reserved for a task whose publisher is sending the message. ``"cooling"``: the task succeeded,
    and the key is blocked until its `lock_cooldown` is over. ``"spent"``: as many runs have begun as the `lock_rate`
    allows; the next one can begin after `ttl`. ``"offered"``: the key is free, and kept for a moment for the first in
    line."""
    waiting_processes: int = 0
    """How many processes wait in line for the key. A worker counts as one, however many messages wait in it. In a pool
    of threads or greenlets, its waiting bodies count as one more. Only `lock_info` fills this in; elsewhere it is 0."""
    others: "tuple[LockInfo, ...]" = ()
    """The other holders of a lock with a limit."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Make a `LockInfo` from another one, or from its `plain` values, whatever serializer they went through."""
        info = cls(*values)
        since: Any = info.since
        if isinstance(since, str):
            info = info._replace(since=datetime.fromisoformat(since))
        return info._replace(others=tuple(cls.of(other) for other in info.others))

    @property
    def plain(self) -> tuple[Any, ...]:
        """The values, in types that every serializer supports: `since` is ISO 8601 text."""
        since = self.since and self.since.isoformat()
        others = tuple(other.plain for other in self.others)
        return (*self[:4], since, self.ttl, self.state, self.waiting_processes, others)

    def to_json(self, scope: str | None, waiting: int = 0) -> dict[str, Any]:
        """What the command line and ``celery inspect locks`` show, in JSON types.

        Args:
            scope: The task's `lock_scope`; None if it is unknown or the holder is not a task.
            waiting: How many messages wait for the key.
        """
        told = {name: getattr(self, name) for name in ("key", "task", "task_id", "hostname", "since", "ttl", "state")}
        return told | {"since": self.since and self.since.isoformat(), "scope": scope, "waiting": waiting}

    @property
    def holders(self) -> "tuple[LockInfo, ...]":
        """All holders of the lock: one, unless it has a limit."""
        return (self._replace(others=()), *self.others)

    @property
    def who(self) -> str:
        """The holders in words, for messages: their task ids and hosts."""
        named = [holder._name for holder in self.holders[:3]]
        more = len(self.holders) - 3
        return ", ".join(named if more <= 0 else [*named, f"and {more} more"])

    @property
    def _name(self) -> str:
        host, task = shown(self.hostname or "an unknown host"), f"task {shown(str(self.task_id))}"
        if self.state == "offered":
            return f"the first in line, on {host}"
        if self.state in {"queued", "sending"}:
            return f"{task}, {'queued' if self.state == 'queued' else 'being sent'} by {host}"
        if self.state == "spent":
            ttl = self.ttl or 0.0
            return f"its rate, which is used up for another {f'{ttl:.1f} s' if ttl < 120 else f'{ttl / 60:.0f} min'}"
        if self.state == "cooling":
            return f"{task}, which succeeded on {host} and is cooling down"
        if self.state == "stopping":
            return f"{task} on {host}, which is asked to stop"
        return f"{task} on {host}" if self.task_id else f"a lock outside tasks on {host}"


def shown(name: str, longest: int = MAX_SHOWN) -> str:
    """`name`, cut and with unprintable characters escaped, so that it cannot break, forge or flood a log line.

    It is cut first, to `longest` characters, so that escaping a megabyte-long name takes no time.
    """
    start = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return start if start.isprintable() else start.encode("unicode_escape").decode()


def run_named(task: str, task_id: object) -> str:
    """How log lines name a run, a message or a job: ``task shop.bill[<id>]``."""
    return f"task {task}[{shown(str(task_id))}]"


def fields(event: str, **about: object) -> dict[str, str]:
    """The fields of a log record: ``extra=fields("lost", key=key)`` sets `redislock_event` and `redislock_key`.

    Args:
        event: What happened, as a fixed word.
        about: The details: ``task``, ``task_id``, ``key``, ``holder`` (in words), ``holder_id``, ``reason``. A detail
            that is None is left out.
    """
    about = {"event": event, **about}
    return {f"redislock_{name}": shown(str(value), LONGEST) for name, value in about.items() if value is not None}


def describe(error: BaseException) -> str:
    """An error from redis-py or the broker in one line: its type and message, without a period at the end."""
    return shown(f"{type(error).__name__}: {error}", LONGEST).rstrip(".: ")


class RedisLockError(Exception):
    """Base class of all errors of celery-redislock."""

    # Celery logs this text and sends it in events. The `__repr__` of redis-py 8's errors leaves out the message.
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class LockConflict(RedisLockError, LockError):
    """Another execution holds the key.

    Args:
        key: The key in Redis.
        holder: Who holds the key, as a `LockInfo` or its `plain` values; None if unknown.
        waited: The `lock_wait_for` that is over, in seconds; None if the run has not waited in line for that long.
    """

    #: Whether the run that it ends asked for it, by the policy ``raise``.
    is_expected = False

    def __init__(self, key: str, holder: LockInfo | Sequence[Any] | None = None, waited: float | None = None) -> None:
        self.key, self.waited = key, waited
        self.holder = LockInfo.of(holder) if holder else None
        super().__init__(str(self), self.key)
        self.args = (self.key, self.holder and self.holder.plain, *(() if waited is None else (waited,)))

    @property
    def holders(self) -> tuple[LockInfo, ...]:
        """All holders of the key: one, unless the lock has a limit; none if they are unknown."""
        return self.holder.holders if self.holder else ()

    def __str__(self) -> str:
        held = f"held by {self.holder.who}" if self.holder else "already held"
        gave_up = "" if self.waited is None else f"; gave up after {shown(str(self.waited))} s in line (lock_wait_for)"
        return f"the lock {shown(self.key, LONGEST)} is {held}{gave_up}"


class LockLost(RedisLockError, LockNotOwnedError):
    """The lease ended, or the key was deleted or taken, before the holder released it.

    Args:
        key: The key in Redis.
        reason: How the loss was noticed, in words.
    """

    def __init__(self, key: str, reason: str = "its lease has ended") -> None:
        self.key, self.reason = key, reason
        super().__init__(str(self), self.key)
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return (
            f"the lock {shown(self.key, LONGEST)} is lost: {shown(self.reason, LONGEST)}; another run may have started"
        )


class LockReplaced(RedisLockError, Ignore):
    """A newer call asks the run to stop (`lock_on_conflict="replace"`). It still holds its lock.

    It is an `Ignore` of Celery's too, so that ``autoretry_for`` lets it pass. The run ends as REVOKED.

    Args:
        key: The key in Redis.
        task_id: The id of the task that replaces the run.
    """

    def __init__(self, key: str, task_id: str) -> None:
        self.key, self.task_id = key, task_id
        super().__init__(str(self))
        self.args = (key, task_id)

    def __str__(self) -> str:
        return f"task {shown(self.task_id)} replaces the run that holds the lock {shown(self.key, LONGEST)}"


class LockUnavailable(RedisLockError, RedisConnectionError):
    """Redis did not answer or refused the command.

    Args:
        key: The key in Redis.
        reason: redis-py's error, in words.
    """

    def __init__(self, key: str, reason: str = "Redis did not answer") -> None:
        self.key, self.reason = key, reason
        super().__init__(str(self))
        self.args = (self.key, reason)

    def __str__(self) -> str:
        return f"the lock server is unavailable for lock {shown(self.key, LONGEST)}: {shown(self.reason, LONGEST)}"


class LockKeyError(RedisLockError, ValueError):
    """The arguments of a call cannot be made into a key. The message names the task, the parameter and the remedy."""


class LockConfigError(RedisLockError, ImproperlyConfigured):
    """A task option or a setting is wrong. The message names it, its value and what is allowed."""


#: What may be raised in a body at any moment. Whatever else the body is in must not take it for an error of its own.
STRIKES = (SoftTimeLimitExceeded, LockLost, LockReplaced)
