"""Connecting: parses a lock server's URL, in every form that Celery, kombu and redis-py accept, and makes a client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from kombu.utils.imports import symbol_by_name
from redis.connection import parse_url
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from celery_redislock.errors import LockConfigError, describe

from .clients import DEFAULTS, FIXED, derive, time_outs
from .cluster_client import ClusterClient, Node, at
from .redis_port import is_behind_sentinels, options_of, sentinels_of, try_to_connect

Kind = Literal["standalone", "sentinel", "cluster"]


class _Form(NamedTuple):
    """What a URL scheme stands for."""

    kind: Kind
    scheme: str
    """The redis-py scheme used to reach each host."""
    port: int


_FORMS: Mapping[str, _Form] = {
    "redis": _Form("standalone", "redis", 6379),
    "rediss": _Form("standalone", "rediss", 6379),
    "valkey": _Form("standalone", "redis", 6379),
    "valkeys": _Form("standalone", "rediss", 6379),
    "unix": _Form("standalone", "unix", 0),
    "redis+socket": _Form("standalone", "unix", 0),
    "sentinel": _Form("sentinel", "redis", 26379),
    "redis+cluster": _Form("cluster", "redis", 6379),
    "rediss+cluster": _Form("cluster", "rediss", 6379),
}
_ALLOWED = ", ".join(f"{scheme}://" for scheme in _FORMS)
#: For each setting that can hold a URL, the setting for the client's other options, such as a Sentinel primary's name.
OPTIONS_SETTINGS = {
    "redislock_url": "redislock_client_options",
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}
_NOT_FOR_USERS = frozenset({*FIXED, "retry", "single_connection_client", "connection_pool", "connection_pool_class"})


def is_redis(url: object) -> bool:
    """Whether `url` has a scheme that works for a lock server."""
    return isinstance(url, str) and scheme_of(url) in _FORMS


def scheme_of(url: str) -> str:
    """Return the part before ``://``; empty if there is none."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def kind_of(url: str) -> Kind:
    """Return the kind of server that `url` names; `is_redis` must be true for it."""
    return _FORMS[scheme_of(url)].kind


def parse_address(url: str, setting: str = "redislock_url") -> tuple[Kind, tuple[Node, ...], dict[str, Any]]:
    """Parse `url`, which comes from this `setting`.

    Several Sentinels or nodes are given either as URLs separated by ``;``, as in kombu, or as hosts separated by
    ``,``. Credentials, database and options come from the first URL.

    Returns:
        The kind of server; the hosts and ports of the Sentinels, or of some of the Cluster's nodes, empty for a single
        server; and what redis-py reads from the URL, such as ``host``, ``path``, ``db`` and ``password``.

    Raises:
        LockConfigError: The scheme does not work for a lock server, or a Cluster's URL names a database.
        ValueError: Some other part of the URL cannot be parsed.
    """
    scheme = scheme_of(url)
    if scheme not in _FORMS:
        shown = f"the scheme {scheme!r}" if scheme.replace("+", "").isalnum() else "no scheme"
        raise LockConfigError(f"{setting} has {shown} and cannot be used; allowed: {_ALLOWED} URLs")
    form = _FORMS[scheme]
    if form.kind == "standalone":
        return form.kind, (), _parsed(_as_redis_py_has_it(url))
    parsed = [_parsed(one) for one in _one_host_each(url, form)]
    nodes = tuple((one.pop("host", "localhost"), one.pop("port", form.port)) for one in parsed)
    if form.kind == "cluster" and parsed[0].pop("db", 0):
        raise LockConfigError(f"{setting} names a database, but a Cluster has only database 0: leave it out")
    return form.kind, nodes, parsed[0]


def _parsed(url: str) -> dict[str, Any]:
    return dict(parse_url(url))  # type: ignore[no-untyped-call]


