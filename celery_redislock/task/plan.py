"""LockPlan: everything about a task's lock that is computed once per task class, and not in each run.

`LockAttributes` declares the options for type checkers and editors. `reservation_ttl` says how long a key stays
reserved for a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.app import (
    check_backend,
    check_lease,
    check_window,
    command_time_of,
    is_enabled,
    is_nobodys,
    keyprefix_of,
    server_of,
    settings_of,
)
from celery_redislock.errors import LockConfigError, LockKeyError
from celery_redislock.keys.arguments import digest
from celery_redislock.keys.key_maker import DIGEST, KeyMaker, made_by, signature_of
from celery_redislock.message.calls import check_serializer
from celery_redislock.message.header import Header, Reservation
from celery_redislock.message.republish import Broker
from celery_redislock.options import (
    LIMIT,
    RATE,
    WEIGHT,
    Also,
    Arguments,
    ConflictPolicy,
    LockOptions,
    OnLost,
    OnOutage,
    Rule,
    Scope,
    accepts,
    may_have_several,
    name_of,
    resolve_options,
    resolve_settings,
    shares_of,
)
from celery_redislock.policy import may_be_handed_a_key
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import FIRST_TURN, MAX_CAPACITY, MOST_KEYS, Demand, Share, keys_of, redis_key
from celery_redislock.protocol.tokens import Attempt

#: For how many combinations of a call's own options a plan keeps the resolved options.
_CALLS_KEPT = 64
#: How long a turn of a group with the weight 1 is, in microseconds of virtual time. Short, so that virtual time passes
#: more slowly than the clock, by which new books begin. Long enough for weights, because a turn is a whole number.
TURN = 1000


class LockPlan:
    """The lock of one task: its options, its keys, and its app's broker.

    `body` is the task's function; if `is_method`, its first parameter is the task. `own` holds the task's ``lock_*``
    attributes by name, without the prefix. `ignores_result` says whether the task's results are not stored, and
    `serializer` names the task's serializer.

    Attributes:
        keys: Makes the names of the locks.
        broker: The app's broker.
        options: The task's options. The app's settings and the defaults fill in what the task leaves out.
        has_one_permit: Whether only one run at a time holds a key, so that it has no other permits.
        may_have_several: Whether a run may need several keys.

    Raises:
        LockConfigError: An option or a setting is wrong.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        body: Callable[..., Any],
        is_method: bool,
        own: Mapping[str, Any],
        *,
        ignores_result: bool = False,
        serializer: str | None = None,
    ) -> None:
        self._own, self._app_wide, self._ignores_result = own, settings_of(app), ignores_result
        settings = resolve_settings(self._app_wide)
        self.app = app
        self.task = task
        self.broker = Broker(app)
        self.options = options = resolve_options(task, own, self._app_wide)
        #: `_resolve`, cached; a wrong combination is not.
        self._of_call = lru_cache(_CALLS_KEPT, typed=True)(self._resolve)
        if options.arguments != "first":
            check_serializer(task, serializer)
        signature = signature_of(body)
        if is_method:
            signature = signature.replace(parameters=[*signature.parameters.values()][1:])
        first, *others = options.key if isinstance(options.key, tuple) else (options.key,)
        self.keys = KeyMaker(task, signature, options.args, first)
        #: Make the names of the other keys that each run needs: the rest of `lock_key`, and `lock_also`.
        self._others = [KeyMaker(task, signature, None, key) for key in others]
        self._also = [(KeyMaker(task, signature, None, one.key, option="lock_also"), one) for one in options.also]
        self.may_have_several = may_have_several(options)
        self.has_one_permit = options.limit == 1 and options.rate is None and not options.also
        self._group_of = None if options.fair is None else self.keys.groups(options.fair)
        self.waiting_limit = settings.waiting_limit
        self._prefix = keyprefix_of(app) + settings.prefix
        has_one_key = self.has_one_permit and not (signature.parameters or self.may_have_several or callable(first))
        #: What each run asks for, if that is the same for all: one permit of one key, without parameters or a callable.
        self._only = self.demand((), {}) if has_one_key else None
        #: `_origin`, cached.
        self.origin = cache(self._origin)
        #: Whether the lock server was checked. It is not checked while locks are off or before the app is set up.
        self.server_is_checked = False
        if settings.enabled and not is_nobodys(app):
            self._check_server()
            self._check_backend(options, own)

    @property
    def enabled(self) -> bool:
        """Whether locks are switched on at this moment. Tests switch them off after importing their app.

        Raises:
            LockConfigError: `redislock_enabled` is neither True nor False; or locks are on, and the lock server was not
                checked before and cannot be used.
        """
        enabled = is_enabled(self.app)
        if enabled and not self.server_is_checked:
            self._check_server()
        return enabled

    def _check_server(self) -> None:
        name = name_of("lease", self._own, self._app_wide)
        check_lease(self.task, name, self.options.lease, command_time_of(self.app))
        self.server_is_checked = True

    def _check_backend(self, options: LockOptions, own: Mapping[str, Any]) -> None:
        if options.on_conflict == "join":
            check_backend(self.app, self.task, name_of("on_conflict", own, self._app_wide), self._ignores_result)
        if options.window is not None and not self._ignores_result:
            check_window(self.app, self.task, name_of("window", own, self._app_wide), options.window)

    def options_of(self, given: Mapping[str, Any]) -> LockOptions:
        """The options of a call that has set those in `given`, by name without the prefix; the task's own fill in.

        Raises:
            LockConfigError: They cannot be combined with each other, with the task's other options, or with its result
                backend.
        """
        return self._of_call(**given)

    def _resolve(self, **given: Any) -> LockOptions:
        own = {**self._own, **given}
        options = resolve_options(self.task, own, self._app_wide)
        if options.on_conflict == "replace" != self.options.on_conflict:
            where = "set it in the decorator or the class, so that each of the task's runs can be stopped"
            raise LockConfigError(f"{self.task}: lock_on_conflict = 'replace' is an option of the task only: {where}")
        self._check_backend(options, own)
        return options

    def options_for(self, header: Header) -> LockOptions:
        """The options of a message with this header: the task's own, unless the message brings valid ones."""
        if header.options is None:
            return self.options
        try:
            return self.options_of(header.options)
        except LockConfigError:
            return self.options

    def cools_down(self, options: LockOptions) -> bool:
        """Whether the key of another run of this task is taken to cool down if that run succeeds.

        The options of that run's call are unknown. If its key does not cool down, a message that comes after its end
        must not be a duplicate of it. So both the task's own options and a message's `options` must say so; otherwise
        the message waits to see.
        """
        return self.options.cooldown > 0 and options.cooldown > 0

    def demand(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Demand:
        """What a call with these arguments asks for.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: No key, or no limit, can be made from the arguments.
        """
        arguments = self.keys.bind(args, kwargs)
        return self._limited(self.keys.name_of(arguments), self.options.limit, self.options.rate, arguments)

    def demands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Demand], list[Demand]]:
        """What a call with these arguments asks for if it may need several keys: by `lock_key`, and by `lock_also`.

        Raises:
            TypeError, LockKeyError: As in `demand`; or the call needs more than `MOST_KEYS` keys.
        """
        arguments, limit, rate = self.keys.bind(args, kwargs), self.options.limit, self.options.rate
        names = self.keys.names_of(arguments) + [maker.name_of(arguments) for maker in self._others]
        if (count := len(names) + len(self._also)) > MOST_KEYS:
            raise LockKeyError(f"{self.task}: a call needs {count} keys; a run may have {MOST_KEYS} at most")
        return (
            [self._limited(name, limit, rate, arguments) for name in names],
            [self._limited(maker.name_of(arguments), *one[1:], arguments, "lock_also: ") for maker, one in self._also],
        )

    def completed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Complete a call without changing its keys; see `KeyMaker.completed`."""
        return self.keys.completed(args, kwargs, self._others + [maker for maker, _ in self._also])

    def _limited(self, name: str, limit: Any, rate: Any, arguments: Mapping[str, Any], of: str = "lock_") -> Demand:
        key = redis_key(self._prefix, name)
        if rate is None:
            return Demand(key, self._computed(f"{of}limit", LIMIT, limit, arguments))
        return Demand(key, *shares_of(self._computed(f"{of}rate", RATE, rate, arguments)) or ())

    def demand_of_run(self, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> Demand:
        """What a run with these arguments asks for. Its message has this `rank`; 0 if it has none.

        Raises:
            TypeError, LockKeyError: As in `demand`; or no group, or no weight, can be made from the arguments.
        """
        if self._only is not None and not args and not kwargs:
            return self._only
        demand = self.demand(args, kwargs)
        if self._group_of is None:
            return demand
        arguments = self.keys.bind(args, kwargs)
        group = self._group_of(arguments)
        turn = round(TURN / self._computed("lock_weight", WEIGHT, self.options.weight, arguments))
        return demand._replace(share=Share(group, digest(group)[:DIGEST], turn, rank if rank >= FIRST_TURN else 0))

    def in_any_permit(self, key: str) -> Demand:
        """`key` with the highest possible capacity, so that a holder is found whatever permit it has.

        The user's own `lock_limit` is not called: it may be slow, and may return a different number by now.
        """
        return Demand(key, 1 if self.has_one_permit else MAX_CAPACITY)

    def _computed(self, option: str, rule: Rule, value: Any, arguments: Mapping[str, Any]) -> Any:
        """The `value` of an option for a call, or what the task's own callable computes.

        Raises:
            LockKeyError: The callable raises, or returns an invalid value.
        """
        if not callable(value):
            return value
        made = made_by(value, self.task, option, arguments)
        if not accepts(rule, made):
            is_number = type(made) is int or (type(made) is float and rule is WEIGHT)
            shown = made if is_number else f"a {type(made).__name__}"
            raise LockKeyError(f"{self.task}: {option} must return {rule.allowed}, not {shown}")
        return made

    def _origin(self, hostname: str | None, *, is_worker: bool = False) -> str:
        """The last fields of this task's tokens on `hostname`: the host and the task's name."""
        if is_worker and "@" not in str(hostname):  # as in a worker of `celery.contrib.testing`
            hostname = f"celery@{hostname}"
        return tokens.origin(hostname, self.task)


class LockAttributes:
    """The options of a `LockedTask`. Durations are in seconds.

    The attributes have no values here: an option that is not set comes from the app's settings, or else from the
    defaults in `celery_redislock.options`. The table in docs/options.md is generated from these docstrings.
    """

    lock_args: Sequence[str] | set[str] | frozenset[str] | None
    """The names of the parameters that make up the key. ``()``: the task runs once at a time, whatever its arguments.
    None, the default: all of them."""

    lock_key: str | Sequence[str] | Callable[[Mapping[str, Any]], str | Sequence[str]] | None
    """A template over parameter names, ``"stock:{sku}"``, which several tasks may share; a list of up to 8, of which a
    run holds all; or a callable that takes the bound arguments and returns a string, or a list of strings. Not together
    with `lock_args`. See docs/several-locks.md."""

    lock_also: Sequence[Also]
    """More keys that each run needs, for which it always waits in line: ``[Also("farm", limit=20)]`` or
    ``[Also("api", rate="100/m")]``. None by default. See docs/several-locks.md."""

    lock_scope: Scope
    """How long the key is held. ``"run"``, the default: while the body runs. ``"job"``: from the call to the end of the
    task. ``"queue"``: while the body runs, and one more message may be queued. See docs/unique-jobs.md."""

    lock_on_conflict: ConflictPolicy | None
    """What happens to a run whose key is held: ``"skip"``, ``"wait"``, ``"raise"``, ``"join"`` or, with
    `lock_arguments` ``"latest"``, ``"replace"``. The default is ``"skip"`` if all arguments make up the key, and
    ``"wait"`` otherwise, with a limit, and in scope ``"queue"``. See docs/conflicts.md."""

    lock_lease: float
    """How long the lock outlives a dead holder. A live holder renews it every third of the lease, and
    with the policy ``"replace"`` each second. 30 by default."""

    lock_max_hold: float | None
    """Stop renewing the lock after this long, so that a hung task cannot hold its key forever. Its body goes on without
    the lock. None, the default: never."""

    lock_wait_for: float | None
    """Fail with `LockConflict` after this long in line (``"wait"``, ``"join"``), or with `LockUnavailable` after this
    long without an answer from the lock server. None, the default: never. See docs/waiting.md."""

    lock_block_for: float
    """How long `lock_for` and eager runs wait for a key. 10 by default."""

    lock_hold_on_retry: bool
    """Keep the key across the task's own ``self.retry()``. False by default; always on in scope ``"job"``."""

    lock_cooldown: float
    """Keep the key for this long after a success. 0 by default."""

    lock_window: float | None
    """In scope ``"job"``: send at most one job in this many seconds, counted from its publish. A ``delay()`` within
    that time returns that job's result, even if the job has ended. None, the default: no window. See
    docs/unique-jobs.md."""

    lock_arguments: Arguments
    """In scope ``"queue"``: which arguments the queued message runs with. ``"first"``, the default: its own.
    ``"latest"``: those of the last call made before it starts. ``"all"``: those of every such call, in
    ``self.lock.calls``. See docs/merging-calls.md."""

    lock_debounce: float | None
    """With `lock_arguments` ``"latest"`` or ``"all"``: run this long after the last call. None, the default: as soon as
    the key is free."""

    lock_debounce_max: float | None
    """With `lock_debounce`: run at most this long after the first call, however many follow. None, the default: no
    maximum."""

    lock_queue_ttl: float
    """How long a key stays reserved for a message that does not start, in the scopes ``"job"`` and ``"queue"`` and for
    a retry that keeps the key. The countdown or eta is added; no reservation outlives its message's expiry. 3600 by
    default."""

    lock_on_lost: OnLost
    """What happens when the lock is lost while the body runs. ``"warn"``, the default: a warning is logged.
    ``"abort"``: `LockLost` is raised in the body; inside a C call, when that call returns. Under gevent and eventlet
    nothing is raised: call ``self.lock.check()``."""

    lock_on_outage: OnOutage
    """What happens when Redis does not answer, or refuses a command. ``"retry"``, the default: the run is tried again
    until Redis answers. ``"raise"``: it fails with `LockUnavailable`. ``"run"``: it runs without the lock."""

    lock_limit: int | Callable[[Mapping[str, Any]], int]
    """How many runs may hold the key at once, 1 to 50; or a callable that takes the bound arguments and returns that
    number. 1 by default. See docs/concurrency-limits.md."""

    lock_rate: str | tuple[int, float] | Callable[[Mapping[str, Any]], str | tuple[int, float]] | None
    """How many runs with one key may begin in a time, over all workers: ``"100/m"`` (s, m or h); ``(90, 10)``, which
    is 90 in ten seconds; or a callable that takes the bound arguments and returns one of these. Nothing is held while
    they run. None, the default: any number. See docs/concurrency-limits.md."""

    lock_fair: str | None
    """The groups that take turns while they wait for the key: the name of a parameter, such as ``"customer"``; or a
    template, ``"{region}:{customer}"``, which makes the groups readable in ``celery locks``. None, the default: the
    oldest message goes first. See docs/fair-turns.md."""

    lock_weight: float | Callable[[Mapping[str, Any]], float]
    """With `lock_fair`: how many turns a group gets for one turn of a group with the weight 1. 0.1 to 100, or a
    callable that takes the bound arguments and returns that number. 1 by default."""

    lock_fence: bool
    """Hand out a fencing number, ``self.lock.fence``. False by default. See docs/fencing.md."""


