"""LockedTask: the task class that users declare. Celery's hooks take and release its lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast

from celery import Celery, Signature, Task, states
from celery.app.task import Context
from celery.result import EagerResult
from celery.signals import task_postrun
from celery.utils.imports import symbol_by_name

from celery_redislock.app import server_of
from celery_redislock.celery_port import as_sent, bind, bound_tasks, requests_of, tasks_of_this_thread
from celery_redislock.errors import STRIKES, LockConfigError, LockInfo, LockKeyError
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.async_lock import Lock as AsyncLock
from celery_redislock.lock.async_server import AsyncServer
from celery_redislock.lock.lock import Lock
from celery_redislock.lock.no_lock import AsyncNoLock, NoLock
from celery_redislock.lock.several import AsyncLocks, Locks
from celery_redislock.message.delivery import Delivery, hide_headers
from celery_redislock.message.header import HEADER, Header
from celery_redislock.message.republish import ignores_result, make_known
from celery_redislock.options import ATTRIBUTES
from celery_redislock.protocol.names import Demand

from .async_publish import in_thread
from .binding import REFUSED, checked_name, checked_plan, guard_body, is_given, refused_in
from .execution import execution_of
from .lock_for import lock_of
from .lost import is_in_hook
from .plan import LockAttributes, LockPlan
from .publish import LockedResult, Publication, is_bare, take_lock_options
from .run_hooks import before_body, end_eager, set_tracer

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    from .publish import R_co

    # `LockedTask` without parameters accepts any arguments and returns Any.
    P = ParamSpec("P", default=...)

    class BaseTask(Task[P, R_co], Generic[P, R_co]):
        """Celery's task, generic for type checkers even if Celery has no types."""

else:
    P = R_co = None

    class BaseTask(Task):
        """Celery's task. It takes parameters, such as ``LockedTask[[int], str]``, which only type checkers use."""

        abstract = True

        def __class_getitem__(cls, parameters: object) -> type[Task]:
            return cls  # Celery makes subclasses with `type()`, which accepts no generic alias as a base


