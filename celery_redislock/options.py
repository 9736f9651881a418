"""Task options and settings: their defaults and allowed values. All functions are pure.

A task's options are resolved when the task is bound. A wrong value then raises an error that says what is allowed.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any, Literal, NamedTuple, get_args

from .errors import LockConfigError, shown
from .protocol.names import MAX_CAPACITY, MOST_KEYS

#: The values of the options that are choices. The first is the default, except for `lock_on_conflict`: see
#: `resolve_options`.
Scope = Literal["run", "job", "queue"]
ConflictPolicy = Literal["skip", "wait", "raise", "join", "replace"]
Arguments = Literal["first", "latest", "all"]
OnLost = Literal["warn", "abort"]
OnOutage = Literal["retry", "raise", "run"]
CONFLICT_POLICIES: tuple[str, ...] = get_args(ConflictPolicy)


class Rule(NamedTuple):
    """The default of an option or setting, and which values it accepts."""

    default: Any
    allowed: str
    accepts: Callable[[Any], object]


def _choice(choices: tuple[str, ...]) -> Rule:
    return Rule(choices[0], " or ".join(repr(c) for c in choices), lambda v: isinstance(v, str) and v in choices)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _seconds(default: float) -> Rule:
    return Rule(default, "seconds greater than 0, int or float", _is_seconds)


def _seconds_or_zero(default: float) -> Rule:
    return Rule(default, "seconds, 0 or greater, int or float", lambda v: _is_seconds(v) or (v == 0 and v is not False))


WEIGHT = Rule(1, "a number from 0.1 to 100", lambda v: _is_seconds(v) and 0.1 <= v <= 100)
LIMIT = Rule(1, f"a whole number from 1 to {MAX_CAPACITY}", lambda v: type(v) is int and 1 <= v <= MAX_CAPACITY)
_RATE, _UNITS = r"([0-9]{1,9})/([smh])", {"s": 1, "m": 60, "h": 3600}
#: The longest time of a rate, in seconds: a year.
_LONGEST_TIME = 366 * 86_400


def shares_of(rate: Any) -> tuple[int, float, int] | None:
    """How a rate is kept: by how many permits, and in how many seconds they are granted how often.

    A rate of N in a time T has at most 50 permits, which share the N runs: a permit that is granted k times in T is
    spent for T/k (lua/acquire.lua). However the grants fall, there are never more than N in any time T.

    Args:
        rate: ``"100/m"``, with s, m or h; or a pair of a number and of seconds.

    Returns:
        None if it is not a rate.
    """
    match rate:
        case str() if found := re.fullmatch(_RATE, rate):
            number, seconds = int(found[1]), _UNITS[found[2]]
        case [int(number), int() | float() as seconds] if not isinstance(number, bool) and _is_seconds(seconds):
            pass
        case _:
            return None
    times = math.ceil(number / MAX_CAPACITY)
    if number < 1 or seconds > _LONGEST_TIME or seconds * 1000 < times:
        return None
    return min(number, MAX_CAPACITY), math.ceil(seconds * 1000) / 1000, number


RATE = Rule(None, '"100/m" (s, m or h), or (number, seconds): at most 50 a millisecond, over at most a year', shares_of)
_TRUE_OR_FALSE = Rule(False, "True or False", lambda v: isinstance(v, bool))
_SECONDS_OR_NONE = Rule(None, "seconds greater than 0, int or float, or None", lambda v: v is None or _is_seconds(v))


class Also(NamedTuple):
    """One more key that a run needs, in `lock_also`. Other tasks may share it. A run always waits for it in line.

    ``Also("farm", limit=20)`` lets at most 20 runs hold the key ``farm``, and ``Also("api:{customer}", rate="100/m")``
    at most 100 begin in any minute.
    """

    key: str | Callable[[Mapping[str, Any]], str]
    """A template over parameter names, or a callable that takes the bound arguments and returns a string."""
    limit: int | Callable[[Mapping[str, Any]], int] = 1
    """As `lock_limit`."""
    rate: str | tuple[int, float] | Callable[[Mapping[str, Any]], str | tuple[int, float]] | None = None
    """As `lock_rate`."""


def _is_list_of(kind: type, value: Any, lists: Any = list | tuple) -> bool:
    """Whether `value` is one of these `lists`, and has only items of this kind."""
    return isinstance(value, lists) and all(isinstance(one, kind) for one in value)


def _is_key(value: Any) -> bool:
    return isinstance(value, str) or callable(value)


def _is_names(value: Any) -> bool:
    return value is None or _is_list_of(str, value, list | tuple | set | frozenset)


#: The task options, without the prefix ``lock_``. `KEY_OPTIONS` depend on the task's parameters, and have no app-wide
#: default.
KEY_OPTIONS: Mapping[str, Rule] = {
    "args": Rule(None, "a list or tuple of parameter names, or None for all", _is_names),
    "key": Rule(
        None,
        "a template, a list of templates, a callable, or None",
        lambda v: v is None or _is_key(v) or _is_list_of(str, v),
    ),
    "also": Rule((), "a list of Also(key, limit=...) or Also(key, rate=...)", lambda v: _is_list_of(Also, v)),
    "fair": Rule(None, "the name of a parameter, a template, or None", lambda v: v is None or isinstance(v, str)),
    "weight": Rule(1, f"{WEIGHT.allowed}, or a callable that returns one", lambda v: WEIGHT.accepts(v) or callable(v)),
}
OPTIONS: Mapping[str, Rule] = {
    "scope": _choice(get_args(Scope)),
    "on_conflict": Rule(
        None, "'skip', 'wait', 'raise', 'join' or 'replace'", lambda v: v is None or v in CONFLICT_POLICIES
    ),
    "lease": _seconds(30.0),
    "max_hold": _SECONDS_OR_NONE,
    "wait_for": _SECONDS_OR_NONE,
    "block_for": _seconds_or_zero(10.0),
    "hold_on_retry": _TRUE_OR_FALSE,
    "cooldown": _seconds_or_zero(0.0),
    "window": _SECONDS_OR_NONE,
    "arguments": _choice(get_args(Arguments)),
    "debounce": _SECONDS_OR_NONE,
    "debounce_max": _SECONDS_OR_NONE,
    "queue_ttl": _seconds(3600.0),
    "on_lost": _choice(get_args(OnLost)),
    "on_outage": _choice(get_args(OnOutage)),
    "fence": _TRUE_OR_FALSE,
    "limit": Rule(1, f"{LIMIT.allowed}, or a callable that returns one", lambda v: LIMIT.accepts(v) or callable(v)),
    "rate": Rule(
        None,
        f"{RATE.allowed}; or a callable that returns one",
        lambda v: v is None or callable(v) or shares_of(v),
    ),
}
#: The options that do not go together with several keys, and why.
_NOT_WITH_SEVERAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "scope": (lambda v: v == "run", "a publish can reserve only one key; allowed: 'run'"),
    "on_conflict": (lambda v: v != "join", "each key may be held by another task; allowed: 'wait', 'skip' or 'raise'"),
    "hold_on_retry": (lambda v: not v, "a retry releases all keys, and takes them again"),
    "rate": (lambda v: v is None, "name the rate in lock_also: Also(key, rate=...)"),
    "fair": (lambda v: v is None, "groups take turns at one key only"),
}
#: The options that a call may set for its own message, without the prefix ``lock_``.
PER_CALL = ("scope", "on_conflict", "wait_for", "cooldown", "window")
_OF_CALLS = [f"lock_{name}" for name in PER_CALL]
#: The names of all task options, as attributes of a task.
ATTRIBUTES = frozenset(f"lock_{name}" for name in (*KEY_OPTIONS, *OPTIONS))
#: Names that other locks use for their only duration. Here the user has to choose `lock_lease` or `lock_max_hold`.
_DURATIONS = frozenset({"timeout", "ttl", "expire", "expires", "expiry"})
#: The settings that are not defaults of task options, without the prefix ``redislock_``.
SETTINGS: Mapping[str, Rule] = {
    "url": Rule(None, "a Redis URL, or None for the broker's", lambda v: v is None or (isinstance(v, str) and v != "")),
    "client_options": Rule({}, "a dict of redis-py client options", lambda v: isinstance(v, dict)),
    "prefix": Rule(
        "redislock", "text without braces", lambda v: isinstance(v, str) and v != "" and not set(v) & set("{}")
    ),
    "enabled": _TRUE_OR_FALSE._replace(default=True),
    "waiting_limit": Rule(20_000, "a whole number, 0 or greater", lambda v: type(v) is int and v >= 0),
}
#: Settings that may contain a password: error messages do not show their values.
SECRET = frozenset({"url", "client_options"})


class LockOptions(NamedTuple):
    """The options of one task, resolved and checked. Durations are seconds."""

    args: tuple[str, ...] | None
    key: str | tuple[str, ...] | Callable[[Mapping[str, Any]], str | Sequence[str]] | None
    also: tuple[Also, ...]
    fair: str | None
    weight: float | Callable[[Mapping[str, Any]], float]
    scope: Scope
    on_conflict: ConflictPolicy
    lease: float
    max_hold: float | None
    wait_for: float | None
    block_for: float
    hold_on_retry: bool
    cooldown: float
    window: float | None
    arguments: Arguments
    debounce: float | None
    debounce_max: float | None
    queue_ttl: float
    on_lost: OnLost
    on_outage: OnOutage
    fence: bool
    limit: int | Callable[[Mapping[str, Any]], int]
    rate: str | tuple[int, float] | Callable[[Mapping[str, Any]], str | tuple[int, float]] | None


class LockSettings:  # no tuple: error trackers show the items of one, and these may contain a password
    """The settings of one app, checked. The table in docs/options.md is generated from these texts."""

    url: str | None
    """The lock server: one Redis or Valkey, Sentinels or a Cluster; docs/redis-setup.md has an example of each. By
    default, the broker if it is Redis, otherwise the result backend, with Celery's own settings for it. It must not
    evict keys. A worker checks it at its start, and logs what is wrong."""

    client_options: Mapping[str, Any]
    """Options of the redis-py client, such as ``socket_timeout`` (2.0), ``socket_connect_timeout`` (1.0),
    ``ssl_ca_certs``, or a ``password`` that is not in the URL; for Sentinels, ``master_name`` and ``sentinel_kwargs``.
    ``celery report``, ``inspect conf`` and Flower hide the passwords here, and the whole of `redislock_url`."""

    prefix: str
    """The prefix of every key. If the locks use Celery's broker or result backend, its ``global_keyprefix`` comes
    first."""

    enabled: bool
    """``False`` switches all locks off, for tests. A change applies to each run, call and block that starts after
    it."""

    waiting_limit: int
    """How many messages one worker keeps waiting. Further ones go back to the broker, and return after 1 to 300 s with
    their rank. See docs/waiting.md."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"<LockSettings prefix={self.prefix!r} enabled={self.enabled}>"