def reservation_ttl(app: Celery, lock_options: LockOptions, options: Mapping[str, Any], expires: Any) -> float:
    """How long a key is reserved for a message, in seconds.

    That is `lock_queue_ttl` plus the message's delay, but at most until the message expires.

    Args:
        app: The task's app.
        lock_options: The lock options of the message.
        options: The options of the publish, of which `countdown`, `eta` and `expires` matter.
        expires: The task's own `expires`, for a publish without one.
    """
    ttl = lock_options.queue_ttl + max(0.0, seconds_until(app, options.get("countdown") or options.get("eta")) or 0.0)
    end = seconds_until(app, options.get("expires", expires))
    return ttl if end is None else min(ttl, end)


def give_up_reservation(
    plan: LockPlan,
    options: LockOptions,
    reservation: Reservation,
    retries: int | None,
    eta: Any = None,
    *,
    never_starts: Attempt | None = None,
) -> None:
    """Have the keeper give up the reservation of a message that will not run, or runs without its lock.

    Args:
        plan: The plan of the message's task.
        options: The lock options of the message.
        reservation: The reservation to give up.
        retries: How often the task had called `self.retry()` before the message was sent.
        eta: When the message is due, if that may be in the future.
        never_starts: The attempt, if it has not started and never will: its job's window is closed, so that another one
            may be sent, and calls that were merged into its message get no run.
    """
    names = keys_of(reservation.key)
    closes = (names.window(tokens.escape(plan.task)), names.given(never_starts.job)) if never_starts else ()
    ttl = reservation_ttl(plan.app, options, {"eta": eta}, None)
    is_to_come = may_be_handed_a_key(retries, options)
    demand = plan.in_any_permit(reservation.key)
    server_of(plan.app).give_up(demand, reservation.claim, ttl, is_to_come=is_to_come, closes=closes)


def seconds_until(app: Celery, moment: Any) -> float | None:
    """Seconds from now until `moment`: a number of seconds, ISO 8601 text or a date, as Celery accepts them.

    None if `moment` is None or Celery refuses it: Celery then raises the error itself, when it sends the message or in
    the worker.
    """
    if moment is None:
        return None
    try:
        if isinstance(moment, int | float):
            return float(moment)
        text = moment if isinstance(moment, str) else moment.isoformat()
        due: datetime = maybe_make_aware(maybe_iso8601(text), app.timezone)  # type: ignore[arg-type]
        return (due - datetime.now(UTC)).total_seconds()
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
