"""The smallest Redis user: docs/security.md names its rights. They are enough, and none of them is idle."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest
import redis
from celery.bin.base import CLIContext
from celery.exceptions import TaskRevokedError
from click.testing import CliRunner

from celery_redislock import Lock, LockedTask, LockUnavailable, RedisLockError
from celery_redislock.app import server_of
from celery_redislock.cli.commands import locks
from celery_redislock.cli.locks import Locks
from celery_redislock.connection.connect import connect, disconnect
from celery_redislock.connection.store import LockStore
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, Share, keys_of
from celery_redislock.protocol.scripts import Call, Claim, Note, Numbered, Passed
from celery_redislock.protocol.tokens import Attempt
from celery_redislock.worker.server_check import try_lock_server
from tests.lab.app import make_app
from tests.lab.asking import Caller, acquire
from tests.lab.gate import Gate
from tests.lab.servers import wait_until
from tests.lab.topologies import cluster
from tests.lab.workers import ROOT, kept

PAGE = (ROOT / "docs" / "security.md").read_text()
PASSWORD = "a-long-password"  # noqa: S105 - the page's
#: What a worker asks at its start, to warn of evicted keys and of connections that are closed.
FOR_WARNINGS = {"config|get", "info"}
#: As the page has it, after the name of the user.
RULES = re.search(r"ACL SETUSER locks (.*?)```", PAGE, re.DOTALL)[1].split()
RIGHTS = [rule for rule in RULES if rule[0] in "+~&"]
COMMANDS = {right[1:] for right in RIGHTS if right[0] == "+"}


@pytest.fixture
def server(private_locks):
    """The test's own connection; the page's user is there."""
    private_locks.client.execute_command("ACL", "SETUSER", "locks", *RULES)
    return private_locks.client


@pytest.fixture
def config(config, private_locks, server):
    config.locks = f"unix://locks:{PASSWORD}@{private_locks.socket}?db=0"
    return config


def refused(server):
    """What the page's user was refused since the last look, but for redis-py's introduction of itself."""
    entries = [{text(name): text(value) for name, value in entry.items()} for entry in server.acl_log()]
    server.acl_log_reset()
    return [entry["object"] for entry in entries if entry["object"] != "client|setinfo"]


def text(word):
    return word.decode() if isinstance(word, bytes) else word


def test_its_rights_are_enough_for_workers_and_none_of_them_is_idle(
    config, server, app, tasks, start_worker, running, ledger, tmp_path, nothing_is_left
):
    def gate(name):
        return Gate(tmp_path / name)

    worker = start_worker(3)
    assert "lock server" not in worker.output()

    results = [tasks.work.delay("line", 0, gate("line"))]
    running(0)
    results += [tasks.work.delay("line", number) for number in (1, 2)]
    wait_until(lambda: kept(app) == 2, "two wait")
    gate("line").open()
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]

    tasks.once.delay("skip", "first", gate("skip"))
    running("first")
    with pytest.raises(TaskRevokedError, match="duplicate of"):
        tasks.once.delay("skip", "second").get(timeout=20)
    gate("skip").open()

    first = tasks.on_join.delay("join", "joined", "meets another")
    running("joined")
    assert tasks.on_join.delay("join", "joins").get(timeout=20) == "joined" == first.get(timeout=20)

    job = tasks.job.delay("job", "job", gate("job"))
    assert tasks.job.delay("job", "not sent").id == job.id
    gate("job").open()
    assert job.get(timeout=20) == "job"
    assert tasks.job_again.delay("again", "again", 1).get(timeout=20) == "again"
    queued = [tasks.queued.delay("queue", "queue", 0.3) for _ in range(3)]
    assert {result.get(timeout=20) for result in queued} == {"queue"}
    merged = [tasks.latest.apply_async(("merged", number), countdown=1) for number in range(3)]
    assert {result.get(timeout=20) for result in merged} == {2}

    limited = [tasks.three.delay("limit", f"three{number}", 0.3) for number in range(4)]
    assert len({result.get(timeout=20) for result in limited}) == 4

    fair = [tasks.by_turns.delay("turns", customer, number, 0.1) for number in range(3) for customer in "AB"]
    assert {result.get(timeout=20) for result in fair} == {0, 1, 2}

    for _ in range(2):  # both are one message
        app.send_task("lab.work", ("copy", "once only", gate("copy")), task_id="same")
    wait_until(lambda: "same" in [met["holder"] for met in ledger.conflicts()], "the copy has met it")
    gate("copy").open()
    wait_until(lambda: "[same]: dropped" in worker.output(), "the copy is dropped")

    with Lock(server_of(app).client, "redislock:{own}", timeout=10, fence=True) as lock:
        assert lock.owned()
    server.delete(keys_of("redislock:{own}").fence)  # which stays for a day

    tasks.work.delay("dies", "dies", 60)
    worker.kill_child(running("dies"))
    assert tasks.work.delay("dies", "next").get(timeout=20) == "next"
    nothing_is_left()

    assert set(refused(server)) == FOR_WARNINGS
    stats = server.info("commandstats")
    called = {name.removeprefix("cmdstat_") for name in stats}
    assert COMMANDS - called == set()
    assert PASSWORD not in worker.output()


def merge_and_run(store, key):
    """Merges a call into a message, and grants the message its key."""
    places, publishes = (keys_of(key).queued,), []
    for number in range(2):
        token = tokens.mint(tokens.mint_nonce(), Attempt(f"id{number}", 0, 0), tokens.origin("h", "t"), tokens.SENDING)
        publishes.append(Caller(Demand(key), token, places=places))
    call, publish = Call(b"a body", None), publishes[0]
    store.merge(publish, 10.0, 10.0, Passed(), call)
    store.renew([(places[0], publish.hold.token, 10.0)])
    store.merge(publishes[1], 10.0, 10.0, Passed(), call)
    run = tokens.mint(tokens.mint_nonce(), Attempt("id0", 0, 0), tokens.origin("h", "t"))
    store.acquire(Caller(Demand(key), run, claim=Claim(publish.hold.token.nonce, 10.0)), 10.0, numbered=Numbered(1))
    store.release(Demand(key), run)


NUMBERS = count()


def use_every_right(store, client):
    """Takes and gives back locks in all the ways there are; it stops where something is refused."""
    key = f"redislock:{{{next(NUMBERS)}}}"
    attempt = Attempt("id", 0, 0)
    demand, note = Demand(key), keys_of(key).note(attempt)
    mine, copy = (tokens.mint(tokens.mint_nonce(), attempt, tokens.origin("host", "task")) for _ in range(2))
    acquire(store, demand, mine, 10.0, note, fence=True)
    acquire(store, demand, copy, 10.0, note)
    store.renew([(key, mine, 10.0)])
    store.release(demand, mine, Note(note, in_any_case=True))
    acquire(store, demand, copy, 10.0, note)
    store.give_up(demand, mine.nonce, is_to_come=True)
    merge_and_run(store, f"{key}merged")
    three = Demand(f"{key}3", 3)
    acquire(store, three, mine, 10.0, claim=Claim(copy.nonce, 10.0))
    store.release(three, mine)
    turns = Demand(f"{key}turns", share=Share("a group", "a group", 1000))
    acquire(store, turns, mine, 10.0)
    acquire(store, turns, tokens.mint(tokens.mint_nonce(), Attempt("waits", 0, 0), tokens.origin("h", "t")), 10.0)
    store.release(turns, mine)
    held = Lock(client, f"{key}lock", timeout=10)
    held.acquire()
    with ThreadPoolExecutor(1) as threads:
        waits = Lock(client, f"{key}lock", timeout=10, thread_local=False)
        waiting = threads.submit(waits.acquire, blocking_timeout=1.5)
        line = keys_of(f"{key}lock").line
        wait_until(lambda: store.look(Demand(f"{key}lock")).waiting or waiting.done(), f"it waits in {line}", 10)
        held.release()
        waiting.result()


@pytest.fixture
def client(config):
    client = connect(config.locks, {"socket_timeout": 0.5, "socket_connect_timeout": 0.5})
    yield client
    LockServer.behind(client).stop()
    disconnect(client)


def test_all_rights_together_are_refused_nothing(server, client):
    use_every_right(LockStore.of(client), client)
    assert refused(server) == []


@pytest.mark.parametrize("right", RIGHTS)
def test_without_one_of_its_rights_something_is_refused(server, client, right):
    without = [rule for rule in RULES if rule != right]
    server.execute_command("ACL", "SETUSER", "locks", "reset", *without)
    with suppress(RedisLockError, redis.RedisError):
        use_every_right(LockStore.of(client), client)
    what = {"+": right[1:].lower()}.get(right[0], "redislock:")
    wait_until(lambda: any(one.startswith(what) for one in refused(server)), f"{right} is missed", 5)


@pytest.mark.parametrize(("url", "right"), [("?db=1", "+select"), ("?db=0&health_check_interval=1", "+ping")])
def test_what_a_database_and_health_checks_need_besides(server, config, right, url):
    config.locks = config.locks.replace("?db=0", url)
    server.execute_command("ACL", "SETUSER", "locks", right)
    try_lock_server(make_app(config))
    assert set(refused(server)) <= FOR_WARNINGS


@pytest.mark.parametrize("right", ["+publish", "&redislock:room:*"])
def test_a_worker_whose_user_may_not_publish_says_so_at_its_start(server, config, start_worker, right):
    """Nothing else tells it: a release whose wake-up is refused succeeds, and who waits may look much later."""
    line = "no right to publish to redislock:room:all: waiting messages may start only when a lease ends"
    assert line not in start_worker(1).output()
    server.execute_command("ACL", "SETUSER", "locks", "reset", *[rule for rule in RULES if rule != right])
    assert f"WARNING/MainProcess] {line}" in start_worker(1).output()


def test_the_command_line_says_that_it_is_refused_and_which_right_is_missing(server, config):
    app = make_app(config)
    context = CLIContext(app, no_color=True, workdir=None)
    listed = CliRunner().invoke(locks, ["list"], obj=context)
    assert listed.exit_code == 69
    assert re.match(r"Error: refused by the lock server unix://locks@\S+: NoPermissionError: .*'scan'", listed.stderr)
    assert "+scan for the command line" in listed.stderr
    server.execute_command("ACL", "SETUSER", "locks", "+scan")
    assert CliRunner().invoke(locks, ["list"], obj=context).exit_code in {0, 1}


class TestCluster:
    @pytest.fixture
    def port(self, tmp_path):
        with cluster(tmp_path) as port:
            yield port

    def test_what_it_needs_besides(self, port):
        more = re.findall(r"\+[\w|]+", re.search(r"a Cluster \| (.*)\|", PAGE)[1].replace("\\|", "|"))
        assert more == ["+cluster|slots", "+asking", "+command"]
        with redis.Redis(port=port) as server:
            server.execute_command("ACL", "SETUSER", "locks", *RULES, *more)
            assert self.works(port)
            assert refused(server) == []
            server.execute_command("ACL", "SETUSER", "locks", more[0].replace("+", "-"))
            assert not self.works(port)

    def works(self, port):
        client = connect(f"redis+cluster://locks:{PASSWORD}@127.0.0.1:{port}", {})
        try:
            with Lock(client, "redislock:{stock}", timeout=10) as lock:
                return lock.owned()
        except RedisLockError:
            return False
        finally:
            LockServer.behind(client).stop()
            client.close()


class TestTwoAppsOnOneServer:
    """docs/security.md: each has its own prefix and user."""

    @pytest.fixture
    def tenant(self, private_locks, config):
        """The task of an app with a user and a prefix, which are its own unless another prefix is named."""

        def make(name, prefix=None):
            rules = [rule.replace("redislock:", f"{name}:") for rule in RULES]
            private_locks.client.execute_command("ACL", "SETUSER", name, "reset", *rules, "+scan")
            settings = {**config.settings, "redislock_prefix": prefix or name}
            url = f"unix://{name}:{PASSWORD}@{private_locks.socket}?db=0"
            return make_app(replace(config, locks=url, settings=settings)).task(
                base=LockedTask, shared=False, name="same"
            )(body)

        def body(number):
            return number

        return make

    def test_they_do_not_meet_and_neither_can_touch_the_others_locks(self, tenant, private_locks):
        ours, theirs, intruder = tenant("shop"), tenant("books"), tenant("books", prefix="shop")
        with ours.lock_for(1) as held, theirs.lock_for(1):
            for attempt in (intruder.lock_for(1).acquire, intruder.lock_for(2).acquire, intruder.lock_for(1).locked):
                with pytest.raises(LockUnavailable, match="NoPermissionError"):
                    attempt()
            stolen = tokens.Token.of(private_locks.client.get(held.key))
            for command in (commands.renew([(held.key, stolen, 10.0)]), commands.release(Demand(held.key), stolen)):
                with pytest.raises(LockUnavailable, match="NoPermissionError"):
                    server_of(intruder.app).store.send(command)
            held.check()
            assert held.owned()
            assert [row.part.key for row in Locks(ours.app).all()] == [held.key]
            with pytest.raises(redis.exceptions.NoPermissionError):
                list(Locks(intruder.app).all())
        assert private_locks.client.keys() == []
