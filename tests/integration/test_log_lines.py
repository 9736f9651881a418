"""What the log says of a run, traced as a pool child does it: what happened to which task, and what is next."""

from __future__ import annotations

import logging
import re
import time

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict, LockedTask, LockKeyError, LockUnavailable, locked
from celery_redislock.message.delivery import Delivery
from celery_redislock.protocol.tokens import Attempt, mint, mint_nonce, origin
from celery_redislock.testing import busy
from tests.lab.app import make_app
from tests.lab.servers import free_port

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")


def nothing(key): ...


@pytest.fixture
def task(app):
    """Makes a task: ``task(lock_on_conflict="skip")``; its body does what it is told to."""

    def make(body=nothing, **options):
        options = {"base": LockedTask, "name": "lab.lines", "shared": False, "lock_args": ["key"], **options}
        return app.task(**options)(body)

    return make


@pytest.fixture
def celerys(caplog):
    """What Celery itself has logged."""
    caplog.set_level(logging.INFO, "celery.app.trace")
    return lambda: [record for record in caplog.records if record.name == "celery.app.trace"]


class TestRaise:
    """A conflict by policy ``raise`` was asked for: it is no error for the log."""

    def test_celery_logs_it_as_expected_and_names_the_holder(self, app, task, deliver, celerys):
        task = task(lock_on_conflict="raise")
        with task.lock_for("k"):
            assert deliver(app, task.name, "k")[0] == states.FAILURE
        (record,) = celerys()
        assert (record.levelno, record.exc_info) == (logging.INFO, None)
        assert "redislock:{lab.lines:" in record.getMessage()
        assert "is held by a lock outside tasks on " in record.getMessage()

    @pytest.mark.parametrize("throws", [(KeyError,), KeyError, ()])
    def test_what_the_user_expects_besides_stays_so(self, app, task, deliver, celerys, throws):
        def body(key):
            raise {"a": KeyError, "b": ValueError}[key]

        task = task(body, lock_on_conflict="raise", throws=throws)
        for key, level in {"a": logging.INFO if throws else logging.ERROR, "b": logging.ERROR}.items():
            deliver(app, task.name, key)
            assert celerys()[-1].levelno == level

    def test_an_unlucky_end_by_another_policy_is_an_error(self, app, task, deliver, celerys):
        task = task(lock_on_conflict="wait", lock_wait_for=0.1)
        with task.lock_for("k"):
            came_back = {"times": 1, "since": 1.0, "begun": False}
            state, outcome = deliver(app, task.name, "k", redislock=came_back)
        assert state == states.FAILURE
        assert isinstance(outcome.exception, LockConflict)
        assert celerys()[-1].levelno == logging.ERROR
        assert task.throws == ()


@pytest.fixture
def ours(log):
    """The lines that this package has logged."""
    return lambda: [record.getMessage() for record in log.records if record.name.startswith("celery_redislock.")]


#: What a worker's main process tells of a message that it will keep while it waits.
IN_LINE = {"redislock_delivery": Delivery("n" * 22, may_wait=True)}
HELD = r"task lab\.lines\[id\]: lock redislock:\{lab\.lines:\w+\} is held by a lock outside tasks on \S+; "


