"""`locked_task`: the decorator whose tasks and options type checkers understand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, TypedDict, overload

from celery import Celery, shared_task

from celery_redislock.options import Also, Arguments, ConflictPolicy, OnLost, OnOutage, Scope

from .locked_task import LockedTask

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import TypeVar

    from .locked_task import P

    R = TypeVar("R")
    IsBound = TypeVar("IsBound", Literal[True], Literal[False], default=Literal[False])

    class TaskOptions(TypedDict, total=False):
        """What `locked_task` accepts: the options of a `LockedTask`, and Celery's own."""

        lock_args: Sequence[str] | set[str] | frozenset[str] | None
        lock_key: str | Sequence[str] | Callable[[Mapping[str, Any]], str | Sequence[str]] | None
        lock_also: Sequence[Also]
        lock_scope: Scope
        lock_on_conflict: ConflictPolicy | None
        lock_lease: float
        lock_max_hold: float | None
        lock_wait_for: float | None
        lock_block_for: float
        lock_hold_on_retry: bool
        lock_cooldown: float
        lock_window: float | None
        lock_arguments: Arguments
        lock_debounce: float | None
        lock_debounce_max: float | None
        lock_queue_ttl: float
        lock_on_lost: OnLost
        lock_on_outage: OnOutage
        lock_limit: int | Callable[[Mapping[str, Any]], int]
        lock_rate: str | tuple[int, float] | Callable[[Mapping[str, Any]], str | tuple[int, float]] | None
        lock_fair: str | None
        lock_weight: float | Callable[[Mapping[str, Any]], float]
        lock_fence: bool

        name: str
        base: type[LockedTask[..., Any]]
        shared: bool
        lazy: bool
        typing: bool
        pydantic: bool
        pydantic_strict: bool
        pydantic_context: dict[str, Any] | None
        pydantic_dump_kwargs: dict[str, Any] | None
        autoretry_for: Sequence[type[BaseException]]
        dont_autoretry_for: Sequence[type[BaseException]]
        retry_kwargs: dict[str, Any]
        retry_backoff: bool | int
        retry_backoff_max: int
        retry_jitter: bool
        max_retries: int | None
        default_retry_delay: float
        acks_late: bool
        acks_on_failure_or_timeout: bool
        reject_on_worker_lost: bool
        ignore_result: bool
        store_errors_even_if_ignored: bool
        store_eager_result: bool
        track_started: bool
        send_events: bool
        trail: bool
        throws: tuple[type[Exception], ...]
        time_limit: float | None
        soft_time_limit: float | None
        rate_limit: str | float | None
        expires: float | datetime | None
        priority: int | None
        queue: str | None
        serializer: str
        compression: str | None
        resultrepr_maxsize: int

    class Decorator(Generic[IsBound]):
        """Turns a function into a `LockedTask`; with ``bind=True``, one whose first parameter is the task."""

        @overload
        def __call__(
            self: Decorator[Literal[True]], function: Callable[Concatenate[Any, P], R], /
        ) -> LockedTask[P, R]: ...

        @overload
        def __call__(self: Decorator[Literal[False]], function: Callable[P, R], /) -> LockedTask[P, R]: ...

        def __call__(self, function: Any, /) -> Any:
            """The task."""


def locked_task(
    app: Celery | None = None,
    *,
    bind: IsBound = False,  # type: ignore[assignment]  # mypy checks the default against both of its values
    **options: Unpack[TaskOptions],
) -> Decorator[IsBound]:
    """Declare a locked task, so that type checkers know its options, its parameters and its result.

    ``@locked_task(app, lock_scope="job")`` makes the same task as ``@app.task(base=LockedTask, lock_scope="job")``.

    Args:
        app: The app; None declares it with Celery's `shared_task`.
        bind: Whether the function's first parameter is the task, as in Celery.
        options: Those of a `LockedTask`, and those of Celery's decorator. `base` must be a subclass of `LockedTask`.

    Raises:
        TypeError: `base` is not a subclass of `LockedTask`.
        LockConfigError: When the task is bound: an option is wrong.
    """
    base = options.setdefault("base", LockedTask)
    if not issubclass(base, LockedTask):
        raise TypeError(f"base must be a subclass of LockedTask, not {base.__name__}; for other tasks, use app.task")
    decorator: Any = shared_task if app is None else app.task
    made: Decorator[IsBound] = decorator(bind=bind, **options)
    return made