def resolve_options(
    task: str, own: Mapping[str, Any], app_wide: Mapping[str, Any], prefix: str = "lock_"
) -> LockOptions:
    """Resolve a task's options from its own attributes and the app's defaults.

    Args:
        task: The task's name, for error messages.
        own: The task's ``lock_*`` attributes, without the prefix. None counts as set.
        app_wide: The app's ``redislock_*`` settings, without the prefix.
        prefix: The prefix of the names in `own` as the user writes them, for error messages.

    Raises:
        LockConfigError: An option is unknown, its value is not allowed, or it cannot be combined with another option.
    """
    rules = {**KEY_OPTIONS, **OPTIONS}
    _refuse_unknown(f"{task}: ", prefix, own, rules)
    values = {name: own.get(name, app_wide.get(name, rule.default)) for name, rule in rules.items()}
    for name, rule in rules.items():
        _check(f"{task}: {prefix}{name}", values[name], rule)
    if values["on_conflict"] is None:  # a duplicate of the same work may be skipped; other work must run
        what_counts = (values["args"], values["key"], values["limit"])
        is_same_work = what_counts == (None, None, 1) and values["scope"] != "queue" and values["fair"] is None
        values["on_conflict"] = "skip" if is_same_work else "wait"
    for number, one in enumerate(values["also"]):
        _check_also(f"{task}: {prefix}also[{number}]", one)
    for refusal in _refusals(values, lambda option: name_of(option, own, app_wide, prefix)):
        raise LockConfigError(f"{task}: {refusal}")
    if values["args"] is not None:
        values["args"] = tuple(values["args"])
    if isinstance(values["key"], list):
        values["key"] = tuple(values["key"])
    values["also"] = tuple(values["also"])
    return LockOptions(**values)