class TestWhatIsNext:
    """Celery's own line for all of these is "ignored", which reads as if work was lost."""

    @pytest.mark.parametrize(
        ("policy", "request_", "line"),
        [
            ("skip", {}, r"skipped: its result is REVOKED \(skip\)"),
            ("raise", {}, r"failed with LockConflict \(raise\)"),
            ("wait", {}, r"this worker has no room for more waiting messages; trying again in \d\.\d\d s \(wait\)"),
            ("join", {}, r"this worker has no room for more waiting messages; trying again in \d\.\d\d s \(join\)"),
            ("wait", IN_LINE, r"waiting in line \(wait\)"),
            ("join", IN_LINE, r"waiting in line \(join\)"),
            ("wait", {"expires": "2020-01-01T00:00:00"}, r"expired: its result is REVOKED \(wait\)"),
            (
                "skip",
                {"retries": 1},
                r"this worker has no room for more waiting messages; trying again in \d\.\d\d s \(always waits\)",
            ),
            ("skip", {"retries": 1, **IN_LINE}, r"waiting in line \(always waits\)"),
        ],
    )
    def test_one_line_says_it(self, app, task, deliver, ours, policy, request_, line):
        task = task(lock_on_conflict=policy)
        with task.lock_for("k"):
            deliver(app, task.name, "k", **request_)
        (said,) = ours()
        assert re.fullmatch(HELD + line, said)

    def test_who_gives_up_says_after_how_long(self, app, task, deliver, ours):
        task = task(lock_on_conflict="wait", lock_wait_for=0.1)
        with task.lock_for("k"):
            deliver(app, task.name, "k", redislock={"times": 1, "since": 1.0, "begun": False})
        said, failed = ours()
        assert failed.startswith(
            "task lab.lines[id]: its body did not run: LockConflict: the lock redislock:{lab.lines:"
        )
        assert re.fullmatch(
            HELD + r"failed with LockConflict: waited longer than lock_wait_for = 0\.1 s \(wait\)", said
        )

    def test_it_says_when_it_comes_back_the_least_that_the_broker_takes(self, app, task, deliver, ours, monkeypatch):
        monkeypatch.setattr("celery_redislock.message.republish.Broker.delays_natively", True)
        task = task(lock_on_conflict="join")
        app.backend.mark_as_retry("holder", RuntimeError("later"))
        deliver(app, task.name, "k", redislock={"times": 1, "since": time.time(), "begun": False, "joins": "holder"})
        assert "; trying again in 1.00 s (join)" in ours()[-1]

    def test_who_joins_what_was_revoked_says_so(self, app, task, deliver, ours):
        task = task(lock_on_conflict="join")
        app.backend.mark_as_revoked("holder", "by hand")
        header = {"times": 1, "since": 1.0, "begun": False, "joins": "holder"}
        assert deliver(app, task.name, "k", redislock=header)[0] == states.IGNORED
        assert ours() == ["task lab.lines[id]: joined task holder, which was revoked; its result is REVOKED (join)"]

    @pytest.mark.parametrize(("policy", "error"), [("skip", "TaskRevokedError"), ("raise", "LockConflict")])
    def test_an_eager_run_says_what_it_raises(self, task, ours, policy, error):
        task = task(lock_on_conflict=policy)
        with busy(task.lock_for("k")):
            task.apply(("k",), task_id="id")
        (said,) = ours()
        assert re.fullmatch(HELD + rf"raised {error} \({policy}\)", said)


class TestMergedCalls:
    @pytest.fixture
    def task(self, task):
        return task(lock_scope="queue", lock_arguments="latest", lock_debounce=60.0)

    def test_a_call_that_is_merged_names_the_task_whose_result_its_caller_gets(self, task, ours):
        first = task.delay("k")
        task.delay("k")
        (said,) = ours()
        assert re.fullmatch(
            r"task lab\.lines: its call for lock redislock:\{lab\.lines:\w+\} was merged into "
            rf"task {first.id}, queued by \S+; not sent: the caller gets that task's result",
            said,
        )

    def test_a_run_before_its_time_says_when_it_is_due(self, app, task, deliver, ours, queued):
        task.delay("k")
        (headers,) = queued()
        assert deliver(app, task.name, "k", redislock=headers["redislock"], **IN_LINE)[0] == states.IGNORED
        (said,) = ours()
        assert re.fullmatch(
            r"task lab\.lines\[id\]: not due yet; it runs in (60\.00|59\.\d\d) s unless another call is merged into it",
            said,
        )

    def test_a_run_that_a_newer_call_has_overtaken_names_its_task(self, app, task, deliver, ours):
        deliver(app, task.name, "k", id="newer", redislock={"number": 2})
        assert deliver(app, task.name, "k", redislock={"number": 1})[0] == states.IGNORED
        assert ours() == ["task lab.lines[id]: superseded by newer; its result is REVOKED (lock_arguments)"]


