"""Each example of docs/redis-setup.md takes a lock on a real server of its kind; only addresses are put in."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import redis

from tests.lab.pages import python_of
from tests.lab.servers import Valkey, free_port
from tests.lab.tls import Certificates, tls_server
from tests.lab.topologies import cluster, sentinel
from tests.lab.workers import ROOT

PAGE = ROOT / "docs" / "redis-setup.md"
TASK = """
from celery_redislock import LockedTask, locked

@app.task(base=LockedTask)
def report(name): ...

with report.lock_for("daily") as lock:
    assert lock.owned(), "the lock is held"
    assert report.lock_info("daily"), "and it is there"
    key = lock.name
with locked("stock", app=app):
    pass
print(key)
"""


def password_for(client):
    """The page's users and password, and no way in without one."""
    for name in ("shop", "locks"):
        client.execute_command("ACL", "SETUSER", name, "on", ">hunter2", "~*", "&*", "+@all")
    client.execute_command("ACL", "SETUSER", "default", "off")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey"), free_port()).serve() as server:
        yield server


@pytest.fixture
def locked_valkey(tmp_path):
    with Valkey(tmp_path, free_port()).serve() as server:
        password_for(server.client)
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def tls(tmp_path):
    """The page's addresses of a server with TLS, and its files."""
    certificates = Certificates.for_server(tmp_path / "certificates")
    users = [f"--user {name} on >hunter2 ~* &* +@all".split() for name in ("shop", "locks")]
    with tls_server(tmp_path / "redis", certificates, *users[0], *users[1]) as port:
        files = certificates.of_client
        yield {
            "tls.example:6380": f"localhost:{port}",
            "/etc/shop/ca.pem": files["ssl_ca_certs"],
            "/etc/shop/client.pem": files["ssl_certfile"],
        }


def run(section, addresses):
    """The example below that heading, with these addresses for the page's; returns the key that it took."""
    program = python_of(PAGE, section)
    for example, real in addresses.items():
        assert example in program
        program = program.replace(example, real)
    assert ".example" not in re.sub("amqp://rabbit.example//", "", program)
    done = subprocess.run(
        [sys.executable, "-c", program + TASK],
        env={"PYTHONPATH": ":".join([str(ROOT), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_example_of_the_page_has_a_test_here():
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    with_example = {name for name, text in zip(sections[1::2], sections[2::2], strict=True) if "```python" in text}
    here = (ROOT / "tests" / "topologies" / "test_redis_setup_page.py").read_text()
    assert {name for name in with_example if f'run("{name}"' not in here} == set()


def test_the_brokers_server(locked_valkey):
    run("The broker's server", {"redis.example:6379": locked_valkey})


def test_a_separate_server(locked_valkey):
    run("A separate server", {"redis.example:6379": locked_valkey})


def test_valkey(valkey):
    run("Valkey", {"valkey.example:6379": f"127.0.0.1:{valkey.port}"})


def test_a_unix_socket(valkey):
    run("Unix socket", {"/run/redis.sock": str(valkey.socket)})


def test_tls(tls):
    run("TLS", tls)


def test_tls_to_the_broker(tls):
    run("TLS to the broker", tls)


def test_a_credential_provider(locked_valkey):
    run("Passwords that change", {"redis.example:6379": locked_valkey})


def test_sentinels(tmp_path):
    with sentinel(tmp_path, "mymaster", 'requirepass "the Sentinels\' own"') as port:
        with redis.Redis(port=port, password="the Sentinels' own", protocol=2) as watcher:  # noqa: S106
            primary = watcher.sentinel_masters()["mymaster"]["port"]
        with redis.Redis(port=primary) as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", ">hunter2", "~*", "&*", "+@all")
        dead = {f"sentinel-{number}.example:26379": f"127.0.0.1:{free_port()}" for number in (1, 2)}
        run("Sentinel", {**dead, "sentinel-3.example:26379": f"127.0.0.1:{port}"})


def test_a_cluster(tmp_path):
    with cluster(tmp_path) as port:
        with redis.Redis(port=port) as client:
            password_for(client)
        dead = {f"node-{number}.example:700{number - 1}": f"127.0.0.1:{free_port()}" for number in (1, 2)}
        run("Cluster", {**dead, "node-3.example:7002": f"127.0.0.1:{port}"})
