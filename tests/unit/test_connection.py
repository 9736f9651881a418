"""From URLs and client options to a client: nothing here connects."""

from __future__ import annotations

import math
import ssl
import subprocess
import sys
import traceback
from typing import Any

import pytest
import redis
from celery import Celery

from celery_redislock import LockedTask
from celery_redislock.app import Source, source_of
from celery_redislock.connection.connect import address, command_time, connect, parse_address
from celery_redislock.errors import LockConfigError

from .wire import SECRET


def client_of(url: str, **options: Any) -> redis.Redis:
    return connect(url, options)


def source(configured: Any = None, broker: Any = None, backend: Any = None, **settings: Any) -> Source:
    """What an app with these settings takes for its lock server."""
    conf = {"redislock_url": configured, "broker_url": broker, "result_backend": backend, **settings}
    with Celery("unit", set_as_current=False) as app:
        app.conf.update({name: value for name, value in conf.items() if value is not None})
        return source_of(app.conf)


def kwargs_of(client: redis.Redis) -> dict[str, Any]:
    """What the client's connections are made with."""
    kwargs: dict[str, Any] = client.connection_pool.connection_kwargs
    return kwargs


def connection_of(client: redis.Redis) -> Any:
    """A connection as the pool makes them; not connected."""
    pool = client.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


@pytest.mark.parametrize(
    ("configured", "broker", "backend", "chosen"),
    [
        ("redis://own/1", "redis://broker/0", "redis://backend/0", "redis://own/1"),
        ("unix:///run/r.sock", "amqp://broker", None, "unix:///run/r.sock"),
        (None, "redis://broker/0", "redis://backend/0", "redis://broker/0"),
        (None, "rediss://u:p@broker:6380/3", None, "rediss://u:p@broker:6380/3"),
        (None, "redis://one/0;redis://two/0", None, "redis://one/0"),
        (None, "amqp://broker//", "redis://backend/0", "redis://backend/0"),
        (None, "amqp://broker//;redis://two/0", "rediss://backend/0", "rediss://backend/0"),
        (None, ["redis://one/0", "redis://two/0"], None, "redis://one/0"),
        (None, ["amqp://one//", "redis://two/0"], "redis://backend/0", "redis://backend/0"),
        (None, None, "redis://backend/0", "redis://backend/0"),
        (None, "redis+socket:///run/r.sock?virtual_host=3", None, "redis+socket:///run/r.sock?virtual_host=3"),
        (None, "valkey://broker/3", None, "valkey://broker/3"),
        (None, "sentinel://one/0;sentinel://two/0", None, "sentinel://one/0;sentinel://two/0"),
        (None, ["sentinel://one/0", "sentinel://two/0"], None, "sentinel://one/0;sentinel://two/0"),
        (None, "amqp://broker//", "redis+cluster://one,two", "redis+cluster://one,two"),
    ],
    ids=str,
)
def test_the_lock_server_is_the_configured_one_or_the_brokers_or_the_backends(
    configured: str | None, broker: Any, backend: str | None, chosen: str
) -> None:
    assert source(configured, broker, backend).url == chosen


@pytest.mark.parametrize(
    ("broker", "backend"),
    [
        (None, None),
        ("", ""),
        ("amqp://broker//", "rpc://"),
        ("memory://", "db+sqlite:///results"),
        ("redis+other://one", None),
    ],
)
def test_without_a_redis_of_the_apps_the_remedy_is_named(broker: str | None, backend: str | None) -> None:
    with pytest.raises(LockConfigError, match=r'set redislock_url, for instance "redis://localhost:6379/0"'):
        source(None, broker, backend)


def test_what_is_no_sentinel_in_a_list_of_sentinels_is_none():
    """A list of brokers may end with a semicolon, or go on with a broker of another kind."""
    _, nodes, _ = parse_address("sentinel://one:1/2;amqp://broker//;sentinel://two:2;")
    assert nodes == (("one", 1), ("two", 2))


