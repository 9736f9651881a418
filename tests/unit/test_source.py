"""What Celery's settings say of the lock server: Sentinels, TLS and credentials of the broker or the result backend."""

from __future__ import annotations

import ssl
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from redis.sentinel import SentinelConnectionPool, SentinelManagedSSLConnection

from celery_redislock.app import client_of, command_time_of, keyprefix_of, source_of
from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.errors import LockConfigError

from .wire import SECRET


class Provider(redis.CredentialProvider):
    """A user's own."""

    def get_credentials(self) -> tuple[str, str]:
        return "from", SECRET


NAMED = f"{__name__}.{Provider.__name__}"


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """The lock server's client of an app with these settings."""
    with Celery("unit", set_as_current=False) as app:

        def make(**settings: Any) -> Any:
            app.conf.update({"broker_url": "memory://", **settings})
            return client_of(app)

        yield make


def connection_of(client: Any) -> Any:
    pool = client.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


@pytest.mark.parametrize("settings", [
    {"broker_url": "redis://h", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca"}},
    {"broker_url": "rediss://h", "broker_use_ssl": {"ssl_ca_certs": "/ca"}},
    {"result_backend": "redis://h", "redis_backend_use_ssl": {"ssl_cert_reqs": "CERT_REQUIRED", "ssl_ca_certs": "/ca"}},
    {"result_backend": "rediss://h?ssl_cert_reqs=required&ssl_ca_certs=/ca"},
    {"redislock_url": "valkeys://h", "redislock_client_options": {"ssl_ca_certs": "/ca"}},
    {"redislock_url": "redis://h", "redislock_client_options": {"ssl": True, "ssl_ca_certs": "/ca"}},
])  # fmt: skip
def test_the_options_of_tls_are_those_of_the_setting_that_names_the_server(
    client: Callable[..., Any], settings: dict[str, Any]
) -> None:
    connection = connection_of(client(**settings))
    assert isinstance(connection, redis.SSLConnection)
    assert (connection.cert_reqs, connection.check_hostname, connection.ca_certs) == (ssl.CERT_REQUIRED, True, "/ca")


@pytest.mark.parametrize("none", [ssl.CERT_NONE, "CERT_NONE", "none", None])
def test_certificates_are_not_checked_where_the_user_says_so(client: Callable[..., Any], none: Any) -> None:
    connection = connection_of(client(broker_url="rediss://h", broker_use_ssl={"ssl_cert_reqs": none}))
    assert (connection.cert_reqs, connection.check_hostname) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize("use_ssl", [True, False, None, {}])
def test_what_kombu_ignores_is_ignored(client: Callable[..., Any], use_ssl: Any) -> None:
    made = client(broker_url="redis://h", broker_use_ssl=use_ssl)
    assert not isinstance(connection_of(made), redis.SSLConnection)


def test_the_brokers_tls_is_not_that_of_another_server(client: Callable[..., Any]) -> None:
    made = client(broker_url="redis://h", broker_use_ssl={"ssl_cert_reqs": "none"}, redislock_url="redis://other")
    assert not isinstance(connection_of(made), redis.SSLConnection)


@pytest.mark.parametrize("settings", [
    {"broker_url": f"redis://:x@h?credential_provider={NAMED}"},
    {"result_backend": "redis://:x@h", "redis_backend_credential_provider": NAMED},
    {"result_backend": "redis://:x@h", "redis_backend_credential_provider": Provider()},
    {"redislock_url": "redis://:x@h", "redislock_client_options": {"credential_provider": Provider()}},
])  # fmt: skip
def test_a_credential_provider_takes_the_place_of_the_password(
    client: Callable[..., Any], settings: dict[str, Any]
) -> None:
    connection = connection_of(client(**settings))
    assert isinstance(connection.credential_provider, Provider)
    assert (connection.username, connection.password) == (None, None)


def test_a_credential_provider_that_is_not_there_is_named(client: Callable[..., Any]) -> None:
    with pytest.raises(LockConfigError, match=r"credential provider of the lock server: .*no_such_module"):
        client(broker_url="redis://h?credential_provider=no_such_module.Provider")


def test_the_result_backends_user_and_password_may_stand_beside_its_url(client: Callable[..., Any]) -> None:
    made = client(result_backend="redis://h/3", redis_username="shop", redis_password=SECRET)
    kwargs = made.connection_pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("shop", SECRET, 3)


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("redis://h", ("shop", SECRET, 6390)),
        ("redis://own:pw@h:7000", ("own", "pw", 7000)),
        ("redis+socket:///run/r.sock", (None, None, None)),
    ],
)
def test_the_brokers_login_may_stand_beside_its_url_except_that_of_a_socket(
    client: Callable[..., Any], url: str, login: tuple[Any, ...]
) -> None:
    """As in kombu."""
    made = client(broker_url=url, broker_user="shop", broker_password=SECRET, broker_port=6390)
    kwargs = made.connection_pool.connection_kwargs
    assert tuple(kwargs.get(name) for name in ("username", "password", "port")) == login