class TestOutage:
    @pytest.fixture
    def app(self, config):
        config.settings["redislock_url"] = f"redis://127.0.0.1:{free_port()}/0"
        app = make_app(config)
        yield app
        app.close()

    def test_a_run_that_comes_back_says_when_and_has_no_doubled_full_stop(self, app, task, deliver, ours):
        deliver(app, task().name, "k")
        *_, said = ours()
        assert re.fullmatch(
            r"task lab\.lines\[id\]: the lock server is unavailable for lock \S+: ConnectionError: Error 111 "
            r"connecting to \S+\. Connection refused; trying again in \d\.\d\d s",
            said,
        )
        assert not [line for line in ours() if re.search(r"\.[.;:,)]", line)]

    def test_a_late_acked_one_that_cannot_be_sent_says_that_the_broker_has_it(
        self, app, task, deliver, ours, config, caplog
    ):
        app.conf.broker_url = app.conf.broker_write_url = f"redis://127.0.0.1:{free_port()}/0"
        app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
        deliver(app, task(acks_late=True).name, "k")
        *_, said = ours()
        assert "task lab.lines[id]: must wait, but its message could not be republished (Op" in said
        assert said.endswith("); the broker delivers it again")
        assert not [line for line in ours() if re.search(r"\.[.;:,)]", line)]
        assert caplog.text.count("Traceback (most recent call last)") == 1  # by Celery, for each Reject


class TestErrorsBeforeTheBody:
    """Error trackers hear of a body's errors alone, and of what is logged as an error, but not by Celery."""

    @pytest.fixture
    def reported(self, log):
        return lambda: [record for record in log.records if record.name == "celery_redislock.task.run_hooks"]

    @pytest.mark.parametrize(
        ("options", "args", "error", "says"),
        [
            ({"lock_args": None, "lock_key": "x:{key}"}, (1.5,), LockKeyError, "lab.lines: parameter 'key' is a float"),
            ({}, (), TypeError, "missing a required argument: 'key'"),
        ],
    )
    def test_what_makes_no_key_is_reported(self, app, task, deliver, reported, celerys, options, args, error, says):
        assert deliver(app, task(**options).name, *args)[0] == states.FAILURE
        (record,) = reported()
        assert (record.levelno, record.exc_info[0]) == (logging.ERROR, error)
        assert record.getMessage().startswith(f"task lab.lines[id]: its body did not run: {error.__name__}: lab.lines")
        assert says in record.getMessage()
        assert "Traceback" not in logging.Formatter().format(record)
        assert "Traceback" in logging.Formatter().format(celerys()[-1])

    def test_an_outage_by_the_policy_raise_is_reported(self, config, task, deliver, reported):
        config.settings["redislock_url"] = f"redis://127.0.0.1:{free_port()}/0"
        app = make_app(config)
        task = app.task(name="lab.away", base=LockedTask, shared=False, lock_on_outage="raise")(nothing)
        assert deliver(app, task.name, "k")[0] == states.FAILURE
        assert [record.exc_info[0] for record in reported()] == [LockUnavailable]
        app.close()

    @pytest.mark.parametrize(("throws", "times"), [((LockConflict,), 0), ((), 1)])
    def test_a_run_that_gives_up_is_reported_unless_its_task_throws_that(
        self, app, task, deliver, reported, throws, times
    ):
        task = task(lock_on_conflict="wait", lock_wait_for=0.1, throws=throws)
        with task.lock_for("k"):
            deliver(app, task.name, "k", redislock={"times": 1, "since": 1.0, "begun": False})
        assert [record.exc_info[0] for record in reported()] == [LockConflict] * times

    @pytest.mark.parametrize("policy", ["raise", "skip", "wait"])
    def test_what_a_policy_did_is_not_reported(self, app, task, deliver, reported, policy):
        task = task(lock_on_conflict=policy)
        with task.lock_for("k"):
            deliver(app, task.name, "k")
        assert reported() == []

    def test_an_error_in_the_body_is_left_to_celery(self, app, task, deliver, reported):
        def body(key):
            raise LockKeyError("of another lock")

        assert deliver(app, task(body).name, "k")[0] == states.FAILURE
        assert reported() == []