@pytest.mark.parametrize("url", ["amqp://host", "redis+other://host", "http://host", "host", "7:"])
def test_a_configured_url_of_no_known_scheme_is_refused_with_the_schemes_there_are(url: str) -> None:
    with pytest.raises(LockConfigError, match=r"allowed: redis://, .*sentinel://, redis\+cluster://, .* URLs"):
        client_of(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6380/3", {"host": "h", "port": 6380, "db": 3}),
        ("redis://:pw@h", {"password": "pw"}),
        ("redis://shop:p%40ss%2Fword@h/1", {"username": "shop", "password": "p@ss/word", "db": 1}),
        ("rediss://shop:pw@h:6380", {"username": "shop", "password": "pw", "port": 6380}),
        ("unix://shop:pw@/run/r.sock?db=3", {"username": "shop", "password": "pw", "path": "/run/r.sock", "db": 3}),
        ("redis+socket://shop:pw@/run/r.sock?virtual_host=3", {"username": "shop", "password": "pw", "db": 3}),
        ("redis+socket:///run/r.sock?virtual_host=/3", {"path": "/run/r.sock", "db": 3}),
        ("redis+socket:///run/r.sock", {"path": "/run/r.sock", "db": 0}),
        ("redis+socket:///run/r.sock?db=3&socket_timeout=0.5", {"path": "/run/r.sock", "db": 3, "socket_timeout": 0.5}),
        ("valkey://shop:pw@h:6380/3", {"username": "shop", "password": "pw", "host": "h", "port": 6380, "db": 3}),
    ],
)
def test_user_password_host_and_database_of_the_url_are_kept(url: str, expected: dict[str, Any]) -> None:
    assert expected.items() <= kwargs_of(client_of(url)).items()


@pytest.mark.parametrize("password", ["pass/word", "pass#word", "pass?word", "pass[word"])
def test_a_password_that_must_be_encoded_is_refused_with_the_remedy_and_not_shown(password: str) -> None:
    with pytest.raises(LockConfigError, match="must be percent-encoded: %2F for a slash") as refusal:
        client_of(f"redis://:{password}@h/1")
    assert "pass" not in str(refusal.value).replace("password", "")


def test_client_options_reach_the_client() -> None:
    options = {"password": SECRET, "socket_timeout": 0.5, "health_check_interval": 7, "client_name": "locks"}
    assert options.items() <= kwargs_of(client_of("redis://h", **options)).items()


def test_the_clients_time_outs_are_short_unless_configured() -> None:
    kwargs = kwargs_of(client_of("redis://h"))
    assert (kwargs["socket_connect_timeout"], kwargs["socket_timeout"]) == (1.0, 2.0)


def test_the_client_has_no_retries_and_reads_bytes_with_resp2() -> None:
    """The store must know when an answer is ambiguous, and parses bytes."""
    connection = connection_of(client_of("redis://h"))
    assert connection.retry._retries == 0
    assert connection.encoder.decode_responses is False
    assert int(connection.protocol) == 2


@pytest.mark.parametrize(
    "query", ["protocol=3", "decode_responses=True", "encoding=utf-16", "retry_on_timeout=True", "retry_on_error=x"]
)
def test_the_url_cannot_change_what_the_store_relies_on(query: str) -> None:
    """redis-py takes options from the URL too, and prefers them."""
    connection = connection_of(client_of(f"redis://h?{query}"))
    assert connection.retry._retries == 0
    assert issubclass(redis.ConnectionError, connection.retry._supported_errors)
    assert connection.encoder.decode_responses is False
    assert connection.encoder.encoding == "utf-8"
    assert int(connection.protocol) == 2


@pytest.mark.parametrize(
    "url",
    [
        "redis://[::1]:6380/2",
        "rediss://shop@[2001:db8::1]:6379/0",
        "sentinel://[::1]:26379,h:26380/0?master_name=mymaster",
        "redis+cluster://[::1]:7000,h:7001",
    ],
)
def test_an_ipv6_address_keeps_its_brackets_in_messages(url: str) -> None:
    assert address(connect(url, {})) == url