@pytest.mark.parametrize(
    ("settings", "keyprefix"),
    [
        ({"broker_url": "redis://h", "broker_transport_options": {"global_keyprefix": "shop:"}}, "shop:"),
        ({"result_backend": "redis://h", "result_backend_transport_options": {"global_keyprefix": "shop:"}}, "shop:"),
        ({"redislock_url": "redis://h", "broker_transport_options": {"global_keyprefix": "shop:"}}, ""),
        ({"broker_url": "redis://h", "broker_transport_options": {"global_keyprefix": None}}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_all_names_begin_with_the_prefix_that_kombu_has_on_that_server(
    settings: dict[str, Any], keyprefix: str
) -> None:
    with Celery("unit", set_as_current=False) as app:
        app.conf.update({"broker_url": "memory://", **settings})
        assert keyprefix_of(app) == keyprefix


class TestSentinels:
    URL = "sentinel://shop:pw@one/3;sentinel://two:26380/3"
    OPTIONS: dict[str, Any] = {
        "master_name": "mymaster",
        "sentinel_kwargs": {"password": SECRET, "socket_timeout": 0.5},
    }

    def test_all_hosts_are_asked_with_their_own_password_for_a_server_with_another(
        self, client: Callable[..., Any]
    ) -> None:
        pool = client(broker_url=self.URL, broker_transport_options=self.OPTIONS).connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
        assert [(one["host"], one["port"]) for one in asked] == [("one", 26379), ("two", 26380)]
        assert {one["password"] for one in asked} == {SECRET}
        assert {(one["socket_connect_timeout"], one["socket_timeout"]) for one in asked} == {(1.0, 0.5)}
        kwargs = pool.connection_kwargs
        assert (pool.service_name, kwargs["username"], kwargs["password"]) == ("mymaster", "shop", "pw")
        assert (kwargs["db"], kwargs["protocol"], kwargs["retry"]._retries) == (3, 2, 0)

    def test_a_command_may_take_the_time_outs_of_all(self, app: Celery) -> None:
        app.conf.update(broker_url=self.URL, broker_transport_options=self.OPTIONS)
        assert command_time_of(app) == 3.0 + 2 * 1.5

    def test_tls_to_the_primary(self, client: Callable[..., Any]) -> None:
        use_ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        made = client(broker_url=self.URL, broker_transport_options=self.OPTIONS, broker_use_ssl=use_ssl)
        assert issubclass(made.connection_pool.connection_class, SentinelManagedSSLConnection)

    @pytest.mark.parametrize(
        ("setting", "where"),
        [
            ("broker_url", "broker_transport_options"),
            ("result_backend", "result_backend_transport_options"),
            ("redislock_url", "redislock_client_options"),
        ],
    )
    def test_without_the_name_of_the_primary_the_error_says_where_it_belongs(
        self, client: Callable[..., Any], setting: str, where: str
    ) -> None:
        with pytest.raises(LockConfigError, match=f"^{setting} names Sentinels.*set master_name.* in {where}$"):
            client(**{setting: self.URL})


class TestCluster:
    def test_its_nodes_are_hosts_in_one_url_or_urls(self, client: Callable[..., Any]) -> None:
        for url in ("redis+cluster://u:p@one:7000,two", "redis+cluster://u:p@one:7000;redis+cluster://two"):
            made = client(redislock_url=url)
            assert isinstance(made, ClusterClient)
            assert made.nodes == (("one", 7000), ("two", 6379))
            assert (made.options["username"], made.options["password"]) == ("u", "p")

    def test_a_command_may_take_the_time_outs_of_two_nodes(self, app: Celery) -> None:
        app.conf.update(redislock_url="redis+cluster://one,two", redislock_client_options={"socket_timeout": 0.5})
        assert command_time_of(app) == 2 * 1.5

    def test_tls_to_its_nodes(self, client: Callable[..., Any]) -> None:
        assert issubclass(client(redislock_url="rediss+cluster://h").options["connection_class"], redis.SSLConnection)

    def test_a_database_is_refused(self, client: Callable[..., Any]) -> None:
        with pytest.raises(LockConfigError, match="broker_url names a database, but a Cluster has only database 0"):
            client(broker_url="redis+cluster://one:7000/3")


@pytest.mark.parametrize("url", ["redis://h", "sentinel://h?master_name=m", "redis+cluster://h"])
def test_an_option_that_redis_py_does_not_know_is_named(client: Callable[..., Any], url: str) -> None:
    with pytest.raises(LockConfigError, match=r"^redislock_client_options: redis-py has no option 'nonsense'"):
        client(broker_url=url, redislock_client_options={"nonsense": 1}, broker_transport_options={"master_name": "m"})


def test_an_unknown_option_for_tls_may_be_one_of_the_broker(client: Callable[..., Any]) -> None:
    with pytest.raises(
        LockConfigError, match=r"^redislock_client_options or the TLS options of broker_url: .*'ssl_cert'"
    ):
        client(broker_url="rediss://h", broker_use_ssl={"ssl_cert": 1})


@pytest.mark.parametrize(
    "url", [f"redis://u:{SECRET}@h:port", f"sentinel://u:{SECRET}@h:port", f"redis+cluster://u:{SECRET}@a,b:port"]
)
def test_no_error_and_no_repr_shows_the_password(client: Callable[..., Any], url: str) -> None:
    with pytest.raises(LockConfigError) as refused:
        client(broker_url=url, broker_transport_options={"master_name": "m", "sentinel_kwargs": {"password": SECRET}})
    assert SECRET not in "".join(traceback.format_exception(refused.value))
    with Celery("unit", broker=url, set_as_current=False) as app:
        assert SECRET not in repr(source_of(app.conf))
