"""Server check: a worker tries its lock server before a task needs it, and logs what is wrong and what to do.

It also warns about properties of the lock server and of the broker that affect locked tasks.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from celery import Celery, Task
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_redislock.app import client_of, settings_of, source_of
from celery_redislock.connection.cluster import NodeConnections
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.connection.connect import OPTIONS_SETTINGS, address, disconnect, servers_behind
from celery_redislock.connection.connections import Connections
from celery_redislock.errors import describe
from celery_redislock.message.republish import DEFAULT_VISIBILITY_TIMEOUT, Broker
from celery_redislock.options import resolve_settings
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import ALL_ROOMS, Demand, channel_of, redis_key
from celery_redislock.protocol.scripts import Command, Reply
from celery_redislock.task.plan import LockPlan

logger = logging.getLogger(__name__)

#: The lease of the trial's key, in seconds. If the trial fails halfway, the key stays for that long.
LEASE = 10.0
#: Warn if the server's clock is off by more than this many seconds. Synchronized clocks differ by milliseconds.
FAR_OFF = 5.0
#: The oldest supported version of Redis. Valkey reports the version of Redis that it is compatible with: 7.2.
OLDEST = 7, 0
#: Kombu's transports without acks: they delete a message from its queue when they deliver it.
FORGETFUL = frozenset(
    "memory filesystem sqlalchemy sqla mongodb zookeeper consul etcd pyro azurestoragequeues".split()  # noqa: SIM905
)


def try_lock_server(app: Celery) -> bool:
    """Try the lock server of `app`; log one line if tasks cannot use it. Return whether they can.

    It never raises, so the worker always starts. It leaves no connection open and no thread running, because the pool's
    children are forked later.
    """
    where, setting = "of the app", "redislock_url"
    try:
        settings = resolve_settings(settings_of(app))
        source, client = source_of(app.conf), client_of(app)
        where, setting, prefix = address(client), source.setting, source.keyprefix + settings.prefix
        introduce(app, prefix, where)
        connections = NodeConnections(client, 1) if isinstance(client, ClusterClient) else Connections(client)
        try:
            _try_out(connections.ask, Demand(redis_key(prefix, f"worker start:{tokens.mint_nonce()}")))
            channel = channel_of(ALL_ROOMS, source.keyprefix)
            if _if_allowed(lambda: servers_behind(client)[0].publish(channel, ""), None) is None:
                logger.warning("no right to publish to %s: waiting messages may start only when a lease ends", channel)
            infos = _if_allowed(lambda: [node.info("default") for node in servers_behind(client)], [])
            warn_of_age(infos, where, setting)
            warn_of_eviction(infos, where)
            for node in servers_behind(client):  # each node of a Cluster has its own clock and timeout
                warn_of_server(node, address(node))
        finally:
            disconnect(client)
        return True
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the server, the worker starts
        level, remedy = remedy_for(error)
        text = "the lock server %s cannot be used: %s; %s; until then, runs follow lock_on_outage"
        logger.log(level, text, where, describe(error), remedy.format(url=setting, options=OPTIONS_SETTINGS[setting]))
        return False


def _try_out(ask: Callable[[Command], Reply], demand: Demand) -> None:
    """Do what tasks do, with a key used only for this trial: acquire it, renew it, find it held, and release it."""
    mine, other = (tokens.mint(tokens.mint_nonce(), None, tokens.origin(None, None)) for _ in range(2))
    ask(commands.acquire(demand, mine, LEASE))
    ask(commands.renew([(demand.key, mine, LEASE)]))
    ask(commands.acquire(demand, other, LEASE))
    ask(commands.release(demand, mine.owner))


def _if_allowed(ask: Callable[[], Any], otherwise: Any) -> Any:
    """What `ask` returns; `otherwise` if the user may not run its command, as on many hosted servers."""
    try:
        return ask()
    except exceptions.ResponseError:
        return otherwise


def introduce(app: Celery, prefix: str, where: str) -> None:
    """Log one line with the lock server, key prefix and leases of the tasks of `app`.

    Args:
        app: The worker's app.
        prefix: The prefix of the app's keys.
        where: The address of the lock server, without a password.
    """
    leases = sorted(lease for _, lease in locked_tasks(app))
    tasks = "task takes locks on" if len(leases) == 1 else "tasks take locks on"
    span = f"a lease of {leases[0]:g} s" if leases[0] == leases[-1] else f"leases of {leases[0]:g} to {leases[-1]:g} s"
    logger.info("%d %s %s, with the prefix %r and %s", len(leases), tasks, where, prefix, span)


def warn_of_server(client: redis.Redis, where: str) -> None:
    """Warn if the lock server's clock is far off, or if the server closes idle connections.

    Args:
        client: A client of the lock server.
        where: The address of the server, without a password.
    """
    ahead = _seconds_ahead(client)
    if abs(ahead) > FAR_OFF:
        text = (
            "the clock of the lock server %s is %.0f s %s this host's: waiting messages may lose their order; use NTP"
        )
        logger.warning(text, where, abs(ahead), "ahead of" if ahead > 0 else "behind")
    seconds = int(_if_allowed(lambda: client.config_get("timeout"), {}).get("timeout") or 0)
    if seconds:
        text = "the lock server %s closes connections that are idle for %d s: commands must reconnect; set timeout 0"
        logger.warning(text, where, seconds)


def warn_of_age(infos: Sequence[Mapping[str, Any]], where: str, setting: str) -> None:
    """Warn if a lock server is older than the versions the package is tested with.

    Args:
        infos: The INFO of the server, or of each node of a Cluster.
        where: The address of the server, without a password.
        setting: The setting that names the server.
    """
    remedy = "upgrade it to at least Redis 7.0 or Valkey 8, or name another server in %s"
    text = f"the lock server %s is Redis %s, older than the versions that the locks are tested with; {remedy}"
    for version in sorted({str(one.get("redis_version", "")) for one in infos}):
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if found and found < OLDEST:
            logger.warning(text, where, version, setting)


def warn_of_eviction(infos: Sequence[Mapping[str, Any]], where: str) -> None:
    """Warn if a lock server evicts keys when it is full. `warn_of_age` explains the arguments."""
    policies = {one.get("maxmemory_policy", "noeviction") for one in infos if one.get("maxmemory")}
    for policy in policies - {"noeviction"}:
        text = "the lock server %s evicts keys (maxmemory-policy %s) when it is full, locks included; set noeviction"
        logger.warning(text, where, policy)


def locked_tasks(app: Celery) -> Sequence[tuple[Task[..., Any], float]]:
    """The tasks of `app` that have a lock, with their leases in seconds."""
    plans = [(task, getattr(task, "lock_plan", None)) for _, task in sorted(app.tasks.items())]
    return [(task, plan.options.lease) for task, plan in plans if isinstance(plan, LockPlan)]


def _seconds_ahead(client: redis.Redis) -> float:
    """The least that the server's clock can be ahead of this host's, in seconds (negative: behind); 0.0 if unknown."""
    asked_at = time.time()
    seconds, microseconds = _if_allowed(client.time, (asked_at, 0))
    answered_at, now = time.time(), seconds + microseconds / 1e6
    return float(now - min(max(now, asked_at), answered_at))


#: How a server says, with no word in front, that its user may not run a command that a script runs.
_IN_SCRIPTS = "ACL failure in script", "The user executing the script can't"
#: The remedies for errors that only a person can fix. ``{url}`` is the setting that names the server,
#: ``{options}`` the setting with its options.
_PERMANENT: Mapping[tuple[type[BaseException] | str, ...], str] = {
    (MasterNotFoundError,): "no Sentinel names a primary: check master_name and the Sentinels' own sentinel_kwargs in "
    "{options}, the hosts in {url}, and whether the primary is up",
    (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError): "check the user and the "
    "password in {url} or redislock_client_options",
    (exceptions.NoPermissionError, *_IN_SCRIPTS): "its user lacks permissions: docs/security.md lists those that it "
    "needs, for keys that begin with redislock_prefix, and +scan for the command line",
    (exceptions.ReadOnlyError, exceptions.MasterDownError): "it is a replica: name its primary in {url}",
    (exceptions.MovedError,): "it is a node of a Cluster: use redis+cluster:// in redislock_url",
    (exceptions.InvalidResponse,): "the server there is not Redis: check the host and the port in {url}",
    (ssl.SSLError,): "check whether it speaks TLS (rediss://), and the ssl_ options of {url}",
}
#: The remedies for errors that may pass by themselves. It is searched last: many of the errors above are
#: ConnectionErrors too. Errors without a class in redis-py are known by their first word.
_PASSING: Mapping[tuple[type[BaseException] | str, ...], str] = {
    ("the credential provider failed",): "check the provider, and the service that it asks",
    (exceptions.ClusterDownError,): "the Cluster is down: CLUSTER INFO shows how many hash slots have no node",
    (socket.gaierror,): "the host name cannot be resolved: check {url} and the network",
    (ConnectionRefusedError, FileNotFoundError): "nothing listens there: check {url}, and whether the server is "
    "running",
    (exceptions.TimeoutError, TimeoutError): "it did not answer in time: check {url} (rediss:// only if it speaks "
    "TLS), the server and the firewall",
    (exceptions.OutOfMemoryError,): "it is full: give it more memory",
    (exceptions.BusyLoadingError,): "it is loading its data: wait",
    ("max number of clients",): "its maxclients is reached: raise it, or see in CLIENT LIST who is connected",
    (BrokenPipeError,): "it has closed the connection: its maxclients may be reached: see who is in CLIENT LIST",
    ("BUSY",): "a script or a function has run for long there: wait, or end it with SCRIPT KILL or FUNCTION KILL",
    ("MISCONF",): "it cannot save to disk: check its log, the disk and the permissions there",
    ("NOREPLICAS",): "too few of its replicas are connected: start them, or lower its min-replicas-to-write",
    ("WRONGTYPE",): "another program uses this key, or one that belongs to it: look with redis-cli TYPE, and delete it",
    (exceptions.ConnectionError,): "check {url} (rediss:// if it speaks TLS), and the server",
}
_OTHER = (
    "check {url}: its scheme must match the server (one server, Sentinels, a Cluster), its database must exist, and "
    "the server must not rename commands"
)


def remedy_for(error: BaseException) -> tuple[int, str]:
    """The level of the log line about an error, and the remedy for it, or for the error it was raised from."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:  # redis-py wraps socket errors
        chain.append(cause)
    for level, remedies in ((logging.ERROR, _PERMANENT), (logging.WARNING, _PASSING)):
        for kinds, remedy in remedies.items():
            # The text of a class, as "<class ...>", begins no message.
            if any(kind in type(one).__mro__ or str(one).startswith(str(kind)) for one in chain for kind in kinds):
                return level, remedy
    return logging.ERROR, _OTHER