WITHOUT_HIREDIS = """
import sys
sys.modules["hiredis"] = None  # as where it is not installed
from celery_redislock.connection.clients import derive
from celery_redislock.connection.connect import connect, parse_address
client = connect(sys.argv[1], {})
for ours in (client, derive(client)):
    pool = ours.connection_pool
    print(pool.connection_class(**pool.connection_kwargs).protocol)
"""


@pytest.mark.parametrize("url", ["redis://h", "redis://h?protocol=3", "rediss://h", "unix:///run/r.sock"])
def test_redis_pys_own_parser_is_enough(url: str) -> None:
    """redis-py 8 refuses a connection without hiredis where its pool was made for RESP3, its default."""
    command = [sys.executable, "-c", WITHOUT_HIREDIS, url]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.stdout.split() == ["2", "2"], made.stderr


@pytest.mark.parametrize(
    "option",
    [
        "protocol",
        "decode_responses",
        "encoding",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "single_connection_client",
    ],
)
def test_client_options_that_the_store_relies_on_are_refused_by_name(option: str) -> None:
    with pytest.raises(LockConfigError, match=f"^redislock_client_options: {option} cannot be set"):
        client_of("redis://h", **{option: True})


def test_rediss_verifies_certificate_and_host_by_default() -> None:
    connection = connection_of(client_of("rediss://h"))
    assert connection.cert_reqs == ssl.CERT_REQUIRED
    assert connection.check_hostname is True


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("required", ssl.CERT_REQUIRED),
        ("none", ssl.CERT_NONE),
        ("CERT_REQUIRED", ssl.CERT_REQUIRED),
        ("CERT_OPTIONAL", ssl.CERT_OPTIONAL),
        ("CERT_NONE", ssl.CERT_NONE),
    ],
)
def test_a_brokers_rediss_url_works_as_celery_spells_it(spelled: str, meant: ssl.VerifyMode) -> None:
    """Celery's result backend demands ``ssl_cert_reqs`` in a rediss URL, in its own spelling."""
    url = source(None, f"rediss://h?ssl_cert_reqs={spelled}").url
    assert connection_of(connect(url, {})).cert_reqs == meant


def test_a_client_is_made_without_connecting() -> None:
    """A publisher imports its tasks where Redis is away."""
    assert client_of("redis://nowhere.invalid").connection_pool._connections == []


UNUSABLE = {
    "port that is none": "redis://h:port/0",
    "port out of range": "redis://h:99999/0",
    "a list": "redis://:p@a:1;redis://:p@b:2",
    "broken IPv6": "redis://[::1/0",
    "unknown option": "redis://h?foo=1",
    "option that is no number": "redis://h?db=x",
}


@pytest.mark.parametrize("url", UNUSABLE.values(), ids=UNUSABLE)
def test_a_url_that_redis_py_cannot_use_is_refused(url: str) -> None:
    with pytest.raises(LockConfigError, match="redislock_url"):
        client_of(url)


@pytest.mark.parametrize("options", [{"foo": 1}, {"port": "x"}, {"ssl_cert_reqs": "required"}], ids=str)
def test_client_options_that_redis_py_cannot_use_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LockConfigError, match="redislock_client_options"):
        client_of("redis://h", **options)


@pytest.mark.parametrize(
    ("url", "options", "setting", "name"),
    [
        ("redis://h", {"socket_timout": 1}, "redislock_client_options", "socket_timout"),
        ("redis+cluster://h", {"socket_timout": 1}, "redislock_client_options", "socket_timout"),
        ("sentinel://h", {"master_name": "m", "socket_timout": 1}, "redislock_client_options", "socket_timout"),
        ("sentinel://h", {"master_name": "m", "sentinel_kwargs": {"passwd": 1}}, "redislock_client_options", "passwd"),
        ("redis://h?socket_timeout=1", {"timeout": 1}, "redislock_client_options", "timeout"),
        ("redis://h", {"ssl_certfile": "/c"}, "redislock_client_options", "ssl_certfile"),
        ("unix:///r.sock?socket_keepalive=yes", {"db": 1}, "redislock_url", "socket_keepalive"),
    ],
)
def test_an_option_that_redis_py_does_not_know_is_named_with_its_setting_and_the_remedy(
    url: str, options: dict[str, Any], setting: str, name: str
) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(LockConfigError) as refused:
        client_of(url, **options)
    assert str(refused.value) == (
        f"{setting}: redis-py has no option {name!r} for a {scheme}:// URL; correct its name, or leave it out"
    )


