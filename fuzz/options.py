"""Random options of tasks, and what the docs say that such a task locks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from celery_redislock import Also, LockedTask
from celery_redislock.errors import LockConfigError
from chaos.tasks import LEASE
from tests.lab.kinds import OPTIONS

#: The keys that all tasks of a life use: so few that its calls meet each other.
KEYS = ("a", "b", "c")
#: The seconds of a cooldown or a rate at most, after which nothing is left of them.
LONGEST = 3.0
#: The window of a task: no shorter than its lease.
WINDOW = 4.0
#: The `lock_max_hold` of a task: a lease later, its body goes on without the lock.
MAX_HOLD = 0.5
Options = dict[str, Any]
_SOME: Options = {"lock_args": ["key"]}
_MERGING: Options = {"lock_scope": "queue", "lock_arguments": "latest"}
#: What each task has, so that what goes with little else is drawn as often as the rest.
THEMES: tuple[Options, ...] = (
    {},
    {"lock_scope": "run"},
    {"lock_scope": "job"},
    {"lock_scope": "job", "lock_window": WINDOW},
    {"lock_scope": "queue"},
    {"lock_on_conflict": "join"},
    {"lock_on_conflict": "skip"},
    {"lock_limit": 2},
    {**_SOME, "lock_rate": [3, 2.0]},
    {**_MERGING},
    {**_MERGING, "lock_debounce": 0.5, "lock_debounce_max": 2.0},
    {**_MERGING, "lock_arguments": "all", "lock_debounce": 0.5},
    {**_MERGING, "lock_on_conflict": "replace"},
    {"lock_key": "shared:{key}", "lock_fair": "other", "lock_scope": "run"},
    {"lock_key": ["shared:{key}", "shared:{other}"], "lock_scope": "run"},
    {"lock_also": [["farm", 2, None]], "lock_scope": "run"},
    {"lock_also": [["api", 1, [4, 2.0]]], "lock_scope": "run"},
)


@dataclass(frozen=True)
class Spec:
    """One task of an app. All of it is JSON."""

    name: str
    options: Options | None
    """Those of the decorator; None for a task without a lock. A tuple is a list, and an `Also` a list of its fields."""
    is_late: bool = True
    """Whether its messages are acked late, and come again if a child dies."""

    @property
    def lingers(self) -> bool:
        """Whether its runs keep their keys for a moment when their end may have been seen: every second task's do."""
        return self.name[-1] in "13579"

    @property
    def has_all_arguments(self) -> bool:
        """Whether all arguments make up the key: then those of two calls for one key are equal."""
        return self.options is not None and "lock_args" not in self.options and "lock_key" not in self.options

    def option(self, name: str, default: Any = None) -> Any:
        """An option as it was given."""
        return (self.options or {}).get(name, default)

    @property
    def policy(self) -> str:
        """The task's policy: the default is that of docs/conflicts.md."""
        given = self.option("lock_on_conflict")
        if given:
            return str(given)
        skips = self.has_all_arguments and self.option("lock_limit", 1) == 1 and self.option("lock_scope") != "queue"
        return "skip" if skips else "wait"


@dataclass(frozen=True)
class Locks:
    """What a run needs: each limited lock with its limit, and each rate with its number and its seconds."""

    limits: dict[str, int] = field(default_factory=dict)
    rates: dict[str, tuple[int, float]] = field(default_factory=dict)


def locks_of(spec: Spec, key: str, other: str) -> Locks:
    """What the docs say that a run of the task locks, under names of our own."""
    if spec.options is None:
        return Locks()
    template = spec.option("lock_key")
    if template is None:
        parts = {"key": key, "other": other} if spec.has_all_arguments else {"key": key}
        keys = [f"{spec.name}({','.join(parts[name] for name in spec.option('lock_args', parts))})"]
    else:
        templates = template if isinstance(template, list) else [template]
        keys = [one.format(key=key, other=other) for one in templates]
    locks, rate = Locks(), spec.option("lock_rate")
    for one in keys:
        if rate:
            locks.rates[one] = (rate[0], rate[1])
        else:
            locks.limits[one] = spec.option("lock_limit", 1)
    for one, limit, also_rate in spec.option("lock_also", []):
        if also_rate:
            locks.rates[one] = (also_rate[0], also_rate[1])
        else:
            locks.limits[one] = limit
    return locks


