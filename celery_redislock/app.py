"""A Celery app's ``redislock_*`` settings as they are now, and its lock server in this process."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import Celery

from .connection.connect import OPTIONS_SETTINGS, command_time, connect, is_redis, kind_of
from .errors import LockConfigError
from .lock.lock_server import LockServer, servers_of
from .options import OPTIONS, SETTINGS, resolve_settings

_SETTING = "redislock_"
_COMMAND_TIME = "_redislock_command_time"
#: A hint in the errors of eager runs, which mostly happen in tests.
WITHOUT_REDIS = "to test without Redis, set redislock_enabled = False"
#: The Sentinel transport options that the lock server's client needs too.
_OF_SENTINELS = ("master_name", "min_other_sentinels", "sentinel_kwargs")
#: The URL schemes of result backends whose results only the caller, or only one process, can read.
PRIVATE_BACKENDS = ("rpc", "cache+memory", "cache+locmem", "disabled")


def server_of(app: Celery) -> LockServer:
    """The lock server of `app` in this process. It connects when the first command is sent.

    Its threads end when the app and the locks that were made with it are garbage-collected.

    Raises:
        LockConfigError: No setting names a server, or its URL or options are wrong.
    """
    servers = servers_of(app)
    if (server := servers.get(os.getpid())) is None:
        # Two threads may get here at once: nothing is open yet, and `setdefault` keeps one server.
        inherited = next(iter(servers.values()), None)
        # After a fork, keep the inherited client: a `Lock` made before the fork uses it to find its server.
        server = LockServer.behind(inherited.client) if inherited else LockServer(client_of(app), keyprefix_of(app))
        server = servers.setdefault(os.getpid(), server)
        weakref.finalize(servers, server.stop).atexit = False
    return server


def settings_of(app: Celery) -> dict[str, Any]:
    """The ``redislock_*`` settings that the user has set, without that prefix, whatever the app's namespace.

    Unknown names are included, so that `resolve_settings` can refuse them.

    Raises:
        LockConfigError: A setting is only there under a name that Celery does not read: in the wrong case, or without
            the app's namespace.
    """
    namespace: str = (app.namespace or "celery").rstrip("_")  # type: ignore[attr-defined]  # as Celery reads it
    conf: Any = app.conf
    found: dict[str, list[str]] = {}
    for key in map(str, conf.finalize().without_defaults()):  # only names: reading another setting's value may raise
        if (bare := key.lower().removeprefix(namespace.lower() + "_")).startswith(_SETTING):
            found.setdefault(bare.removeprefix(_SETTING), []).append(key)
    settings = {}
    for name, keys in found.items():
        if not {*keys}.isdisjoint(names := names_of(conf.prefix, name)):
            settings[name] = conf.get(_SETTING + name)
        elif name in SETTINGS or name in OPTIONS:  # any other may be an unrelated setting of the project's
            raise LockConfigError(f"{keys[0]} is not read: write {names[0]}")
    return settings


def is_enabled(app: Celery) -> bool:
    """Whether the locks of `app` are switched on: the current value of `redislock_enabled`.

    Raises:
        LockConfigError: The setting is neither True nor False.
    """
    conf: Any = app.conf
    names = names_of(conf.prefix, "enabled")
    # Every run calls this. The setting is rarely set, and `conf.get` takes far longer to find that out.
    for settings in conf.maps:
        for name in names:
            if name in settings:
                if not isinstance(settings[name], bool):
                    resolve_settings(settings_of(app))  # raises a LockConfigError with the allowed values
                return bool(settings[name])
    return True


def backend_scheme(app: Celery) -> str:
    """The URL scheme of an app's result backend; ``"disabled"`` if the app has none."""
    return str(app.conf.result_backend or "disabled").split("://")[0]


def check_backend(app: Celery, task: str, option: str, ignores_result: bool) -> None:
    """Refuse the policy ``join`` if other processes cannot read the task's outcome.

    Raises:
        LockConfigError: The task's results are not stored, or only one process can read them.
    """
    scheme = backend_scheme(app)
    if ignores_result or scheme in PRIVATE_BACKENDS:
        is_private = f"other processes cannot read result_backend = {scheme!r}"
        why = "its results are ignored" if ignores_result else is_private
        raise LockConfigError(
            f"{task}: {option} = 'join' needs the holder's result, but {why}; use another policy, or a result "
            "backend such as Redis or a database"
        )


def check_window(app: Celery, task: str, option: str, window: float) -> None:
    """Refuse a window that stays open longer than Celery keeps the result that its callers get.

    Raises:
        LockConfigError: The app's results expire sooner.
    """
    expires: Any = app.conf.result_expires
    kept = expires.total_seconds() if isinstance(expires, timedelta) else expires
    if kept and kept < window:
        raise LockConfigError(
            f"{task}: {option} = {window:g} is longer than result_expires = {kept:g}: calls within the window get the "
            "job's result, and would wait forever for one that has expired; set result_expires to at least the window, "
            "or ignore_result"
        )


@functools.cache
def names_of(prefix: str | None, setting: str) -> tuple[str, ...]:
    """The names that a setting may have: the one with the prefix of the app's namespace, if any, and the plain one."""
    name = _SETTING + setting
    return (prefix + (name.upper() if prefix.isupper() else name), name) if prefix else (name,)


def client_of(app: Celery) -> Any:
    """A new client of the app's lock server. It connects when the first command is sent.

    Raises:
        LockConfigError: No setting names a server, or its URL or options are wrong.
    """
    return connect(*_address_of(app))


