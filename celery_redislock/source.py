"""Source: which setting of an app names its lock server, and what Celery's own settings say of that server.

Pure: takes a mapping of settings and returns values. No connection is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .connection.connect import OPTIONS_SETTINGS
from .connection.urls import is_redis, kind_of
from .errors import LockConfigError

#: Where a run is eager, which it mostly is in a test.
WITHOUT_REDIS = "to test without Redis, set redislock_enabled = False"
#: What Celery has in the transport options of a broker or a result backend behind Sentinels.
_OF_SENTINELS = ("master_name", "min_other_sentinels", "sentinel_kwargs")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the address of the lock server comes from.

    Attributes:
        setting: The name of the setting, for people.
        url: The URL, or several with ``;`` between them.
        options: What other settings of Celery's say of that server, as options of a client.
        keyprefix: What precedes all names on that server, kombu's `global_keyprefix`.
    """

    setting: str
    url: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    keyprefix: str = ""

    @property
    def options_setting(self) -> str:
        """The name of the setting where the server's other options are."""
        return OPTIONS_SETTINGS[self.setting]


def source_of(conf: Any) -> Source:
    """The source of the lock server: `redislock_url`, else the broker if it is a Redis, else the result backend.

    Raises:
        LockConfigError: None of them is a Redis.
    """
    configured = conf.get("redislock_url")
    if configured is not None:
        return Source("redislock_url", configured)
    named: tuple[tuple[str, Any, Callable[[Any, str], Mapping[str, Any]]], ...] = (
        ("broker_url", conf.broker_write_url, _of_broker),
        ("result_backend", conf.result_backend, _of_result_backend),
    )
    for setting, given, options_of in named:
        url = ";".join(given) if isinstance(given, list | tuple) else given
        if is_redis(url):
            # Only the first of several brokers is taken: locks in two places would exclude nobody.
            url = url.split(";")[0] if kind_of(url) == "standalone" else url
            transport_options = conf.get(OPTIONS_SETTINGS[setting]) or {}
            return Source(setting, url, options_of(conf, url), str(transport_options.get("global_keyprefix") or ""))
    remedy = f"; {WITHOUT_REDIS}" if conf.get("task_always_eager") else ""
    raise LockConfigError(
        "neither the broker nor the result backend is a Redis, so there is no server for the locks: set "
        f'redislock_url, for instance "redis://localhost:6379/0"{remedy}'
    )


def _of_broker(conf: Any, url: str) -> Mapping[str, Any]:
    return {**_sentinels(conf.get("broker_transport_options"), url), **_of_tls(conf.get("broker_use_ssl"))}


def _of_result_backend(conf: Any, url: str) -> Mapping[str, Any]:
    names = ("username", "password", "host", "port") if kind_of(url) == "standalone" else ("username", "password")
    login = {name: conf.get(f"redis_{name}") for name in names}
    login["credential_provider"] = conf.get("redis_backend_credential_provider")
    return {
        **{name: value for name, value in login.items() if value is not None},
        **_sentinels(conf.get("result_backend_transport_options"), url),
        **_of_tls(conf.get("redis_backend_use_ssl")),
    }


def _sentinels(transport_options: Mapping[str, Any] | None, url: str) -> Mapping[str, Any]:
    if kind_of(url) != "sentinel":
        return {}
    return {name: value for name, value in (transport_options or {}).items() if name in _OF_SENTINELS}


def _of_tls(use_ssl: Any) -> Mapping[str, Any]:
    """The options of TLS; `use_ssl` is a dict of them. kombu takes no notice of anything else."""
    return {"ssl": True, **use_ssl} if isinstance(use_ssl, Mapping) and use_ssl else {}