def decorated(options: Options) -> Options:
    """The options as a decorator takes them."""
    given = dict(options)
    if "lock_also" in given:
        given["lock_also"] = [Also(key, limit, rate and tuple(rate)) for key, limit, rate in given["lock_also"]]
    if "lock_rate" in given:
        given["lock_rate"] = tuple(given["lock_rate"])
    return given


def _tried(key: str, other: str) -> None: ...


def refusal(options: Options) -> LockConfigError | None:
    """Why the package refuses these options; None if it takes them. Any other error of its validation is raised."""
    app = Celery("fuzz", broker="memory://", backend="redis://", set_as_current=False)
    app.conf.update(redislock_url="redis://127.0.0.1:1", redislock_client_options=OPTIONS)
    try:
        tried: Any = _tried
        app.task(base=LockedTask, shared=False, name="fuzz.tried", **decorated(options))(tried)
        app.finalize()
        app.tasks["fuzz.tried"]
    except LockConfigError as error:
        return error
    finally:
        app.close()
    return None


def random_options(chance: random.Random) -> Options:
    """Options that the package takes. Those that it refuses are drawn again, but for those of the theme."""
    theme = chance.choice(THEMES)
    while True:
        options = {"lock_lease": LEASE, **dict(_drawn(chance)), **theme}
        if "lock_rate" in options and "lock_key" in options:  # all tasks with one key have a rate, or none has
            options["lock_key"] = "rated:{key}"
        if refusal(options) is None:
            return options


def _drawn(chance: random.Random) -> Iterator[tuple[str, Any]]:
    """What may be refused as a whole. What goes with a scope alone is mostly drawn with it."""

    def happens(share: float) -> bool:
        return chance.random() < share

    scope = chance.choices(["run", "job", "queue"], [5, 3, 3])[0]
    yield "lock_scope", scope
    yield from _drawn_keys(chance)
    if happens(0.6 if scope != "queue" else 0.1):
        yield "lock_on_conflict", chance.choice(["skip", "wait", "raise", "join"])
    elif scope == "queue" and happens(0.6):
        arguments = chance.choice(["latest", "latest", "all"])
        yield "lock_arguments", arguments
        if arguments == "latest" and happens(0.4):
            yield "lock_on_conflict", "replace"
        if happens(0.5):
            yield "lock_debounce", chance.choice([0.3, 1.0])
            if happens(0.7):
                yield "lock_debounce_max", chance.choice([1.0, 2.0])
    if scope == "run" and happens(0.25):
        yield "lock_limit", chance.randint(2, 3)
    if scope == "run" and happens(0.2):
        yield "lock_rate", chance.choice([[2, 1.5], [3, 2.0], [5, LONGEST]])
    if scope == "job" and happens(0.25):
        yield "lock_window", WINDOW
    if happens(0.15):
        yield "lock_also", [chance.choice([["farm", 2, None], ["api", 1, [4, 2.0]]])]
    if scope == "run" and happens(0.15):
        yield "lock_fair", "other"
    if happens(0.15):
        yield "lock_cooldown", chance.choice([0.3, 1.0])
    if happens(0.15):
        yield "lock_hold_on_retry", True
    if happens(0.1):
        yield "lock_wait_for", chance.choice([1.0, 4.0])
    if happens(0.1):
        yield "lock_fence", True
    if happens(0.1):
        yield "lock_max_hold", MAX_HOLD
    if happens(0.2):
        yield "lock_on_lost", "abort"
    if happens(0.3):
        yield "lock_on_outage", chance.choice(["raise", "run"])


def _drawn_keys(chance: random.Random) -> Iterator[tuple[str, Any]]:
    match chance.choices(["all", "some", "none", "shared", "two"], [2, 4, 1, 4, 1])[0]:
        case "some":
            yield "lock_args", ["key"]
        case "none":
            yield "lock_args", []
        case "shared":
            yield "lock_key", "shared:{key}"
        case "two":
            yield "lock_key", ["shared:{key}", "shared:{other}"]


def random_spec(name: str, chance: random.Random) -> Spec:
    """A task with random options."""
    return Spec(name, random_options(chance), is_late=chance.random() < 0.7)
