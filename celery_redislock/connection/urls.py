"""URLs: the address of a lock server, in each form that Celery, kombu and redis-py know. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from redis.connection import parse_url

from celery_redislock.errors import LockConfigError

Kind = Literal["standalone", "sentinel", "cluster"]


class _Form(NamedTuple):
    """What a scheme stands for."""

    kind: Kind
    scheme: str
    """The scheme of redis-py with which each host is reached."""
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


@dataclass(frozen=True, slots=True)
class Address:
    """Where a lock server is.

    Attributes:
        setting: Where the URL was set, for error messages.
        kind: What answers there.
        nodes: The hosts and ports of the Sentinels, or of some nodes of the Cluster; none for a single server.
        options: What redis-py reads from the URL, such as ``host``, ``path``, ``db`` and ``password``.
    """

    setting: str
    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    options: Mapping[str, Any] = field(repr=False)


def is_redis(url: object) -> bool:
    """Whether `url` has a scheme that a lock server can have."""
    return isinstance(url, str) and scheme_of(url) in _FORMS


def scheme_of(url: str) -> str:
    """What stands before ``://``; nothing where that is missing."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def kind_of(url: str) -> Kind:
    """What answers at a URL of which `is_redis` is true."""
    return _FORMS[scheme_of(url)].kind


def read(url: str, setting: str = "redislock_url") -> Address:
    """The address that `url` names. Several Sentinels or nodes stand in several URLs with ``;`` between them, as kombu
    has it, or are several hosts with ``,`` between them. Credentials, database and options are those of the first URL.

    Raises:
        LockConfigError: The scheme is none that a lock server can have, or a Cluster is to have a database.
        ValueError: Something else in it cannot be read.
    """
    scheme = scheme_of(url)
    if scheme not in _FORMS:
        shown = f"the scheme {scheme!r}" if scheme.replace("+", "").isalnum() else "no scheme"
        raise LockConfigError(f"{setting} has {shown} and cannot be used; allowed: {_ALLOWED} URLs")
    form = _FORMS[scheme]
    if form.kind == "standalone":
        return Address(setting, form.kind, (), _parsed(_as_redis_py_has_it(url)))
    parsed = [_parsed(one) for one in _one_host_each(url, form)]
    nodes = tuple((one.pop("host", "localhost"), one.pop("port", form.port)) for one in parsed)
    if form.kind == "cluster" and parsed[0].pop("db", 0):
        raise LockConfigError(f"{setting} names a database, and a Cluster has only database 0: leave it out")
    return Address(setting, form.kind, nodes, parsed[0])


def _parsed(url: str) -> dict[str, Any]:
    return dict(parse_url(url))  # type: ignore[no-untyped-call]


def _as_redis_py_has_it(url: str) -> str:
    """kombu's ``redis+socket://`` is redis-py's ``unix://``."""
    scheme, _, rest = url.partition("://")
    if scheme != "redis+socket":
        return f"{_FORMS[scheme].scheme}://{rest}"
    parts = urlsplit(url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
    credentials, _, _ = parts.netloc.rpartition("@")
    return f"unix://{credentials + '@' if credentials else ''}{unquote(parts.path)}?db={database}"


def _one_host_each(url: str, form: _Form) -> Iterator[str]:
    for one in url.split(";"):
        if scheme_of(one) != scheme_of(url):  # a broker of another kind, or the last ; of a list
            continue
        netloc, rest = re.fullmatch(r"([^/?#]*)(.*)", one.partition("://")[2], re.DOTALL).groups()  # type: ignore[union-attr]
        credentials, at, hosts = netloc.rpartition("@")
        for host in hosts.split(","):
            yield f"{form.scheme}://{credentials}{at}{host}{rest}"