def check_of_call(task: str, name: str, value: Any) -> None:
    """Check one lock option of a call. Whether the call's options fit the task's is checked by `resolve_options`.

    Args:
        task: The task's name, for the error message.
        name: The option's name, without the prefix.
        value: Its value.

    Raises:
        LockConfigError: The option is unknown, a call cannot set it, or its value is not allowed.
    """
    option, of_calls = f"lock_{shown(name)}", " or ".join((", ".join(_OF_CALLS[:-1]), _OF_CALLS[-1]))
    if name not in KEY_OPTIONS and name not in OPTIONS:
        meant = meant_by(name, "lock_", (*KEY_OPTIONS, *OPTIONS))
        raise LockConfigError(f"{task}: {option} is not known; {meant}; a call may set {of_calls}")
    if name not in PER_CALL:
        setting = f", or redislock_{name} for the app" if name in OPTIONS else ""
        instead = f"set it in the decorator or the class of the task{setting}; a call may set {of_calls}"
        raise LockConfigError(f"{task}: {option} is an option of the task, not of a call: {instead}")
    _check(f"{task}: {option}", value, OPTIONS[name])


def allowed_of_call(given: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The options of a call among `given`, which came with its message. Invalid ones are left out.

    None if none is left.
    """
    return {name: given[name] for name in PER_CALL if name in given and accepts(OPTIONS[name], given[name])} or None


def _refusals(values: Mapping[str, Any], name: Callable[[str], str]) -> Iterator[str]:
    """Why these options cannot be combined. `name` returns the name under which an option was set."""
    scope, policy, limit, window = values["scope"], values["on_conflict"], values["limit"], values["window"]
    arguments, debounce, longest = values["arguments"], values["debounce"], values["debounce_max"]
    of_scope = f"{name('scope')} = {scope!r}"
    if scope == "queue" and policy not in {"wait", "replace"}:
        with_policy = f"{name('on_conflict')} = {policy!r}"
        yield f"{of_scope} with {with_policy} is not allowed: the queued message must run; allowed: 'wait' or 'replace'"
    if policy == "replace" and (scope, arguments) != ("queue", "latest"):
        given = of_scope if scope != "queue" else f"{name('arguments')} = {arguments!r}"
        refused = f"{name('on_conflict')} = 'replace' is not allowed with {given}"
        yield f"{refused}: set lock_scope='queue' and lock_arguments='latest', so that one call is the newest"
    if window is not None:
        refused = f"{name('window')} = {window:g} is not allowed with"
        if scope != "job":
            yield f"{refused} {of_scope}: it limits how often a job is sent; allowed: 'job'"
        if window < values["lease"]:
            lease = f"{name('lease')} = {values['lease']:g}"
            yield f"{refused} {lease}: a window must be at least as long as the lease"
    if longest is not None:
        refused = f"{name('debounce_max')} = {longest:g} is not allowed with"
        if debounce is None:
            yield f"{refused}out a debounce: it limits how long new calls can put a run off; set lock_debounce"
        elif longest < debounce:
            with_debounce = f"{name('debounce')} = {debounce:g}"
            yield f"{refused} {with_debounce}: the maximum must be at least as long as the debounce"
    if arguments != "first":
        refused = f"{name('arguments')} = {arguments!r} is not allowed with"
        if scope != "queue":
            yield f"{refused} {of_scope}, where no message waits that calls could join; allowed: 'queue'"
        if values["hold_on_retry"]:
            yield f"{refused} {name('hold_on_retry')}: a retry takes the queue slot, not the key"
        if (values["args"], values["key"]) == (None, None):
            yield f"{refused} a key of all arguments: only equal calls would be merged; set lock_args or lock_key"
    elif debounce is not None:
        refused = f"{name('debounce')} = {debounce:g} is not allowed with {name('arguments')} = 'first'"
        yield f"{refused}, where a later call does not change the message that waits; allowed: 'latest' or 'all'"
    if values["rate"] is not None:
        rate = "a callable" if callable(values["rate"]) else repr(values["rate"])
        refused = f"{name('rate')} = {rate} is not allowed with"
        for option in ("scope", "limit", "fence", "cooldown", "hold_on_retry"):
            if values[option] != OPTIONS[option].default:
                yield f"{refused} {name(option)}: it limits how often runs begin, and nothing is held while they run"
        if policy == "join":
            yield f"{refused} {name('on_conflict')} = 'join': no run holds the key; allowed: 'wait', 'skip' or 'raise'"
        if (values["args"], values["key"]) == (None, None):
            yield f"{refused} a key of all arguments: set lock_args or lock_key; lock_args=() is the whole task"
    if has_several(values["key"], values["also"]):
        which = name("also") if values["also"] else f"{name('key')} = a list"
        for option, why in _not_with_several(values):
            given = "" if callable(values[option]) else f" = {values[option]!r}"
            yield f"{name(option)}{given} is not allowed with {which}: {why}"
        keys, also = values["key"] if isinstance(values["key"], list | tuple) else [values["key"]], values["also"]
        named: list[tuple[Any, Any, Any]] = [(key, limit, None) for key in keys]
        named += [(one.key, one.limit, shares_of(one.rate) or one.rate) for one in also]
        if len(named) > MOST_KEYS or not keys:
            yield f"lock_key and lock_also name {len(named)} keys; a run has from 1 to {MOST_KEYS}"
        if twice := [key for key, *size in named if any(key == other and size != its for other, *its in named)]:
            yield f"{name('also')} gives {short_repr(twice[0])} a second limit or rate: name another key for it"
    if values["fair"] is not None:
        refused = f"{name('fair')} = {values['fair']!r} is not allowed with"
        if scope != "run":
            yield f"{refused} {of_scope}, where only one message may wait; allowed: 'run'"
        if values["rate"] is not None:
            yield f"{refused} {name('rate')}: a rate has no holders that groups could take turns with"
        if policy != "wait":
            yield f"{refused} {name('on_conflict')} = {policy!r}: groups take turns in line; allowed: 'wait'"
    elif values["weight"] != 1:
        yield f"{name('weight')} is not allowed without groups: it says how large a group's share is; set lock_fair"
    if limit != 1:
        refused = f"{name('limit')} = {limit if isinstance(limit, int) else 'a callable'} is not allowed with"
        if scope != "run":
            yield f"{refused} {of_scope}, where only one message may wait; allowed: 'run'"
        if values["fence"]:
            yield f"{refused} {name('fence')}: a fence orders successive holders, not simultaneous ones"
        if values["cooldown"]:
            yield f"{refused} {name('cooldown')}: the key would cool down after one of several holders"


def has_several(key: Any, also: Sequence[Also]) -> bool:
    """Whether runs with this `lock_key` and this `lock_also` need several keys. One key in a list counts as several."""
    return isinstance(key, list | tuple) or bool(also)


def may_have_several(options: LockOptions) -> bool:
    """Whether runs with these options may need several keys: a callable `lock_key` may return several."""
    values = {option: getattr(options, option) for option in _NOT_WITH_SEVERAL}
    return has_several(options.key, options.also) or (callable(options.key) and not any(_not_with_several(values)))


def _not_with_several(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The options among `values` that do not go together with several keys, each with the reason."""
    for option, (is_allowed, why) in _NOT_WITH_SEVERAL.items():
        if not is_allowed(values[option]):
            yield option, why


def _check_also(what: str, also: Also) -> None:
    _check(f"{what}.key", also.key, Rule(None, "a template, or a callable", lambda v: v and _is_key(v)))
    _check(f"{what}.limit", also.limit, OPTIONS["limit"])
    _check(f"{what}.rate", also.rate, OPTIONS["rate"])
    if also.rate is not None and also.limit != 1:
        raise LockConfigError(
            f"{what}: a rate with a limit is not allowed: use an Also for each, with a key of its own"
        )


def check_limit(what: str, limit: Any, *, fence: bool) -> int:
    """Return `limit` if a `Lock` may have it.

    Raises:
        LockConfigError: `limit` is not a whole number from 1 to 50, or is greater than 1 although `fence` is set.
    """
    _check(f"{what}: limit", limit, LIMIT)
    if limit > 1 and fence:
        raise LockConfigError(f"{what}: limit = {limit} is not allowed with fence=True: several holders share the key")
    return int(limit)


def name_of(option: str, own: Mapping[str, Any], app_wide: Mapping[str, Any], prefix: str = "lock_") -> str:
    """The name under which an option was set, for error messages. Arguments as for `resolve_options`."""
    if option in own:
        return f"{prefix}{option}"
    return f"redislock_{option}" if option in app_wide else f"the default {prefix}{option}"


def resolve_settings(app_wide: Mapping[str, Any]) -> LockSettings:
    """Resolve the settings of an app. The app-wide defaults of task options are checked, but not returned.

    Args:
        app_wide: The app's ``redislock_*`` settings, without the prefix.

    Raises:
        LockConfigError: A setting is unknown, or its value is not allowed.
    """
    rules = {**SETTINGS, **OPTIONS}
    for name in KEY_OPTIONS.keys() & app_wide.keys():
        raise LockConfigError(f"redislock_{name} is not a setting: set lock_{name} on the task")
    _refuse_unknown("", "redislock_", app_wide, rules)
    for name, value in app_wide.items():
        _check(f"redislock_{name}", value, rules[name], secret=name in SECRET)
    return LockSettings(**{name: app_wide.get(name, rule.default) for name, rule in SETTINGS.items()})


def _refuse_unknown(where: str, prefix: str, given: Iterable[str], known: Mapping[str, Rule]) -> None:
    for name in given:
        if name not in known:
            raise LockConfigError(f"{where}{prefix}{name} is not known; {meant_by(name, prefix, known)}")


def meant_by(name: str, prefix: str, known: Iterable[str]) -> str:
    """A hint for the error about an unknown `name`. Both `name` and `known` are without their prefix."""
    if name in _DURATIONS:
        return (
            f"did you mean {prefix}lease, how long the lock outlives a dead holder, or {prefix}max_hold, the longest "
            "that a run may hold it?"
        )
    near = _nearest(name, known)
    return f"did you mean {prefix}{near}?" if near else f"known: {', '.join(prefix + one for one in known)}"


def _nearest(word: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, n=1)), None)


def _check(what: str, value: Any, rule: Rule, *, secret: bool = False) -> None:
    if not accepts(rule, value):
        text = f"(a {type(value).__name__}, not shown)" if secret else short_repr(value)
        near = _nearest(value, rule.allowed.split("'")[1::2]) if isinstance(value, str) else None
        hint = f"; did you mean {near!r}?" if near else ""
        raise LockConfigError(f"{what} = {text} is not allowed; allowed: {rule.allowed}{hint}")


def accepts(rule: Rule, value: Any) -> bool:
    """Whether the value of an option is allowed."""
    try:
        return bool(rule.accepts(value))
    except (TypeError, OverflowError):  # the value is unhashable, or an int too large for a float
        return False
