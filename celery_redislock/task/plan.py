"""LockPlan: what is known once per task class, so that no run works it out again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_redislock.app import is_enabled, settings_of, url_of
from celery_redislock.keys.maker import KeyMaker
from celery_redislock.message.broker import Broker
from celery_redislock.options import check_lease, name_of, resolve_options, resolve_settings
from celery_redislock.server import tokens
from celery_redislock.server.connect import command_time, connect
from celery_redislock.server.names import redis_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery


class LockPlan:
    """The lock of one task: options, key maker, and what the broker demands.

    Args:
        app: The app that the task is bound to.
        task: The task's name.
        body: The task's function.
        is_method: Whether the body's first parameter is the task.
        own: The task's ``lock_*`` attributes, without the prefix.

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
        self._keys = KeyMaker(task, _signature(body, is_method), options.args, options.key)
        self._prefix = settings.prefix
        self._origins: dict[str | None, str] = {}
        self._name_of_lease = name_of("lease", own, app_wide)
        self._server_is_checked = False
        if settings.enabled:
            self._check_server()

    @property
    def enabled(self) -> bool:
        """Whether locks are switched on, at this moment: tests switch them off when their app has been imported.

        Raises:
            LockConfigError: They are on for the first time, and the lock server cannot be used; or it is no bool.
        """
        enabled = is_enabled(self.app)
        if enabled and not self._server_is_checked:
            self._check_server()
        return enabled

    def _check_server(self) -> None:
        settings = resolve_settings(settings_of(self.app))
        client = connect(url_of(self.app), settings.client_options)  # opens nothing: refuses what redis-py refuses
        check_lease(self.task, self._name_of_lease, self.options.lease, command_time(client))
        self._server_is_checked = True

    def completed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A call that has the same key, where `args` and `kwargs` may lack what the key is not made of.

        Raises:
            TypeError: They lack what it is made of, or do not fit the signature.
        """
        return self._keys.completed(args, kwargs)

    def redis_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key in Redis for a call.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They cannot make a key.
        """
        return redis_key(self._prefix, self._keys.name(args, kwargs))

    def origin(self, hostname: str | None) -> str:
        """The end of the tokens of this task on `hostname`."""
        origin = self._origins.get(hostname)
        if origin is None:
            origin = self._origins[hostname] = tokens.origin(hostname, self.task)
        return origin


def _signature(body: Callable[..., Any], is_method: bool) -> inspect.Signature:
    signature = inspect.signature(body)
    if not is_method:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])