def warn_of_broker(app: Celery) -> None:
    """Warn about properties of the broker of `app` that affect locked tasks. Opens no connection."""
    with app.connection_for_read() as connection:
        transport, is_redis = str(connection.transport_cls), connection.transport.driver_type == "redis"
        options = connection.transport_options or {}
    if is_redis:
        _warn_of_early_copies(app)
    for line in broker_warnings(transport, options):
        logger.warning(line)


def _warn_of_early_copies(app: Celery) -> None:
    """Warn if a Redis broker redelivers late-acked messages before the lock of a dead holder expires."""
    timeout = Broker(app).visibility_timeout
    late = [(task.name, lease) for task, lease in locked_tasks(app) if task.acks_late and lease > timeout]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        logger.warning(
            "the broker delivers unacked messages again after %g s (visibility_timeout), less than the lease of tasks "
            "with acks_late: %s; copies arrive while they run: set visibility_timeout in broker_transport_options to "
            "more than the longest run takes",
            *(timeout, ", ".join(f"{name} ({lease:g} s)" for name, lease in late[:3]) + more),
        )


def broker_warnings(transport: str, options: Mapping[str, Any]) -> Iterator[str]:
    """The warnings about a broker's transport and its options, one per line."""
    if transport in FORGETFUL:
        yield (
            f"the broker {transport} deletes a message when it delivers it: running and waiting messages are lost if "
            "their worker is killed, even with acks_late; if that must not happen, use Redis or RabbitMQ"
        )
    if transport.lower() == "sqs" and not options.get("visibility_timeout"):
        yield (
            "the visibility timeout of the SQS queues is not known: if it is shorter than "
            f"{DEFAULT_VISIBILITY_TIMEOUT:g} s, a message that waits in line is delivered twice; set "
            "visibility_timeout in broker_transport_options to the shortest of any queue"
        )