def keyprefix_of(app: Celery) -> str:
    """The prefix of all names on the app's lock server: the `global_keyprefix` of the broker or the result backend.

    Empty if the app has no lock server, which is allowed while its locks are switched off.
    """
    try:
        return source_of(app.conf).keyprefix
    except LockConfigError:
        return ""


def _address_of(app: Celery) -> tuple[str, dict[str, Any], str]:
    """The arguments of `connect`: the URL, all options (the user's own win), and the setting that contains the URL."""
    source = source_of(app.conf)
    return source.url, {**source.options, **resolve_settings(settings_of(app)).client_options}, source.setting


def is_nobodys(app: Celery) -> bool:
    """Whether Celery made `app` by itself and no one configured it: none of its settings names a lock server.

    Celery makes such an app if something asks for an app before the user's own exists, as gevent and eventlet do while
    they patch the process. Every shared task is bound to that app too, as soon as the task is defined.
    """
    if app.main != "default" or app.set_as_current:  # type: ignore[attr-defined]
        return False
    try:
        source_of(app.conf)
    except LockConfigError:
        return True
    return False


def command_time_of(app: Celery) -> float:
    """The longest time that a command to the app's lock server may take, in seconds. Opens no connection.

    Binding a task calls this, and making a client takes a millisecond, so the result is cached until the settings
    change.

    Raises:
        LockConfigError: No setting names a server, or redis-py refuses its URL or an option.
    """
    address = _address_of(app)
    if (known := vars(app).get(_COMMAND_TIME)) is None or known[0] != address:
        known = vars(app)[_COMMAND_TIME] = (address, command_time(connect(*address)))
    return float(known[1])


def check_lease(task: str, name: str, lease: float, command_time: float) -> None:
    """Refuse a lease that could end while a renewal is still waiting for its reply.

    A renewal is sent after a third of the lease, so a command that times out must fit into the other two thirds.

    Args:
        task: The task's name, for the error message.
        name: The name under which the lease was set, from `name_of`.
        lease: Seconds.
        command_time: Seconds until a command times out.

    Raises:
        LockConfigError: The lease is too short.
    """
    shortest = round(command_time * 1.5, 3)  # rounded as in the message, so that the suggested value is accepted
    if lease < shortest:
        raise LockConfigError(
            f"{task}: {name} = {lease} is too short: one Redis command may take {command_time:g} s to time "
            f"out; allowed: at least {shortest}, or shorter socket_timeout and socket_connect_timeout in "
            "redislock_client_options"
        )


class Source:
    """The address of the lock server, and the setting that it comes from.

    Attributes:
        setting: The name of the setting, for messages.
        url: The URL, or several separated by ``;``.
        options: Client options from Celery's other settings for that server.
        keyprefix: The prefix of all names on that server: kombu's `global_keyprefix`.
    """

    def __init__(self, setting: str, url: str, options: Mapping[str, Any], keyprefix: str = "") -> None:
        self.setting, self.url, self.options, self.keyprefix = setting, url, options, keyprefix

    def __repr__(self) -> str:
        return f"<Source {self.setting}>"


def source_of(conf: Any) -> Source:
    """Choose the lock server.

    It is `redislock_url` if that is set, otherwise the broker if that is Redis, otherwise the result backend.

    Raises:
        LockConfigError: None of them is Redis.
    """
    if (configured := conf.get("redislock_url")) is not None:
        return Source("redislock_url", configured, {})
    for setting, given, use_ssl in (
        ("broker_url", conf.broker_write_url, "broker_use_ssl"),
        ("result_backend", conf.result_backend, "redis_backend_use_ssl"),
    ):
        url = ";".join(given) if isinstance(given, list | tuple) else given
        if is_redis(url):
            # Use only the first of several brokers: locks on two servers do not exclude each other.
            url = url.split(";")[0] if kind_of(url) == "standalone" else url
            transport_options = conf.get(OPTIONS_SETTINGS[setting]) or {}
            options = _login(conf, setting, url)
            if kind_of(url) == "sentinel":
                options |= {name: value for name, value in transport_options.items() if name in _OF_SENTINELS}
            if isinstance(tls := conf.get(use_ssl), Mapping) and tls:  # kombu ignores anything but a dict
                options |= {"ssl": True, **tls}
            return Source(setting, url, options, str(transport_options.get("global_keyprefix") or ""))
    remedy = f"; {WITHOUT_REDIS}" if conf.get("task_always_eager") else ""
    raise LockConfigError(
        "neither the broker nor the result backend is Redis, so there is no server for the locks: set "
        f'redislock_url, for instance "redis://localhost:6379/0"{remedy}'
    )


def _login(conf: Any, setting: str, url: str) -> dict[str, Any]:
    """The login in Celery's settings, for what the URL does not say. A broker's host is always in the URL."""
    is_of_one_host = url.split("://")[0] in ("redis", "rediss", "valkey", "valkeys")
    names = {name: f"redis_{name}" for name in ("username", "password", "host", "port")}
    names["credential_provider"] = "redis_backend_credential_provider"
    if setting == "broker_url":  # for a socket, kombu takes the login from the URL alone
        has_login = is_of_one_host or kind_of(url) == "sentinel"
        names = {"username": "broker_user", "password": "broker_password", "port": "broker_port"} if has_login else {}
    without = () if is_of_one_host else ("host", "port")
    return {name: value for name, own in names.items() if name not in without and (value := conf.get(own))}