def _as_redis_py_has_it(url: str) -> str:
    """Rewrite `url` for redis-py: kombu's ``redis+socket://`` is redis-py's ``unix://``."""
    scheme, _, rest = url.partition("://")
    if scheme != "redis+socket":
        return f"{_FORMS[scheme].scheme}://{rest}"
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    options["db"] = options.pop("virtual_host", options.get("db", "0")).strip("/")
    credentials, _, _ = parts.netloc.rpartition("@")
    return f"unix://{credentials + '@' if credentials else ''}{unquote(parts.path)}?{urlencode(options)}"


def _one_host_each(url: str, form: _Form) -> Iterator[str]:
    for one in url.split(";"):
        if scheme_of(one) != scheme_of(url):  # a failover broker of another kind, or nothing after a trailing ";"
            continue
        netloc, rest = re.fullmatch(r"([^/?#]*)(.*)", one.partition("://")[2], re.DOTALL).groups()  # type: ignore[union-attr]
        credentials, at, hosts = netloc.rpartition("@")
        for host in hosts.split(","):
            yield f"{form.scheme}://{credentials}{at}{host}{rest}"


def connect(url: str, options: Mapping[str, Any], setting: str = "redislock_url") -> Any:
    """Return a client for `url`. It connects when it sends its first command.

    For a Cluster this is a `ClusterClient`, otherwise redis-py's own client. If no connection is free, its pool makes
    the caller wait; redis-py's default pool raises an error.

    Args:
        url: In one of the forms that `parse_address` accepts.
        options: `redislock_client_options`, plus any options that belong to the URL.
        setting: The setting that has the URL, for error messages.

    Raises:
        LockConfigError: redis-py cannot make a client from `url` and `options`, or a time-out is missing.
    """
    if ours := sorted(_NOT_FOR_USERS & options.keys()):
        raise LockConfigError(f"redislock_client_options: {', '.join(ours)} cannot be set: celery-redislock sets them")
    try:
        kind, nodes, of_url = parse_address(url, setting)
        return _client(kind, nodes, _options(of_url, options), setting)
    except ValueError:  # the error's message may contain a part of the URL
        raise LockConfigError(
            f"{setting} or redislock_client_options cannot be parsed (not shown: they may hold a password, whose "
            "special characters must be percent-encoded: %2F for a slash)"
        ) from None
    except (TypeError, redis.RedisError) as error:
        problem = f"could not make a Redis client from {setting} and redislock_client_options: {describe(error)}"
        if unknown := re.search(r"unexpected keyword argument '(.+?)'", str(error)):
            is_tls = unknown[1].startswith("ssl_") and setting != "redislock_url"  # it may be the broker's own
            given = "redislock_client_options" + (f" or the TLS options of {setting}" if is_tls else "")
            problem = (
                f"{setting if re.search(f'[?&]{unknown[1]}=', url) else given}: redis-py has no option {unknown[1]!r} "
                f"for a {scheme_of(url)}:// URL; correct its name, or leave it out"
            )
        raise LockConfigError(problem) from None


