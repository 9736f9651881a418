"""Trial: a worker tries its lock server before the first task needs it, and logs what is wrong and what to do."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import redis
from redis import exceptions

from celery_redislock.app import client_of, settings_of
from celery_redislock.connection.cluster import ClusterStore
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.connection.connect import address, disconnect
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.options import resolve_settings
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import redis_key
from celery_redislock.protocol.scripts import Command
from celery_redislock.source import source_of

from . import server_advice
from .remedies import remedy_for

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: The lease of the key that the trial takes, in seconds. A worker that is killed meanwhile leaves it for so long.
LEASE = 10.0


class _Once(LockStore):
    """A store that sends each command only once and logs no outage: `try_lock_server` logs one line."""

    def _call(self, command: Command) -> tuple[Any, float, bool]:
        sent_at = time.monotonic()
        return self._send(command), sent_at, False


class _OnceInACluster(_Once, ClusterStore):
    """The same in a Cluster."""


def try_lock_server(app: Celery) -> None:
    """Try the lock server of `app`; log one line if tasks cannot use it.

    It raises nothing, so that the worker starts in any case. It leaves no connection and no thread, which the pool's
    children would inherit by their fork.
    """
    where, names = "of the app", {"url": "redislock_url", "options": "redislock_client_options"}
    try:
        settings = resolve_settings(settings_of(app))
        source, client = source_of(app.conf), client_of(app)
        where, names = address(client), {"url": source.setting, "options": source.options_setting}
        prefix = source.keyprefix + settings.prefix
        server_advice.introduce(app, prefix, where)
        store = _OnceInACluster(client) if isinstance(client, ClusterClient) else _Once(client)
        try:
            _try_out(store, redis_key(prefix, f"worker start:{tokens.mint_nonce()}"))
            infos = _infos(client)
            server_advice.warn_of_age(infos, where, names["url"])
            server_advice.warn_of_eviction(infos, where)
            if isinstance(client, redis.Redis):  # each node of a Cluster has its own clock and its own time-out
                server_advice.warn_of_server(client, where)
        finally:
            disconnect(client)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the server, the worker starts
        cause = error.__cause__ or error if isinstance(error, LockUnavailable) else error
        remedy = remedy_for(cause)
        logger.log(
            remedy.level,
            "the lock server %s cannot be used: %s; %s; until then lock_on_outage decides about runs",
            *(where, describe(cause).rstrip("."), remedy.what.format(**names)),
        )


def _try_out(store: LockStore, key: str) -> None:
    """Do what tasks do, with a key of this worker's own: renew it, take it, find it held, and release it."""
    mine, other = (tokens.mint(tokens.mint_nonce(), None, tokens.origin(None, None)) for _ in range(2))
    store.renew([(key, mine, LEASE)])  # first, while there is no key: if it fails, no key is left behind
    for one in (mine, other):
        store.acquire(key, one, LEASE)
    store.release(key, mine)


def _infos(client: redis.Redis | ClusterClient) -> list[dict[str, Any]]:
    """What the server, or each node of a Cluster, says of itself; nothing where its user may not run INFO."""
    try:
        return client.info("default") if isinstance(client, ClusterClient) else [client.info("default")]
    except exceptions.ResponseError:
        return []
