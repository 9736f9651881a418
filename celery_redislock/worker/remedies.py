"""Remedies: what a person can do about an error of the lock server's. Pure."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

from redis import exceptions
from redis.sentinel import MasterNotFoundError


class Remedy(NamedTuple):
    """What a person can do about some errors."""

    errors: tuple[type[BaseException], ...]
    """The exceptions for which it helps."""
    level: int
    """The level of the log line: ERROR where nothing but a person can mend it, WARNING where it may pass by itself."""
    what: str
    """``{url}`` stands for the setting that names the server, ``{options}`` for that of its options."""


#: The first that fits counts: many of redis-py's errors are ConnectionErrors too.
_REMEDIES = (
    Remedy(
        (MasterNotFoundError,),
        logging.ERROR,
        "no Sentinel named a primary: check master_name and the Sentinels' own sentinel_kwargs in {options}, the hosts "
        "in {url}, and whether the primary is up",
    ),
    Remedy(
        (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError),
        logging.ERROR,
        "check the user and the password in {url} or redislock_client_options",
    ),
    Remedy(
        (exceptions.NoPermissionError,),
        logging.ERROR,
        "its user lacks rights: docs/security.md lists those that it needs, to keys that begin with redislock_prefix",
    ),
    Remedy(
        (exceptions.ReadOnlyError, exceptions.MasterDownError),
        logging.ERROR,
        "it is a replica: name its primary in {url}",
    ),
    Remedy(
        (exceptions.ClusterDownError,),
        logging.WARNING,
        "the Cluster is down: CLUSTER INFO tells which slots nobody serves",
    ),
    Remedy(
        (exceptions.MovedError, exceptions.ClusterError),
        logging.ERROR,
        "it is a node of a Cluster: name it by redis+cluster:// in redislock_url",
    ),
    Remedy(
        (exceptions.InvalidResponse,),
        logging.ERROR,
        "what answers there is no Redis: check the host and the port in {url}",
    ),
    Remedy((ssl.SSLError,), logging.ERROR, "check whether it speaks TLS (rediss://), and the ssl_ options of {url}"),
    Remedy((socket.gaierror,), logging.WARNING, "this host name is not known (yet): check {url}, and the network"),
    Remedy(
        (ConnectionRefusedError, FileNotFoundError),
        logging.WARNING,
        "nothing listens there (yet): check {url}, and whether the server runs",
    ),
    Remedy(
        (exceptions.TimeoutError, TimeoutError),
        logging.WARNING,
        "it did not answer in time: check {url} (rediss:// only if it speaks TLS), the server and the firewall",
    ),
    Remedy(
        (exceptions.RedisClusterException,),
        logging.ERROR,
        "check that {url} names nodes of a Cluster, and with CLUSTER INFO that all its slots are served",
    ),
    Remedy((exceptions.OutOfMemoryError,), logging.WARNING, "it is full: give it more memory"),
    Remedy(
        (exceptions.ConnectionError,),
        logging.WARNING,
        "check {url} (rediss:// if it speaks TLS), and the server",
    ),
)
_OTHER = Remedy(
    (),
    logging.ERROR,
    "check {url}: its scheme says what answers there (one server, Sentinels or a Cluster), and its database must exist",
)


def remedy_for(error: BaseException) -> Remedy:
    """The remedy for an error, or for one that it was raised from: redis-py wraps the errors of the socket."""
    chain = [*_chain(error)]
    return next((one for one in _REMEDIES if any(isinstance(each, one.errors) for each in chain)), _OTHER)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
