"""Debian's Redis with TLS, with certificates of a private authority; Valkey as the tests embed it has none."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.lab.servers import free_port, missing, need, running, wait_until


@dataclass
class Certificates:
    """Files in PEM: of the authority, of a server and of a client."""

    folder: Path

    @classmethod
    def for_server(cls, folder: Path, *names: str) -> Certificates:
        """Made by a new authority, for a server with these names; of this machine, where none is given."""
        need("trustme")
        import trustme

        folder.mkdir(parents=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca"))
        for who, its_names in {"server": names or ("localhost", "127.0.0.1"), "client": ("client.example",)}.items():
            made = authority.issue_cert(*its_names)
            made.private_key_and_cert_chain_pem.write_to_path(str(folder / who))
        return cls(folder)

    @property
    def of_server(self) -> list[str]:
        """Redis' options; a client must show a certificate too."""
        server, authority = str(self.folder / "server"), str(self.folder / "ca")
        return ["--tls-cert-file", server, "--tls-key-file", server, "--tls-ca-cert-file", authority]

    @property
    def of_client(self) -> dict[str, str]:
        """redis-py's and Celery's options."""
        client = str(self.folder / "client")
        return {"ssl_ca_certs": str(self.folder / "ca"), "ssl_certfile": client, "ssl_keyfile": client}

    def context(self) -> ssl.SSLContext:
        """The server's, for who stands in for it."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.folder / "ca"))
        context.load_cert_chain(self.folder / "server")
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@contextmanager
def tls_server(folder: Path, certificates: Certificates, *options: str) -> Iterator[int]:
    """The port of a Redis that speaks nothing but TLS; it asks every client for a certificate."""
    port = free_port()
    with debian_redis(folder, *options, "--port", "0", "--tls-port", str(port), *certificates.of_server):
        yield port


@contextmanager
def tls_cluster(folder: Path, certificates: Certificates) -> Iterator[int]:
    """The port of a Cluster's only node, which speaks nothing but TLS."""
    options = ["--cluster-enabled", "yes", "--tls-cluster", "yes", "--cluster-port", str(free_port())]
    with tls_server(folder, certificates, *options) as port, client_of(folder) as node:
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: "cluster_state:ok" in str(node.execute_command("CLUSTER", "INFO")), "it is up")
        yield port


@contextmanager
def tls_sentinel(folder: Path, certificates: Certificates, name: str) -> Iterator[int]:
    """The port of a Sentinel, which watches one primary, called `name`; both speak nothing but TLS."""
    with tls_server(folder / "primary", certificates) as primary:
        config = folder / "sentinel.conf"
        config.write_text(f"sentinel monitor {name} 127.0.0.1 {primary} 1\ntls-replication yes\n")
        with tls_server(folder, certificates, str(config), "--sentinel") as port:
            yield port


@contextmanager
def debian_redis(folder: Path, *options: str) -> Iterator[redis.Redis]:
    """Debian's own Redis; yields a client on its unix socket."""
    server = shutil.which("redis-server")
    if server is None:
        missing("redis-server")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(server), *options, "--bind", "127.0.0.1", "--unixsocket", str(folder / "redis.sock"), "--save", ""]
    with running([*command, "--dir", str(folder)], folder / "redis.log"), client_of(folder) as client:
        wait_until(lambda: _answers(client), "Redis answers")
        yield client


def client_of(folder: Path) -> redis.Redis:
    """A client of the server in that folder, on its unix socket."""
    return redis.Redis(unix_socket_path=str(folder / "redis.sock"))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
