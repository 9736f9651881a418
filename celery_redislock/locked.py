"""`locked`: a lock around any function or block, using the app's lock server and settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar, cast, overload

from celery import Celery

from .app import check_lease, is_enabled, keyprefix_of, server_of, settings_of
from .celery_port import app_of_last_resort, app_of_this_thread, current_apps
from .errors import LONGEST, LockConfigError, shown
from .keys.arguments import parse_template
from .keys.key_maker import KeyMaker, signature_of
from .lock.async_lock import Lock as AsyncLock
from .lock.lock import Lock
from .lock.lock_server import LockServer
from .lock.no_lock import AsyncNoLock, NoLock
from .lock.several import AsyncLocks, Locks
from .options import check_limit, name_of, resolve_options, resolve_settings
from .protocol.names import MOST_KEYS, Demand, redis_key
from .task.binding import refuse_what_outlives_its_call
from .task.lock_for import lock_of

#: The app-wide options that also apply to a lock outside tasks.
_OPTIONS = ("block_for", "lease", "fence", "limit")
#: What a call of an async function or of a generator returns.
_RUNS_LATER = (CoroutineType, GeneratorType, AsyncGeneratorType)
P = ParamSpec("P")
R = TypeVar("R")


@overload
def locked(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def locked(
    template: str | Sequence[str] | None = None,
    /,
    *,
    values: Mapping[str, Any] | None = None,
    block_for: float | None = None,
    lease: float | None = None,
    fence: bool | None = None,
    limit: int | None = None,
    app: Celery | None = None,
) -> Locked: ...
def locked(
    template: Any = None,
    /,
    *,
    values: Mapping[str, Any] | None = None,
    block_for: float | None = None,
    lease: float | None = None,
    fence: bool | None = None,
    limit: int | None = None,
    app: Celery | None = None,
) -> Any:
    """A lock around a block or a function, renewed while it is held. Coroutines write ``async with``.

    ``with locked("stock:7", block_for=5):`` and ``with locked("stock:{sku}", values={"sku": 7}):`` share their key with
    the tasks that have ``lock_key="stock:{sku}"``. ``@locked("stock:{sku}")`` takes the values from the function's
    parameters; ``@locked`` makes the key from the function's name and all its arguments. Code inside a run or a block
    that already holds the key does not wait for itself. ``locked(["account:1", "account:2"])`` holds both keys or none.

    Args:
        template: Names the key, like a task's `lock_key`; a list of up to 8 names several.
        values: The values of the template's parameters; only for a block.
        block_for: Seconds to wait for the key; 0 means do not wait; None for the app's `redislock_block_for`.
        lease: Seconds that the key outlives a dead holder; None for the app's `redislock_lease`.
        fence: Whether to hand out a fencing number; None for the app's `redislock_fence`.
        limit: How many may hold the key, or each of them, at once, 1 to 50; None for the app's `redislock_limit`.
        app: The app whose lock server and settings to use; None for the current app, or the only one.

    Raises:
        LockConfigError: The template is malformed, or the function is a generator. Also when the block or the call
            begins, if waiting for the lock would block the caller's event loop.
        LockConflict: When the block or the call begins: the key was still held at the end of `block_for`.
        LockUnavailable: When the block or the call begins: Redis did not answer, or refused the command.
    """
    if template is not None and not isinstance(template, str | list | tuple):
        return Locked((), None, app, {})(template)
    templates = (template,) if isinstance(template, str) else tuple(template or ())
    if template is not None and not (
        0 < len(templates) <= MOST_KEYS and all(isinstance(one, str) for one in templates)
    ):
        raise LockConfigError(f"locked: a template, or a list of 1 to {MOST_KEYS} templates, names what is locked")
    options = {"block_for": block_for, "lease": lease, "fence": fence, "limit": limit}
    given = {name: value for name, value in options.items() if value is not None}
    return Locked(templates, values, app, given)


class Locked:
    """What `locked` returns: a context manager and a decorator, which threads and coroutines may share."""

    def __init__(
        self, templates: tuple[str, ...], values: Mapping[str, Any] | None, app: Celery | None, given: Mapping[str, Any]
    ) -> None:
        self._shown = repr(templates[0] if len(templates) == 1 else [*templates])
        self._what = f"locked({self._shown})" if templates else "locked"
        self._fields = {field for one in templates for _, field in parse_template(self._what, one)} - {""}
        self._templates = templates
        self._values = values
        self._app = app
        self._given = given
        self._settings: _Settings | None = None
        self._of_block: dict[tuple[LockServer, bool], Any] = {}

    def __repr__(self) -> str:
        return f"<locked {shown(self._shown, LONGEST)}>" if self._templates else "<locked>"

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`, which may be async: each call holds the key while it runs.

        Raises:
            LockConfigError: The function is a generator, or lacks a parameter that the template names.
        """
        if self._values is not None:
            raise LockConfigError(f"{self._what}: values are only for a block; a function uses its arguments")
        is_async = inspect.iscoroutinefunction(function)
        _refuse_what_has_no_call(function, is_async=is_async)
        if not self._templates and not hasattr(function, "__qualname__"):
            raise LockConfigError(f"locked: {_name_of(function)} has no name to make a key from: pass a template")
        module, at = function.__module__, getattr(inspect.unwrap(function), "__globals__", {})
        if module in {"__main__", "__mp_main__"}:  # a script, or a child of it: by this name, others import it
            module = getattr(at.get("__spec__"), "name", Path(at.get("__file__") or module).stem)
        name = f"{module}.{_name_of(function)}"
        signature, remedy = signature_of(function), "give locked() a template"
        makers = [KeyMaker(name, signature, None, one, remedy=remedy) for one in self._templates or (None,)]

        def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
            return [maker.name(args, kwargs) for maker in makers]

        @functools.wraps(function)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with self._resolve().lock(lambda: names(args, kwargs), is_async=True):
                return await cast("Awaitable[Any]", function(*args, **kwargs))

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._resolve().lock(lambda: names(args, kwargs), is_async=False):
                result = function(*args, **kwargs)
                if isinstance(result, _RUNS_LATER):  # the function is a plain wrapper of the one that made it
                    what = f"{self._what}: {name} returned a {type(result).__name__}"
                    raise LockConfigError(f"{what}, which runs after the lock is released; use a block inside it")
                return result

        return cast("Callable[P, R]", run_async) if is_async else run

    def __enter__(self) -> Lock | Locks | NoLock:
        """Take the key.

        Raises:
            LockConflict, LockUnavailable: As for `locked`.
            LockKeyError: The values cannot be made into a key.
            LockConfigError: A parameter of the template has no value, or no setting names a lock server.
        """
        lock: Lock | Locks | NoLock = self._block().__enter__()
        return lock

    def __exit__(self, *error: object) -> None:
        self._taken(is_async=False).__exit__(*error)

    async def __aenter__(self) -> AsyncLock | AsyncLocks | AsyncNoLock:
        """Take the key in a coroutine.

        Raises:
            LockConflict, LockUnavailable, LockKeyError, LockConfigError: As for `__enter__`.
        """
        lock: AsyncLock | AsyncLocks | AsyncNoLock = await self._block(is_async=True).__aenter__()
        return lock

    async def __aexit__(self, *error: object) -> None:
        await self._taken(is_async=True).__aexit__(*error)

    def _taken(self, *, is_async: bool) -> Any:
        """The lock that the calling block has taken."""
        # Look for it on all servers: the block may have made another app current.
        locks = [lock for (_, of_async), lock in [*self._of_block.items()] if of_async is is_async]
        return next((one for one in reversed(locks) if one.token is not None), None) or self._block(is_async=is_async)

    def _block(self, *, is_async: bool = False) -> Any:
        """The lock for a block, one per server: a `Lock` tells its threads and contexts apart by itself."""
        settings = self._resolve()
        if not is_enabled(settings.app):
            return AsyncNoLock() if is_async else NoLock()
        at = server_of(settings.app), is_async
        return self._of_block.get(at) or self._of_block.setdefault(at, settings.lock(self._names, is_async=is_async))

    def _names(self) -> list[str]:
        values = self._values or {}
        if not self._templates:
            raise LockConfigError('a block needs a template, as in locked("stock:7")')
        if missing := sorted(self._fields - values.keys()):
            raise LockConfigError(f"{self._what}: values lacks {', '.join(missing)}")
        parameters = [inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY) for field in self._fields]
        signature, given = inspect.Signature(parameters), {field: values[field] for field in self._fields}
        return [KeyMaker(self._what, signature, None, one).name((), given) for one in self._templates]

    def _resolve(self) -> _Settings:
        app = self._app or the_app()
        settings = self._settings
        if settings is None or settings.app is not app:
            settings = self._settings = _Settings(app, self._what, self._given)
        return settings


