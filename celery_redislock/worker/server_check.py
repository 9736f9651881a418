"""Server check: a worker tries its lock server before a task needs it, and logs what is wrong and what to do."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from celery import Celery
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_redislock.app import client_of, settings_of, source_of
from celery_redislock.connection.cluster import NodeConnections
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.connection.connect import OPTIONS_SETTINGS, address, disconnect
from celery_redislock.connection.connections import Connections
from celery_redislock.errors import describe
from celery_redislock.options import resolve_settings
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, redis_key
from celery_redislock.protocol.scripts import Command, Reply

from . import advice

logger = logging.getLogger(__name__)

#: The lease of the trial's key, in seconds. If the worker is killed during the trial, the key stays for that long.
LEASE = 10.0


def try_lock_server(app: Celery) -> None:
    """Try the lock server of `app`; log one line if tasks cannot use it.

    It never raises, so the worker always starts. It leaves no connection open and no thread running, because the pool's
    children are forked later.
    """
    where, setting = "of the app", "redislock_url"
    try:
        settings = resolve_settings(settings_of(app))
        source, client = source_of(app.conf), client_of(app)
        where, setting, prefix = address(client), source.setting, source.keyprefix + settings.prefix
        advice.introduce(app, prefix, where)
        connections = NodeConnections(client, 1) if isinstance(client, ClusterClient) else Connections(client)
        try:
            _try_out(connections.ask, Demand(redis_key(prefix, f"worker start:{tokens.mint_nonce()}")))
            infos = _infos(client.primaries() if isinstance(client, ClusterClient) else [client])
            advice.warn_of_age(infos, where, setting)
            advice.warn_of_eviction(infos, where)
            if isinstance(client, redis.Redis):  # each node of a Cluster has its own clock and timeout
                advice.warn_of_server(client, where)
        finally:
            disconnect(client)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the server, the worker starts
        level, remedy = remedy_for(error)
        logger.log(
            level,
            "the lock server %s cannot be used: %s; %s; until then lock_on_outage decides about runs",
            *(where, describe(error), remedy.format(url=setting, options=OPTIONS_SETTINGS[setting])),
        )


def _try_out(ask: Callable[[Command], Reply], demand: Demand) -> None:
    """Do what tasks do, with a key used only for this trial: renew it, acquire it, find it held, and release it."""
    mine, other = (tokens.mint(tokens.mint_nonce(), None, tokens.origin(None, None)) for _ in range(2))
    ask(commands.renew([(demand.key, mine, LEASE)]))  # before the key exists: if this fails, no key is left behind
    ask(commands.acquire(demand, mine, LEASE))
    ask(commands.acquire(demand, other, LEASE))
    ask(commands.release(demand, mine.owner))


def _infos(nodes: Sequence[redis.Redis]) -> list[dict[str, Any]]:
    """The INFO of each server; empty if the user may not run INFO."""
    try:
        return [node.info("default") for node in nodes]
    except exceptions.ResponseError:
        return []


#: What a person can do about errors that only a person can fix. ``{url}`` is the setting that names the server,
#: ``{options}`` the setting with its options.
_PERMANENT: Mapping[tuple[type[BaseException], ...], str] = {
    (MasterNotFoundError,): "no Sentinel named a primary: check master_name and the Sentinels' own sentinel_kwargs in "
    "{options}, the hosts in {url}, and whether the primary is up",
    (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError): "check the user and the "
    "password in {url} or redislock_client_options",
    (exceptions.NoPermissionError,): "its user lacks rights: docs/security.md lists those that it needs, to keys that "
    "begin with redislock_prefix",
    (exceptions.ReadOnlyError, exceptions.MasterDownError): "it is a replica: name its primary in {url}",
    (exceptions.MovedError,): "it is a node of a Cluster: name it by redis+cluster:// in redislock_url",
    (exceptions.InvalidResponse,): "what answers there is no Redis: check the host and the port in {url}",
    (ssl.SSLError,): "check whether it speaks TLS (rediss://), and the ssl_ options of {url}",
}
#: The same for errors that may go away by themselves. Many of the others are ConnectionErrors too.
_PASSING: Mapping[tuple[type[BaseException], ...], str] = {
    (exceptions.ClusterDownError,): "the Cluster is down: CLUSTER INFO tells which hash slots nobody serves",
    (socket.gaierror,): "this host name is not known (yet): check {url}, and the network",
    (ConnectionRefusedError, FileNotFoundError): "nothing listens there (yet): check {url}, and whether the server "
    "runs",
    (exceptions.TimeoutError, TimeoutError): "it did not answer in time: check {url} (rediss:// only if it speaks "
    "TLS), the server and the firewall",
    (exceptions.OutOfMemoryError,): "it is full: give it more memory",
    (exceptions.ConnectionError,): "check {url} (rediss:// if it speaks TLS), and the server",
}
_OTHER = (
    "check {url}: its scheme says what answers there (one server, Sentinels or a Cluster), and its database must exist"
)


def remedy_for(error: BaseException) -> tuple[int, str]:
    """The level of the log line about an error, and the remedy for it, or for the error it was raised from."""
    chain = [*_chain(error)]  # redis-py wraps socket errors
    for level, remedies in ((logging.ERROR, _PERMANENT), (logging.WARNING, _PASSING)):
        for errors, remedy in remedies.items():
            if any(isinstance(one, errors) for one in chain):
                return level, remedy
    return logging.ERROR, _OTHER


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