def _options(of_url: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a connection. As in redis-py's `from_url`, those in the URL win over the user's.

    The pool must be made with all of them: redis-py 8 chooses between RESP2 and RESP3 at that point.
    """
    both = {"connection_class": redis.Connection, **DEFAULTS, **options, **of_url}
    both["connection_class"] = options.get("connection_class", both["connection_class"])
    if both.pop("ssl", False) and both["connection_class"] is redis.Connection:
        both["connection_class"] = redis.SSLConnection
    time_outs(both)  # raises an error if one is missing
    if isinstance(checks := both.get("ssl_cert_reqs"), str):
        both["ssl_cert_reqs"] = checks.removeprefix("CERT_").lower()  # Celery also takes CERT_REQUIRED, for instance
    if (provider := both.get("credential_provider")) is not None:
        both |= {"credential_provider": _provider(provider), "username": None, "password": None}
    return {**both, **FIXED}


def _provider(given: Any) -> Any:
    """Return a credential provider, which may be given by name, as Celery allows."""
    if not isinstance(given, str):
        return given
    try:
        return symbol_by_name(given)()
    except (ImportError, AttributeError, ValueError) as error:
        raise LockConfigError(f"could not load the credential provider of the lock server: {describe(error)}") from None


def _client(kind: Kind, nodes: Sequence[Node], options: dict[str, Any], setting: str) -> redis.Redis | ClusterClient:
    if kind == "cluster":
        cluster = ClusterClient(nodes, options)
        try_to_connect(cluster.connect(cluster.nodes[0]).connection_pool)
        return cluster
    if kind == "sentinel":
        client = _behind_sentinels(nodes, options, setting)
    else:
        client = redis.Redis(connection_pool=redis.ConnectionPool(**options))
    try_to_connect(client.connection_pool)
    return derive(client, options["max_connections"])


def _behind_sentinels(nodes: Sequence[Node], options: dict[str, Any], setting: str) -> redis.Redis:
    name = options.pop("master_name", None)
    if not name:
        raise LockConfigError(
            f'{setting} names Sentinels, but not their primary: set master_name, for instance "mymaster", in '
            + OPTIONS_SETTINGS[setting]
        )
    is_tls = issubclass(options.pop("connection_class"), redis.SSLConnection)
    of_sentinels = {each: options[each] for each in ("socket_timeout", "socket_connect_timeout")}
    sentinels = Sentinel(
        nodes, options.pop("min_other_sentinels", 0), {**of_sentinels, **options.pop("sentinel_kwargs", {})}
    )  # type: ignore[no-untyped-call]
    kind = SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
    return sentinels.master_for(name, connection_class=kind, **options)  # type: ignore[no-any-return,no-untyped-call]


def address(client: redis.Redis | ClusterClient) -> str:
    """Return the server's address as a URL without the password, for messages. `client` comes from `connect`.

    The result is built from the options that redis-py has parsed, not from the URL: if the URL was mistyped, any part
    of it may be the password.
    """
    options = client.options if isinstance(client, ClusterClient) else options_of(client.connection_pool)
    user, db = f"{options['username']}@" if options.get("username") else "", options.get("db") or 0
    if isinstance(client, ClusterClient):
        is_tls = issubclass(client.options["connection_class"], redis.SSLConnection)
        return f"{'rediss' if is_tls else 'redis'}+cluster://{user}{client.shown}"
    pool: Any = client.connection_pool
    if is_behind_sentinels(client):
        asked = [options_of(one.connection_pool) for one in sentinels_of(client)]
        hosts = ",".join(at(one["host"], one["port"]) for one in asked)
        return f"sentinel://{user}{hosts}/{db}?master_name={pool.service_name}"
    if options.get("path"):
        return f"unix://{user}{options['path']}?db={db}"
    scheme = "rediss" if issubclass(pool.connection_class, redis.SSLConnection) else "redis"
    return f"{scheme}://{user}{at(options.get('host') or 'localhost', options.get('port') or 6379)}/{db}"


def command_time(client: redis.Redis | ClusterClient) -> float:
    """Return how long one command of `client`, including connecting, can take before it fails, in seconds.

    A Sentinel client may ask every Sentinel before it connects. A Cluster client whose node does not answer then looks
    up the hash slots on one other node.
    """
    if isinstance(client, ClusterClient):
        return 2 * time_outs(client.options)
    return time_outs(options_of(client.connection_pool)) + sum(map(command_time, sentinels_of(client)))


def servers_behind(client: redis.Redis | ClusterClient, key: bytes = b"") -> list[redis.Redis]:
    """Return clients of the servers that together have all keys: a Cluster's primaries, or the one server.

    The one that has `key` comes first.

    Raises:
        RedisError: No node of the Cluster answers.
    """
    return client.primaries(key) if isinstance(client, ClusterClient) else [client]


def disconnect(client: redis.Redis | ClusterClient) -> None:
    """Close the connections of a client from `connect`. Those to Sentinels are closed already."""
    (client if isinstance(client, ClusterClient) else client.connection_pool).close()