class _Settings:
    """The options of one `locked`: its own arguments, with the app's settings as defaults."""

    def __init__(self, app: Celery, what: str, given: Mapping[str, Any]) -> None:
        app_wide = settings_of(app)
        settings = resolve_settings(app_wide)
        app_wide = {name: app_wide[name] for name in _OPTIONS if name in app_wide}
        self._options = options = resolve_options(what, given, app_wide, "")
        self._limit = check_limit(what, options.limit, fence=options.fence)
        if settings.enabled:
            check_lease(what, name_of("lease", given, app_wide, ""), options.lease, server_of(app).command_time)
        self.app, self._prefix = app, keyprefix_of(app) + settings.prefix

    def lock(self, names: Callable[[], list[str]], *, is_async: bool) -> Any:
        if not is_enabled(self.app):
            return AsyncNoLock() if is_async else NoLock()
        demands = [Demand(redis_key(self._prefix, name), self._limit) for name in names()]
        return lock_of(self.app, demands, self._options, thread_local=True, is_async=is_async)


def _refuse_what_has_no_call(function: Any, *, is_async: bool) -> None:
    if not is_async:
        refuse_what_outlives_its_call(f"locked: {_name_of(function)}", function, "use a block inside it")
    if inspect.isclass(function) or not callable(function):
        raise LockConfigError(
            f'locked: {_name_of(function)} is neither a function nor a template such as "stock:7": put @locked below '
            "@classmethod and the like"
        )


def _name_of(function: Any) -> str:
    """The name of a function. Any other callable is named by its type: its repr may show arguments."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def the_app() -> Celery:
    """The current app; in a thread without one, as in a web server, the only app of the process.

    In such a thread, Celery itself would use a new app without settings.
    """
    if (app := app_of_this_thread()) is not None:
        return app
    apps = current_apps()
    if len(apps) > 1:
        raise LockConfigError("locked: this process has several Celery apps: pass app=, or call app.set_default()")
    return apps[0] if apps else app_of_last_resort()