class TestNamesOfOthers:
    """A task id is what its publisher wrote into the message; a key may hold what anybody wrote."""

    ID = "id]: all is well\n[2026-11-21 00:00:00,000: ERROR/MainProcess] forged \x1b[2J"
    SHOWN = r"id]: all is well\n[2026-11-21 00:00:00,000: ERROR/MainProcess] forged \x1b[2J"

    def test_a_task_id_forges_no_line(self, app, task, deliver, ours):
        task = task(lock_on_conflict="skip")
        with task.lock_for("k"):
            deliver(app, task.name, "k", id=self.ID)
        assert ours()[0].startswith(f"task lab.lines[{self.SHOWN}]: lock ")

    def test_a_holder_forges_no_line_and_no_reason(self, app, task, deliver, ours, locks):
        task = task(lock_on_conflict="skip")
        token = mint(mint_nonce(), Attempt(self.ID, 0, 0), origin("host\nERROR", "lab.lines"))
        locks.client.set(task.lock_for("k").name, token)
        deliver(app, task.name, "k")
        assert f" is held by task {self.SHOWN} on host\\nERROR; skipped: " in ours()[0]
        with pytest.raises(TaskRevokedError) as caught:
            app.AsyncResult("id").get(timeout=5)
        assert str(caught.value) == f"duplicate of {self.SHOWN}"

    def test_a_joined_task_forges_no_line(self, app, task, deliver, ours):
        task = task(lock_on_conflict="join")
        app.backend.mark_as_revoked(self.ID, "by hand")
        deliver(app, task.name, "k", redislock={"times": 1, "since": 1.0, "begun": False, "joins": self.ID})
        assert f"joined task {self.SHOWN}, which was revoked" in ours()[0]

    def test_a_key_that_a_message_names_forges_no_line(self, app, task, deliver, ours):
        header = {"claim": mint_nonce(), "key": f"redislock:{{{self.ID}}}"}
        assert deliver(app, task().name, "k", redislock=header)[0] == states.SUCCESS
        assert f"the publisher reserved lock redislock:{{{self.SHOWN}}} but" in ours()[0]

    @pytest.mark.parametrize("id_", ["i" * 1_000_000, "é" * 1_000_000])
    def test_of_a_task_id_of_a_megabyte_neither_key_nor_line_has_more_than_a_part(
        self, app, task, deliver, ours, locks, id_
    ):
        lengths = []

        def body(key):
            lengths.append(max(len(name) + len(locks.client.get(name)) for name in locks.client.scan_iter()))
            if key == "k":
                for same in (id_, f"{id_[:-1]}x"):
                    deliver(app, task.name, key, id=same)

        task = task(body, lock_on_conflict="skip")
        deliver(app, task.name, "k", id=id_, redelivered=True)  # it leaves a note, which names the attempt
        copy, other = (line for line in ours() if "is held by" in line)
        assert " (always waits)" in copy  # its own attempt
        assert " (skip)" in other
        lengths += [len(name) for name in locks.client.scan_iter()]
        assert max(map(len, ours())) < 1000
        assert max(lengths) < 4000
        with pytest.raises(TaskRevokedError, match="duplicate of"):
            app.AsyncResult(f"{id_[:-1]}x").get(timeout=5)  # its result is its own


@pytest.mark.parametrize("value", ["forged", 1, [1], {"lock": 1}, True])
@pytest.mark.parametrize("header", ["redislock", "redislock_delivery", "redislock_execution"])
def test_no_header_disturbs_a_plain_task_that_uses_locked(app, task, deliver, header, value):
    taken = []

    @app.task(name="lab.plain_locked", shared=False)
    def plain():
        with locked("stock:7", app=app) as lock:
            taken.append(lock.state)

    deliver(app, task().name, "k")  # some tasks of the process have a lock
    assert deliver(app, "lab.plain_locked", **{header: value})[0] == states.SUCCESS
    assert taken == ["held"]
