"""A `Lock` works over any client that its user has."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery, _state, current_app
from redis.backoff import ConstantBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_redislock import Lock, LockConfigError, LockedTask, locked
from celery_redislock.connection.clients import derive
from celery_redislock.connection.connect import command_time
from celery_redislock.lock.handle import entry_of_context
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.scripts import ACQUIRE, INSPECT, LEAVE, RELEASE, RENEW, STAND
from tests.lab.renewals import renew
from tests.lab.servers import Valkey, free_port, wait_until
from tests.lab.topologies import cluster, sentinel
from tests.lab.workers import ROOT

NAME = "stock"
PAGE = (ROOT / "docs" / "lock.md").read_text()


@pytest.fixture(scope="module")
def cluster_port(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as port:
        yield port


@pytest.fixture(scope="module")
def sentinel_port(tmp_path_factory):
    with sentinel(tmp_path_factory.mktemp("sentinel"), "primary") as port:
        yield port


@pytest.fixture(scope="module")
def tcp_port(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("tcp"), free_port()).serve() as server:
        yield server.port


KINDS = [
    "plain",
    "decoding",
    "RESP3",
    "retrying",
    "without time-outs",
    "single connection",
    "small pool",
    "Sentinel",
    "Cluster",
    "decoding Cluster",
]


@pytest.fixture(params=KINDS)
def client(request, locks, tmp_path):
    def on_socket(**options):
        return redis.Redis(unix_socket_path=str(locks.socket), **options)

    match request.param:
        case "plain":
            client = on_socket()
        case "decoding":
            client = on_socket(decode_responses=True, encoding="latin-1")
        case "RESP3":
            # redis-py 7 sends no command over a unix socket with RESP3: it looks for the host of the socket.
            client = redis.Redis(port=request.getfixturevalue("tcp_port"), protocol=3)
        case "retrying":
            client = on_socket(retry=Retry(ConstantBackoff(0.1), 5))
        case "without time-outs":
            client = on_socket(socket_timeout=None, socket_connect_timeout=None)
        case "single connection":
            client = on_socket(single_connection_client=True)
        case "small pool":
            pool = redis.BlockingConnectionPool.from_url(locks.url(), max_connections=1, timeout=1)
            client = redis.Redis(connection_pool=pool)
        case "Sentinel":
            port = request.getfixturevalue("sentinel_port")
            client = Sentinel([("127.0.0.1", port)]).master_for("primary", decode_responses=True)
        case "Cluster" | "decoding Cluster":
            port = request.getfixturevalue("cluster_port")
            client = RedisCluster(host="127.0.0.1", port=port, decode_responses=request.param.startswith("decoding"))
    yield client
    client.delete(NAME)
    client.close()


def test_it_is_taken_renewed_waited_for_and_given_back(client):
    first = client.lock(NAME, lock_class=Lock, timeout=10)
    second = Lock(client, NAME, timeout=10, renew=True, fence=True, blocking_timeout=10)
    assert first.acquire()
    assert (first.owned(), second.owned(), second.locked()) == (True, False, True)
    assert first.extend(5)
    assert not second.acquire(blocking=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.acquire)
        wait_until(lambda: client.exists(keys_of(NAME).line), "it waits")
        first.release()
        assert waiting.result(5)
    assert client.exists(NAME)


def test_a_lock_is_renewed_and_a_waiter_gets_it_only_after_its_release(client):
    """The renewal is made due, so that it does not matter how long a busy machine takes."""
    with ThreadPoolExecutor() as pool:
        with Lock(client, NAME, timeout=30, renew=True, reentrant=True) as lock:
            waiting = pool.submit(Lock(client, NAME).acquire, blocking_timeout=30)
            wait_until(lambda: client.exists(keys_of(NAME).line), "it waits")
            client.pexpire(NAME, 15_000)
            server = LockServer.behind(client)
            held = entry_of_context(server, NAME).held
            held.renew_at = 0
            server.keeper.add(held)  # it looks what is due
            wait_until(lambda: client.pttl(NAME) > 15_000, "it is renewed", 10)
            assert not waiting.done()
            lock.check()
            assert lock.state == "held"
        assert waiting.result(10)


def test_locks_of_one_client_share_one_keeper(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        held = [Lock(client, f"{NAME}{number}", timeout=30, renew=True) for number in range(20)]
        before = set(threading.enumerate())
        for lock in held:
            lock.acquire()
        assert len(set(threading.enumerate()) - before) == 1
        for lock in held:
            lock.release()


def test_what_it_made_for_a_client_ends_with_it(locks):
    client = redis.Redis(unix_socket_path=str(locks.socket))
    pool = weakref.ref(client.connection_pool)
    before = set(threading.enumerate())
    with Lock(client, NAME, timeout=30, renew=True) as lock:
        (keeper,) = set(threading.enumerate()) - before
    client.close()
    del client, lock
    gc.collect()
    assert pool() is None
    wait_until(lambda: not keeper.is_alive(), "its keeper has ended")


def made_and_dropped(locks):
    """A weak reference to an app that was used and then dropped, and a lock of it that was taken."""
    app = Celery("dropped", broker="memory://", set_as_current=False)
    app.conf.redislock_url, app.conf.redislock_lease = locks.celery_url(0), 4.5

    @app.task(base=LockedTask, shared=False)
    def once(number: int) -> int:
        return number

    assert once.apply((1,)).get() == 1
    lock = once.lock_for(2)
    assert lock.acquire()
    return weakref.ref(app), lock


def test_what_it_made_for_an_app_ends_with_the_app_and_its_locks(private_locks):
    """Tests and app factories make apps by the hundred. A process has only so many threads and connections."""
    before = set(threading.enumerate())
    app, lock = made_and_dropped(private_locks)
    (keeper,) = set(threading.enumerate()) - before
    gc.collect()
    time.sleep(5)
    assert lock.state == "held"  # a lease later
    lock.release()
    del lock
    gc.collect()
    assert app() is None
    wait_until(lambda: not keeper.is_alive(), "its keeper has ended")
    wait_until(lambda: len(private_locks.client.client_list()) == 1, "this test's own is the only connection")


def test_a_lock_may_be_given_celerys_proxy_of_the_current_app(locks, monkeypatch):
    """It is no app: nothing can refer to it weakly, and it stands for another app later."""
    app = Celery("current", broker="memory://", set_as_current=False)
    app.conf.redislock_url = locks.celery_url(0)
    monkeypatch.setattr(_state._tls, "current_app", app)
    with locked("held", app=current_app) as lock:
        assert lock.state == "held"


def test_an_app_that_is_dropped_in_an_outage_releases_what_its_run_held(private_locks, caplog):
    client = private_locks.client
    client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all")

    def run_and_drop():
        app = Celery("dropped", broker="memory://", set_as_current=False)
        app.conf.redislock_url = private_locks.celery_url(0)
        app.conf.redislock_client_options = {"username": "app", "password": "secret"}

        @app.task(base=LockedTask, shared=False)
        def once(number: int) -> None:
            client.execute_command("ACL", "SETUSER", "app", "-evalsha", "-eval")

        once.apply((1,)).get()
        return weakref.ref(app), once.lock_for(1).key

    def refused() -> int:
        return client.info("commandstats")["cmdstat_evalsha"]["rejected_calls"]

    caplog.set_level("CRITICAL", "celery_redislock")  # a record would have the error, and that the app
    app, key = run_and_drop()
    gc.collect()
    assert app() is None
    so_far = refused()
    wait_until(lambda: refused() > so_far + 1, "the release is sent again and again", 10)
    assert client.exists(key)
    client.execute_command("ACL", "SETUSER", "app", "+evalsha", "+eval")
    wait_until(lambda: not client.exists(key), "the release is sent again", 10)


def test_the_connections_that_it_made_for_a_client_end_with_it(private_locks):
    """Else the garbage collector ends them, and Python may warn of each."""
    client = redis.Redis(unix_socket_path=str(private_locks.socket))
    with Lock(client, NAME, timeout=30, renew=True) as lock:
        renew(lock)
    server = LockServer.behind(client)  # kept to the end of the test: the garbage collector does not see it
    client.close()
    del client, lock
    gc.collect()
    wait_until(lambda: len(private_locks.client.client_list()) == 1, "this test's own is the only connection")
    assert server.client


def test_what_it_made_for_a_clusters_client_ends_with_it(cluster_port):
    client = RedisCluster(host="127.0.0.1", port=cluster_port)
    kept = weakref.ref(client)
    before = set(threading.enumerate())
    with Lock(client, NAME, timeout=30, renew=True) as lock:
        (keeper,) = set(threading.enumerate()) - before
    client.close()
    del client, lock
    gc.collect()
    assert kept() is None
    wait_until(lambda: not keeper.is_alive(), "its keeper has ended")


def test_the_page_tells_how_long_a_command_may_take_with_a_client_that_was_given_no_time_outs():
    """A lock that is renewed needs a timeout of 1.5 times that. redis-py 8 has set time-outs of its own."""
    by_redis_py = inspect.signature(redis.Redis).parameters["socket_timeout"].default
    assert command_time(derive(redis.Redis())) == (3 if by_redis_py is None else 10)
    assert command_time(derive(redis.from_url("redis://localhost"))) == 3
    page = " ".join(PAGE.split())
    assert "From version 8 on, redis-py itself sets both to 5 s in `redis.Redis()`" in page
    assert "With a plain `redis.Redis()` of redis-py 8, that makes [15 s]" in page


def test_a_redis_user_needs_only_the_keys_and_commands_that_the_page_names(locks):
    commands = set(re.findall(r"\b[A-Z]{3,}\b", PAGE.rsplit("a Redis user needs", 1)[1]))
    called = {
        name
        for script in (ACQUIRE, INSPECT, LEAVE, RELEASE, RENEW, STAND)
        for name in re.findall(r"redis\.p?call\('(\w+)'", script.text)
    }
    of_tasks = {"HGET", "HMGET", "HSET", "RENAME", "ZMSCORE", "ZREMRANGEBYSCORE"}  # merged calls, and fair turns
    assert commands == called - of_tasks | {"EVALSHA", "EVAL", "SUBSCRIBE"}
    keys = ("~stock", "~{stock}:line", "~{stock}:fence", "&redislock:room:*")
    may = [f"+{command.lower()}" for command in commands]
    locks.client.execute_command("ACL", "SETUSER", "modest", "on", "nopass", "resetkeys", "-@all", *keys, *may)
    modest = redis.Redis(unix_socket_path=str(locks.socket), username="modest", password="any")  # noqa: S106
    with modest, Lock(modest, NAME, timeout=10, renew=True, fence=True) as lock, ThreadPoolExecutor() as pool:
        waiting = pool.submit(Lock(modest, NAME, timeout=10, thread_local=False).acquire, blocking_timeout=10)
        wait_until(lambda: locks.client.exists(keys_of(NAME).line), "it waits, and may")
        lock.extend(5)
        assert lock.owned()
        lock.release()
        assert waiting.result(5)
        assert lock.acquire(blocking=False) is False
        locks.client.delete(NAME)
        assert lock.acquire()
    locks.client.execute_command("ACL", "DELUSER", "modest")


def test_an_asyncio_client_is_refused():
    with pytest.raises(LockConfigError, match="asyncio"):
        Lock(redis.asyncio.Redis(), NAME)


@pytest.mark.parametrize("name", [b"stock", 7])
def test_a_name_may_be_what_redis_py_takes_for_a_key(locks, name):
    with locks.client.lock(name, lock_class=Lock):
        assert locks.client.exists(name)
    assert not locks.client.exists(name)


@pytest.mark.parametrize("name", ["plain", "redislock:{stock:7}", "{", "a}b{c}"])
def test_what_belongs_to_a_lock_is_in_its_hash_slot(cluster_port, name):
    with RedisCluster(host="127.0.0.1", port=cluster_port) as client, Lock(client, name, timeout=10, fence=True):
        assert not Lock(client, name).acquire(blocking_timeout=0.05)
        wait_until(lambda: not client.exists(keys_of(name).line), "its room has left the line")  # with this client
