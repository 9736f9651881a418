"""The lock servers of the acceptance tests: one Valkey, or what LAB_LOCKS asks for (`kinds.py`).

Each is a `Valkey` with another URL, which is all that the app knows of it; only a Cluster is a thing of its own. The
test's own client reaches the server past its users, its certificates and its Sentinel.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.lab.cluster_locks import ClusterLocks, cluster_locks
from tests.lab.kinds import KIND
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, free_port, missing
from tests.lab.tls import Certificates
from tests.lab.topologies import WATCHED, quiet_sentinel
from tests.lab.wake_ups import DROPS_PUBLISH
from tests.lab.workers import ROOT

#: What `locks list` needs besides: docs/cli.md.
FOR_COMMAND_LINE = ["+scan"]


class AclLocks(Valkey):
    """The app is the smallest user of docs/security.md."""

    def __init__(self, folder: Path) -> None:
        page = (ROOT / "docs" / "security.md").read_text()
        (rules,) = re.findall(r"ACL SETUSER locks (.*?)```", page, re.DOTALL)
        (self._password,) = re.findall(r">(\S+)", rules)
        super().__init__(folder, options=["--user", "locks", *rules.split(), *FOR_COMMAND_LINE])

    def url(self, db: int = 0) -> str:
        return f"unix://locks:{self._password}@{self.socket}?db={db}"


class TlsLocks(Valkey):
    """Debian's Redis speaks TLS alone, and wants to see the app's certificate."""

    def __init__(self, folder: Path) -> None:
        self._certificates, self._tls_port = Certificates.for_server(folder / "certificates"), free_port()
        super().__init__(folder, options=["--tls-port", str(self._tls_port), *self._certificates.of_server])

    def url(self, db: int = 0) -> str:
        return self._url(self._tls_port, db)

    @contextmanager
    def behind_proxy(self) -> Iterator[Proxy]:
        """The proxy shows the server's certificate, and passes on to its unix socket what it reads."""
        with Proxy(super().url(), self._certificates.context()).serve() as proxy:
            proxy.url = self._url(proxy.port)
            yield proxy

    def _url(self, port: int, db: int = 0) -> str:
        options = "&".join(f"{name}={value}" for name, value in self._certificates.of_client.items())
        return f"rediss://localhost:{port}/{db}?{options}"

    def _program(self) -> str:
        return shutil.which("redis-server") or missing("redis-server")


class SentinelLocks(Valkey):
    """A Sentinel names the server, and goes on to do so while it is killed or stands still."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, free_port())
        self._sentinel = 0

    def url(self, db: int = 0) -> str:
        return self._url(self._sentinel, db)

    def _url(self, port: int, db: int = 0) -> str:
        return f"sentinel://127.0.0.1:{port}/{db}?master_name={WATCHED}"

    @contextmanager
    def serve(self) -> Iterator[SentinelLocks]:
        with super().serve(), quiet_sentinel(self.folder, self.port) as self._sentinel:
            yield self

    @contextmanager
    def behind_proxy(self) -> Iterator[Proxy]:
        """The Sentinel names the proxy's port, for it is itself behind another, which nothing strikes."""
        with Proxy(super().url()).serve() as proxy, Proxy(f"redis://127.0.0.1:{self._sentinel}").serve() as door:
            door.instead = str(self.port).encode(), str(proxy.port).encode()
            proxy.url = self._url(door.port)
            yield proxy


#: What serves locks out of a folder, by kind.
SERVE: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "one": lambda folder: Valkey(folder, drops_publish=DROPS_PUBLISH).serve(),
    "cluster": cluster_locks,
    "sentinel": lambda folder: SentinelLocks(folder).serve(),
    "acl": lambda folder: AclLocks(folder).serve(),
    "tls": lambda folder: TlsLocks(folder).serve(),
}


def lock_server_in(folder: Path, kind: str = KIND) -> AbstractContextManager[Any]:
    """A lock server of this kind, or of the one that this session has, with the interface of `Valkey`."""
    folder.mkdir()
    return SERVE[kind](folder)


def behind_proxy(locks: Any) -> AbstractContextManager[Any]:
    """A proxy before a server of `lock_server_in`, with the interface of `Proxy`; its URL is the app's."""
    if isinstance(locks, TlsLocks | SentinelLocks | ClusterLocks):
        return locks.behind_proxy()
    return Proxy(locks.url()).serve()