class LockedTask(LockAttributes, BaseTask[P, R_co]):
    """A task whose runs with the same key never overlap, unless `lock_limit` allows several.

    Use it as ``@app.task(base=LockedTask)``, or as an app's ``task_cls`` for all of its tasks. Options are class
    attributes: set them in the decorator, in a subclass or in ``task_annotations``. Their app-wide defaults are the
    settings ``redislock_*``. A call may set some of them for its own message. docs/options.md lists them all.

    Reading an option of a task, such as ``task.lock_scope``, returns the value that applies: the task's own, the
    app's, or the default. Type checkers know the task's parameters and result if you use `locked_task`, or
    ``base=LockedTask[[int], str]``.

    A subclass that overrides ``before_start`` or ``after_return`` must call ``super()``.
    """

    abstract = True

    if TYPE_CHECKING:

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> LockedResult[R_co]:
            """Send a message with these arguments, as `apply_async` does."""

    lock_plan: ClassVar[LockPlan | None] = None
    #: Returns the request class that a worker uses for a task, given the task's name and its own `Request`. Raises
    #: LockConfigError if that is not a request class.
    request_class: ClassVar[staticmethod[[str, Any], Any]]
    #: The task's `track_started`. Celery itself must not store STARTED: it does so before the hooks run, so a copy of
    #: the message would overwrite the first run's outcome.
    _lock_track_started: ClassVar[bool] = False
    #: Why the task has no plan: it cannot be locked in this app, which was only ``"given"`` it by another one, or it is
    #: ``"wrong"``, which was found while all tasks were checked. The next use of the task checks again.
    _lock_is_refused: ClassVar[Literal["given", "wrong"] | None] = None
    _lock_trace: Callable[..., Any] | None = None
    #: What a worker runs the task with. Celery sets it in each process, and `set_tracer` wraps it.
    __trace__ = property(attrgetter("_lock_trace"), set_tracer, partial(set_tracer, trace=None))

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Bind to `app`, check the options and wrap the body.

        A task of another app that Celery shares with this one fails only when it is used here.

        Raises:
            LockConfigError: An option of the task or a setting of the app is wrong.
        """
        app = super().bind(app)
        name = checked_name(app, cls)
        if cls.run is Task.run or name.startswith("celery."):  # not a user's task
            cls.lock_plan = None
            return app
        try:
            cls._prepare_lock(app, name)
        except LockConfigError as error:
            why: Any = vars(cls).get("_lock_is_refused") or ("given" if is_given(app) else None)
            if why is None:
                if (refused := REFUSED.get()) is None:
                    bound_tasks(app).pop(name, None)  # so that the next use of the task fails too
                    raise
                refused[name] = error
            cls.lock_plan, cls._lock_is_refused = None, why or "wrong"
        guard_body(app, cls, name, cls._is_locked)
        return app

    @classmethod
    def _prepare_lock(cls, app: Celery, name: str) -> None:
        request: Any = cls.Request
        if isinstance(request, type):  # a dotted name is resolved by the worker
            cls.request_class(name, request)
        cls.lock_plan = checked_plan(app, cls, name)
        cls._lock_is_refused = None
        if "_lock_track_started" not in vars(cls):  # not done yet
            # A base may have it as its own word still, or if it was bound, as this one's.
            moved = "track_started" not in vars(cls) and cls._lock_track_started
            cls._lock_track_started, cls.track_started = bool(cls.track_started or moved), False

    @classmethod
    def _plan_in_use(cls) -> LockPlan | None:
        """The plan; None for Celery's own tasks. If it was refused when the task was bound, try to make it now.

        Raises:
            LockConfigError: The task cannot be locked in this app.
        """
        if cls._lock_is_refused or "lock_plan" not in vars(cls):  # another thread is binding the task just now
            app = bind(cls)
            try:
                cls._prepare_lock(app, checked_name(app, cls))
            except LockConfigError as error:
                raise (refused_in(app, error) if cls._lock_is_refused == "given" else error) from None
        return cls.lock_plan

    @classmethod
    def _is_locked(cls) -> bool:
        plan = cls._plan_in_use()
        return plan is not None and plan.enabled

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Set the task's request class. Celery calls this in a worker's main process, before the first message.

        `LockedRequest` comes before the user's own class in the MRO, so both are used.

        Raises:
            LockConfigError: The task's ``Request`` is not a request class.
        """
        type(self).Request = self.request_class(self.name, symbol_by_name(self.Request))
        return super().start_strategy(app, consumer, **options)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> LockedResult[R_co]:
        """Send a message, as Celery does; in the scopes ``job`` and ``queue``, only if it would not duplicate a job.

        `lock_scope`, `lock_on_conflict`, `lock_wait_for`, `lock_cooldown` and `lock_window` may be set in a call, also
        in `Signature.set`. They apply to this message, its retries included, in place of the task's own. If locks are
        switched off, they have no effect.

        Returns:
            The result of the task that will run. ``duplicate`` is True if that task was sent earlier and nothing was
            sent now.

        Raises:
            LockConfigError: A lock option of the call is unknown or belongs on the task, its value is not allowed, or
                it cannot be combined with another option. If Celery itself publishes in a worker, the message is sent
                without the option and an error is logged instead.
            TypeError, LockKeyError: As in `lock_for`. In scope ``run``, or if the message is part of a canvas, has a
                link or has a `task_id`, the publish raises neither: the run ends with the error.
            LockUnavailable: Redis did not answer, or refused the command, and `lock_on_outage` is ``raise``. If the
                message is part of a canvas, has a link or has a `task_id`, the run ends with the error instead.
        """
        app = bind(self)
        options.update(task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow)
        plan = self._plan_in_use()
        given = take_lock_options(self, plan, options)

        def send(options: Mapping[str, Any]) -> LockedResult[R_co]:
            result = cast("LockedResult[R_co]", super(LockedTask, self).apply_async(args, kwargs, **options))
            with suppress(AttributeError):  # a base class that publishes at a transaction's commit has no result yet
                result.duplicate = False
            return result

        if plan is None or not plan.enabled:
            return send(options)
        publication = Publication(self, plan, options, given, send)
        if not publication.needs_key or app.conf.task_always_eager:  # in this order: Celery's settings are slow to read
            return publication.send()
        if is_in_hook():
            return publication.send_in_hook()
        try:
            sent = as_sent(self, args or (), kwargs or {}, options.get("serializer"))
            key = plan.demand(*sent).key
        except STRIKES:
            if not (options.get("retries") or options.get("parent_id")):
                raise
            return publication.send()  # by Celery, which would reject a run whose retry is not sent
        except (TypeError, LockKeyError):
            if not publication.is_unique or not is_bare(options):
                return publication.send()
            raise
        return publication.publish(key, execution_of(self.request_stack.top), *sent)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> LockedResult[R_co]:
        """Do what `delay` does, in a thread, for coroutines: see `aapply_async`."""
        return await self.aapply_async(args, kwargs)

    async def aapply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> LockedResult[R_co]:
        """Do what `apply_async` does, in a thread, so that the event loop goes on.

        The message has the same parent and root as if this thread had sent it. If the call is cancelled after the
        thread has begun, the message is still sent.
        """
        return await in_thread(bind(self), partial(self.apply_async, args, kwargs, **options))

    def apply(self, *args: Any, **options: Any) -> EagerResult[R_co]:
        """Run the task in this process, as Celery does. Lock options of the call are as in `apply_async`.

        Raises:
            LockConfigError: As in `apply_async`.
        """
        if any(option.startswith("lock_") for option in options):
            given = take_lock_options(self, self._plan_in_use(), options)
            options["headers"] = {**(options.get("headers") or {}), HEADER: Header(options=given).wire}
        task_postrun.connect(end_eager, weak=False)  # here, because Celery's tracer may not see what is added later
        return super().apply(*args, **options)

    def signature_from_request(
        self, request: Context | None = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any
    ) -> Signature[Any]:
        """The signature that `self.retry()` sends to run `request` again. It keeps the lock options of the call."""
        request = self.request if request is None else request
        header, delivery = Header.read(getattr(request, HEADER, None)), Delivery.of(request)
        if delivery and delivery.queue and not (request.delivery_info or {}).get("exchange"):  # sent straight to it
            make_known(self.app, delivery.queue)
        options = {**{f"lock_{name}": value for name, value in (header.options or {}).items()}, **options}
        signature = super().signature_from_request(request, args, kwargs, queue, **options)
        if header.number:  # for `send_in_hook`
            signature.options["headers"] = {**(signature.options.get("headers") or {}), HEADER: header.wire}
        return signature

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the lock, or end the run as the options say."""
        if (request := self.request_stack.top) is not None:
            hide_headers(request)
            joined = before_body(self, self._plan_in_use, request, args, kwargs)
            if self._lock_track_started and not joined:
                self._store_started(task_id, request)
        super().before_start(task_id, args, kwargs)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any], einfo: Any
    ) -> None:
        """Release the lock after a success or a failure."""
        # From Celery 5.7 on, this also runs in the main process at a hard time limit, while the child may still be
        # running. The main process has no request on the stack.
        if (execution := execution_of(self.request_stack.top)) is not None:
            execution.end(status)
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    def on_replace(self, sig: Any) -> Any:
        """Send the replacement, as Celery does. Only the replacement now stores a state under the shared task id."""
        if (execution := execution_of(self.request_stack.top)) is not None:
            execution.leave_no_retry()
        return super().on_replace(sig)

    @property
    def lock(self) -> HeldLock | NoLock:
        """The lock that the current run holds: key, token, fence, `remaining`, `state`, `check()`, `extend()`.

        If the run holds none, `state` is ``"none"`` and `check()` passes. That is the case in a direct call, in a run
        that started without its lock in an outage, and while locks are switched off.

        The current run is that of this thread, or greenlet. If the body starts others, take ``lock = self.lock`` in the
        body and pass that to them: in a thread of its own, ``self.lock`` is ``"none"``, and its `check()` raises
        LockConfigError.
        """
        request = self.request
        execution = execution_of(request)
        return (execution and execution.lock) or NoLock(
            *(execution.key if execution else "", [(request.args or (), request.kwargs or {})]),
            "" if execution or any(tasks_of_this_thread()) else self._mistake_of_thread(),
        )

    def _mistake_of_thread(self) -> str:
        """What this thread, which runs no task, does wrong if a worker runs this one in another; otherwise empty."""
        if all(run is None or run.request.is_eager for run in map(execution_of, requests_of(self))):
            return ""
        return (
            f"{self.name}: its self.lock was read in a thread that runs no task, while another thread runs this one: "
            "take lock = self.lock in the body, and pass that lock to the threads that the body starts"
        )

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock | Locks | NoLock:
        """The lock of the call ``task(*args, **kwargs)``, for code outside the task; all its locks, if it has several.

        Arguments that do not affect the key may be omitted: if `lock_args` names ``account_id`` or a template has
        ``{account_id}``, both ``lock_for(7)`` and ``lock_for(account_id=7)`` work.

        The lock waits up to `lock_block_for` seconds for its key, and is renewed while it is held. Code inside a
        run or block that holds the key shares that lock.

        Raises:
            TypeError: The arguments do not fit the task's signature, or one that the key needs is missing.
            LockKeyError: No key can be made from the arguments.
            LockConfigError: The task has no lock: it is Celery's own, or has a rate (`lock_rate`, `lock_also`).
        """
        return self._lock_for(args, kwargs, is_async=False) or NoLock()

    def alock_for(self, *args: Any, **kwargs: Any) -> AsyncLock | AsyncLocks | AsyncNoLock:
        """The lock that `lock_for` returns, for coroutines: ``async with task.alock_for(7):``. It raises the same."""
        return self._lock_for(args, kwargs, is_async=True) or AsyncNoLock()

    def lock_info(self, *args: Any, **kwargs: Any) -> LockInfo | None:
        """Who holds the lock of the call ``task(*args, **kwargs)``; None if it is free.

        If `lock_limit` allows several holders, `LockInfo.others` lists the rest. If the call needs several keys, this
        describes the first of them that it could not get now. Arguments may be omitted as in `lock_for`.

        Raises:
            TypeError, LockKeyError, LockConfigError: As in `lock_for`.
            LockUnavailable: Redis did not answer, or refused the command.
        """
        plan, demands = self._asked_about(args, kwargs)
        return _first_taken(demands, [server_of(plan.app).store.inspect(one) for one in demands])

    async def alock_info(self, *args: Any, **kwargs: Any) -> LockInfo | None:
        """Do what `lock_info` does, for coroutines; it raises the same."""
        plan, demands = self._asked_about(args, kwargs)
        return _first_taken(demands, [await AsyncServer.here(server_of(plan.app)).inspect(one) for one in demands])

    if not TYPE_CHECKING:  # type checkers know the options from LockAttributes

        def __getattr__(self, name: str) -> Any:
            """An option that is set neither on the task nor on a base: the value that applies."""
            plan = self._plan_in_use() if name in ATTRIBUTES and bind(self) else None
            if plan is None:  # a mixin may know it; if not, it may be a property, which raises its own error again
                return getattr(super(), "__getattr__", super().__getattribute__)(name)
            return getattr(plan.options, name.removeprefix("lock_"))

    def _store_started(self, task_id: str, request: Context) -> None:
        if not request.is_eager and not ignores_result(self, request):
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            self.backend.store_result(task_id, meta, states.STARTED, request=request)

    def _plan(self) -> LockPlan:
        bind(self)
        if (plan := self._plan_in_use()) is None:
            raise LockConfigError(f"{self.name} has no lock: it is one of Celery's own tasks")
        return plan

    def _asked_about(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[LockPlan, Sequence[Demand]]:
        """The plan, and what the call asks for, as in `demands_of`; nothing if locks are switched off."""
        plan = self._plan()
        return plan, demands_of(self, plan, args, kwargs) if plan.enabled else ()

    def _lock_for(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_async: bool) -> Any:
        """See `lock_for`; None if locks are switched off."""
        plan = self._plan()
        if plan.options.rate is not None or any(one.rate is not None for one in plan.options.also):
            which = "lock_rate" if plan.options.rate is not None else "rate in lock_also"
            raise LockConfigError(f"{self.name} has a {which}, so its runs hold no lock that could be taken here")
        if not plan.enabled:
            return None
        demands = demands_of(self, plan, args, kwargs)
        return lock_of(plan.app, demands, plan.options, thread_local=False, is_async=is_async)


def demands_of(task: Task[..., Any], plan: LockPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Demand]:
    """What a call asks for, whose arguments may be incomplete, as in `lock_for`.

    Raises:
        TypeError, LockKeyError: As in `lock_for`.
    """
    sent = as_sent(task, *plan.completed(args, kwargs))
    return list(chain(*plan.demands(*sent))) if plan.may_have_several else [plan.demand(*sent)]


def _first_taken(demands: Sequence[Demand], found: Sequence[LockInfo | None]) -> LockInfo | None:
    """Who holds the first key that a run could not get now; of a single key, who holds it at all."""
    for one, info in zip(demands, found, strict=True):
        if info is not None and (len(demands) == 1 or one.spent or len(info.holders) >= one.capacity):
            return info
    return None
