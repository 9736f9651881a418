"""Debian's Redis with TLS, with certificates of a private authority; Valkey as the tests embed it has none."""

from __future__ import annotations

import shutil
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
    def for_server(cls, folder: Path, name: str = "localhost") -> Certificates:
        """Made by a new authority, for a server with this name."""
        need("trustme")
        import trustme

        folder.mkdir(parents=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca"))
        for who in (name, "client"):
            made = authority.issue_cert(who)
            made.private_key_and_cert_chain_pem.write_to_path(str(folder / ("client" if who == "client" else "server")))
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


@contextmanager
def tls_server(folder: Path, certificates: Certificates, *options: str) -> Iterator[int]:
    """The port of a Redis that speaks nothing but TLS; it asks every client for a certificate."""
    port = free_port()
    with debian_redis(folder, "--port", "0", "--tls-port", str(port), *certificates.of_server, *options):
        yield port


@contextmanager
def debian_redis(folder: Path, *options: str) -> Iterator[redis.Redis]:
    """Debian's own Redis; yields a client on its unix socket."""
    server = shutil.which("redis-server")
    if server is None:
        missing("redis-server")
    folder.mkdir(parents=True, exist_ok=True)
    at = folder / "redis.sock"
    command = [str(server), *options, "--bind", "127.0.0.1", "--unixsocket", str(at), "--save", ""]
    with (
        running([*command, "--dir", str(folder)], folder / "redis.log"),
        redis.Redis(unix_socket_path=str(at)) as client,
    ):
        wait_until(lambda: _answers(client), "Redis answers")
        yield client


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
