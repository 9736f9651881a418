"""LockPlan: what can be worked out once per task class, so that no run has to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_redislock.app import check_lease, command_time_of, is_enabled, is_nobodys, keyprefix_of, settings_of
from celery_redislock.errors import LockKeyError
from celery_redislock.keys.maker import KeyMaker, blame
from celery_redislock.message.broker import Broker
from celery_redislock.options import LIMIT, MAX_LIMIT, name_of, resolve_options, resolve_settings
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import limited, redis_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery


class LockPlan:
    """The lock of one task: its options, its keys, and what its broker does with messages.

    It is made of the task's name and body, whose first parameter is the task where it `is_method`, and of `own`, the
    task's ``lock_*`` attributes by their names without the prefix.

    Attributes:
        keys: Makes the names of the locks.
        broker: The app's broker.
        options: The task's options, with the app's settings and the defaults for what the task leaves out.
        acts_at_publish: Whether a publish may need the key: in the scopes ``job`` and ``queue`` it takes the key or the
            place in the queue, and with `lock_hold_on_retry` a `self.retry()` hands the key over.

    Raises:
        LockConfigError: An option or a setting is wrong.
    """

    def __init__(
        self, app: Celery, task: str, body: Callable[..., Any], is_method: bool, own: Mapping[str, Any]
    ) -> None:
        app_wide = settings_of(app)
        settings = resolve_settings(app_wide)
        self.app = app
        self.task = task
        self.broker = Broker(app)
        self.options = options = resolve_options(task, own, app_wide)
        self.acts_at_publish = options.scope != "run" or options.hold_on_retry
        self.keys = KeyMaker(task, _signature(body, is_method), options.args, options.key)
        self.waiting_limit = settings.waiting_limit
        self._prefix = keyprefix_of(app) + settings.prefix
        self._origins: dict[str | None, str] = {}
        self._name_of_lease = name_of("lease", own, app_wide)
        #: Whether the lock server was found fit: not yet where locks are off, or where nobody has set the app up.
        self.server_is_checked = False
        if settings.enabled and not is_nobodys(app):
            self._check_server()

    @property
    def enabled(self) -> bool:
        """Whether locks are switched on at this moment. Tests switch them off after their app was imported.

        Raises:
            LockConfigError: `redislock_enabled` is neither True nor False; or locks are on for the first time, or the
                app is one that nobody has set up, and the lock server cannot be used.
        """
        enabled = is_enabled(self.app)
        if enabled and not self.server_is_checked:
            self._check_server()
        return enabled

    def _check_server(self) -> None:
        check_lease(self.task, self._name_of_lease, self.options.lease, command_time_of(self.app))
        self.server_is_checked = True

    def redis_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key in Redis for a call with these arguments; a `LimitedKey` where more than one may hold it at once.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: No key, or no limit, can be made of the arguments.
        """
        if self.options.limit == 1:
            return redis_key(self._prefix, self.keys.name(args, kwargs))
        arguments = self.keys.bind(args, kwargs)
        return limited(redis_key(self._prefix, self.keys.name_of(arguments)), self._limit(arguments))

    def in_any_slot(self, key: str) -> str:
        """`key` for finding one holder in any slot that a lock can have, whatever its limit is now.

        The user's own `lock_limit` is not called, for it may take its time, and may answer otherwise by now.
        """
        return key if self.options.limit == 1 else limited(key, MAX_LIMIT)

    def _limit(self, arguments: Mapping[str, Any]) -> int:
        """How many may hold the key of a call at once.

        Raises:
            LockKeyError: The task's own `lock_limit` raises, or returns what is no limit.
        """
        limit: Any = self.options.limit
        if not callable(limit):
            return int(limit)
        try:
            made = limit(arguments)
        except Exception as error:
            raise LockKeyError(f"{self.task}: lock_limit raised {blame(error)}") from error
        if not LIMIT.accepts(made):
            shown = made if type(made) is int else f"a {type(made).__name__}"
            raise LockKeyError(f"{self.task}: lock_limit must return {LIMIT.allowed}, not {shown}")
        return int(made)

    def origin(self, hostname: str | None) -> str:
        """The last fields of this task's tokens on `hostname`, made once: the host and the task's name."""
        origin = self._origins.get(hostname)
        if origin is None:
            origin = self._origins[hostname] = tokens.origin(hostname, self.task)
        return origin


def _signature(body: Callable[..., Any], is_method: bool) -> inspect.Signature:
    signature = inspect.signature(body)
    if not is_method:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])