SHOWN_TO_NOBODY: dict[str, tuple[str, dict[str, Any]]] = {
    "scheme": (f"amqp://user:{SECRET}@h", {}),
    "no scheme": (f"{SECRET}@h:6379", {}),
    "the password alone": (SECRET, {}),
    "something before the scheme": (f"{SECRET}@redis://h", {}),
    "scheme without slashes": (f"redis:{SECRET}@h", {}),
    "a list of another scheme": (f"sentinel://:{SECRET}@a;sentinel://:{SECRET}@b", {}),
    "a list": (f"redis://:{SECRET}@a:1;redis://:{SECRET}@b:2", {}),
    "unescaped / in the password": (f"redis://:{SECRET}/{SECRET}@h", {}),
    "unescaped # in the password": (f"redis://:{SECRET}#{SECRET}@h", {}),
    "port": (f"redis://:{SECRET}@h:port", {}),
    "option in the URL": (f"redis://h?password={SECRET}&foo=1", {}),
    "unix socket": (f"unix://u:{SECRET}@/run/r.sock?foo=1", {}),
    "kombu's unix socket": (f"redis+socket://u:{SECRET}@/run/r.sock", {"foo": 1}),
    "client options": ("redis://h", {"password": SECRET, "foo": 1}),
    "refused client options": ("redis://h", {"password": SECRET, "retry": 1}),
}


@pytest.mark.parametrize(("url", "options"), SHOWN_TO_NOBODY.values(), ids=SHOWN_TO_NOBODY)
def test_no_message_shows_the_password(url: str, options: dict[str, Any]) -> None:
    """Nor does the traceback that a log shows of it."""
    with pytest.raises(LockConfigError) as refused:
        client_of(url, **options)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 3.0),
        ({"socket_timeout": 5}, 6.0),
        ({"socket_connect_timeout": 0.25}, 2.25),
        ({"socket_timeout": 0.5, "socket_connect_timeout": 0.5, "db": 3}, 1.0),
    ],
    ids=str,
)
def test_the_worst_command_time_is_connecting_and_reading(options: dict[str, Any], seconds: float) -> None:
    assert command_time(client_of("redis://h", **options)) == seconds


def test_time_outs_in_the_url_count_as_well() -> None:
    """redis-py prefers them to the options."""
    assert command_time(client_of("redis://h?socket_timeout=60", socket_timeout=5)) == 61.0


@pytest.mark.parametrize("value", [None, 0, -1, True, "2", math.nan, math.inf, [2]], ids=repr)
@pytest.mark.parametrize("name", ["socket_timeout", "socket_connect_timeout"])
def test_a_client_without_time_outs_is_refused(name: str, value: Any) -> None:
    with pytest.raises(LockConfigError, match=f"^redislock_client_options: {name} = .* seconds greater than 0"):
        client_of("redis://h", **{name: value})


@pytest.mark.parametrize(
    "conf",
    [
        {"redislock_client_options": {"socket_timeout": 60}},
        {"redislock_url": "redis://nowhere.invalid?socket_timeout=60"},
    ],
    ids=["option", "URL"],
)
def test_a_time_out_that_could_outlast_the_lease_is_refused_wherever_it_is_set(
    app: Celery, conf: dict[str, Any]
) -> None:
    app.conf.update(conf)

    @app.task(shared=False, base=LockedTask, name="bill", lock_lease=30)
    def bill() -> None: ...

    with pytest.raises(LockConfigError, match="socket_timeout"):
        bill.lock_for()
