"""What a Celery app says of its locks: its settings, as they are now, and its lock server in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .options import resolve_settings
from .server.connect import connect, lock_url
from .server.lock_server import LockServer, servers_of

if TYPE_CHECKING:
    from celery import Celery

_SETTING = "redislock_"


def server_of(app: Celery) -> LockServer:
    """The lock server of `app` in this process.

    Raises:
        LockConfigError: There is none, or it cannot be used.
    """
    servers = servers_of(app)
    server = servers.get(os.getpid())
    if server is None:  # two threads may both make one; nothing is open yet, and one of them wins
        inherited = next(iter(servers.values()), None)
        if inherited is not None:  # by a fork: locks that were made before it find their server by that client
            server = LockServer.behind(inherited.client)
        else:
            server = LockServer(connect(url_of(app), resolve_settings(settings_of(app)).client_options))
        server = servers.setdefault(os.getpid(), server)
    return server


def settings_of(app: Celery) -> dict[str, Any]:
    """The ``redislock_*`` settings that the user has set, without that prefix, in whatever namespace.

    Celery's own defaults are no part of it, so that an unknown name shows.
    """
    namespace: str = app.namespace or ""  # type: ignore[attr-defined]
    names = {
        bare.removeprefix(_SETTING)
        for key in app.conf.table(with_defaults=False, censored=False)
        if (bare := str(key).lower().removeprefix(namespace.lower() + "_")).startswith(_SETTING)
    }
    return {name: app.conf.get(_SETTING + name) for name in names}


def is_enabled(app: Celery) -> bool:
    """The setting `redislock_enabled`, as it is now.

    Raises:
        LockConfigError: It is neither True nor False.
    """
    conf: Any = app.conf
    name = _SETTING + "enabled"
    prefixed = name if not conf.prefix else conf.prefix + (name.upper() if conf.prefix.isupper() else name)
    # Each run asks. Where nobody has set it, as mostly, `conf.get` takes six times as long to find that out.
    if not any(name in settings or prefixed in settings for settings in conf.maps):
        return True
    enabled = conf.get(name)
    if not isinstance(enabled, bool):
        resolve_settings(settings_of(app))  # raises, and says what is allowed
    return bool(enabled)


def url_of(app: Celery) -> str:
    """The URL of the app's lock server.

    Raises:
        LockConfigError: There is none, or it cannot be used.
    """
    configured = app.conf.get("redislock_url")
    return lock_url(configured, app.conf.broker_write_url, app.conf.result_backend)
