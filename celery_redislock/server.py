"""LockServer: what one process has of an app's lock server, made on first use and never shared over a fork."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .connection import command_time, connect, lock_url
from .keeper import Keeper
from .options import LockSettings, resolve_settings
from .store import LockStore

if TYPE_CHECKING:
    from celery import Celery

_SETTING = "redislock_"
_SERVERS = "_redislock_servers"


class LockServer:
    """A store for this process's threads and a keeper with a connection of its own."""

    def __init__(self, url: str, settings: LockSettings) -> None:
        client, keepers = (connect(url, {**settings.client_options, **own}) for own in ({}, {"max_connections": 1}))
        self.store = LockStore(client)
        self.keeper = Keeper(LockStore(keepers, self.store.outage), command_time(keepers))

    @classmethod
    def of(cls, app: Celery) -> LockServer:
        """The lock server of `app` in this process.

        A client or a thread from before a fork is of no use after it, so there is one server a process id.
        """
        servers: dict[int, LockServer] = app.__dict__.setdefault(_SERVERS, {})
        pid = os.getpid()
        server = servers.get(pid)
        if server is None:  # two threads may both make one; nothing is open yet, and one of them wins
            server = servers.setdefault(pid, cls(url_of(app), resolve_settings(settings_of(app))))
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


def url_of(app: Celery) -> str:
    """The URL of the app's lock server.

    Raises:
        LockConfigError: There is none, or it cannot be used.
    """
    configured = app.conf.get("redislock_url")
    return lock_url(configured, app.conf.broker_write_url, app.conf.result_backend)
