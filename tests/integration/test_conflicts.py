"""Conflicts of one delivered message, traced as a pool child does it, where something else fails as well."""

from __future__ import annotations

import time

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_redislock.protocol import tokens
from celery_redislock.protocol.scripts import RELEASE
from celery_redislock.protocol.tokens import Attempt
from tests.lab.app import make_app
from tests.lab.interruption import raised_at
from tests.lab.proxy import Proxy
from tests.lab.servers import wait_until

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")


def joining(holder):
    return {"redislock": {"times": 1, "since": time.time() - 1, "begun": False, "joins": holder}}


class TestJoin:
    def test_a_copy_of_a_message_that_has_joined_is_dropped_and_sends_its_link_no_second_time(
        self, deliver, app, tasks, queued
    ):
        app.backend.mark_as_done("holder", "outcome")
        request = {**joining("holder"), "callbacks": [tasks.plain.si("link")]}
        assert deliver(app, "lab.on_join", "k", **request) == (states.SUCCESS, "outcome")
        assert deliver(app, "lab.on_join", "k", **request, redelivered=True)[0] == states.IGNORED
        assert [message["task"] for message in queued()] == ["lab.plain"]
        assert app.AsyncResult("id").get(timeout=5) == "outcome"

    def test_a_copy_of_a_message_that_has_not_yet_joined_joins(self, deliver, app, ledger):
        app.backend.mark_as_done("holder", "outcome")
        app.backend.mark_as_retry("id", RuntimeError("waits"))
        assert deliver(app, "lab.on_join", "k", **joining("holder"), redelivered=True) == (states.SUCCESS, "outcome")
        assert ledger.runs() == []

    def test_a_revoked_holder_revokes(self, deliver, app, ledger):
        app.backend.mark_as_revoked("holder", "by hand")
        assert deliver(app, "lab.on_join", "k", **joining("holder"))[0] == states.IGNORED
        with pytest.raises(TaskRevokedError, match="joined holder, which was revoked"):
            app.AsyncResult("id").get(timeout=5)
        assert ledger.runs() == []

    def test_an_exception_that_the_holder_has_returned_is_a_result_and_no_error(self, deliver, config, ledger):
        config.settings.update(result_serializer="pickle", result_accept_content=["pickle"])
        app = make_app(config)
        app.backend.mark_as_done("holder", ValueError("returned"))
        state, outcome = deliver(app, "lab.on_join", "k", **joining("holder"))
        assert (state, repr(outcome)) == (states.SUCCESS, "ValueError('returned')")
        assert repr(app.AsyncResult("id").get(timeout=5)) == "ValueError('returned')"
        assert ledger.runs() == []
        app.close()

    def test_two_that_join_a_holder_without_an_outcome_run_one_after_the_other(
        self, deliver, app, tasks, queued, ledger
    ):
        with tasks.on_join.lock_for("k"):  # instead of the first one's run
            assert deliver(app, "lab.on_join", "k", "second", **joining("dead"))[0] == states.IGNORED
        (message,) = queued()
        assert message["redislock"]["joins"] == "dead"
        assert deliver(app, "lab.on_join", "k", "second", redislock=message["redislock"])[1] == "second"
        assert ledger.items() == ["second"]

    def test_runs_in_the_place_of_a_holder_that_was_to_run_again_and_has_not_within_lock_queue_ttl(
        self, deliver, app, ledger
    ):
        app.backend.mark_as_retry("lost", RuntimeError("later"))
        header = joining("lost")
        assert deliver(app, "lab.on_join", "k", "item", **header)[0] == states.IGNORED
        header["redislock"]["since"] -= 3600
        assert deliver(app, "lab.on_join", "k", "item", **header) == (states.SUCCESS, "item")
        assert ledger.items() == ["item"]

    def test_lock_wait_for_ends_it_naming_the_task_that_it_waits_for(self, deliver, config, locks):
        config.settings["redislock_wait_for"] = 0.5
        app = make_app(config)
        app.backend.mark_as_retry("holder", RuntimeError("later"))
        state, outcome = deliver(app, "lab.on_join", "k", **joining("holder"))
        assert state == states.FAILURE
        assert outcome.exception.holder.task_id == "holder"
        assert "is held by task holder" in str(outcome.exception)
        assert locks.client.keys() == []
        app.close()

    def test_a_soft_time_limit_while_it_gives_the_key_back_leaves_that_to_the_end_of_the_run(
        self, deliver, app, locks, lock_proxy
    ):
        locks.client.script_load(RELEASE.text)
        app.backend.mark_as_retry("holder", RuntimeError("later"))
        release = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
        with raised_at(release, SoftTimeLimitExceeded()):
            assert deliver(app, "lab.on_join", "k", **joining("holder"))[0] == states.FAILURE
        assert release.struck == 1
        wait_until(lambda: locks.client.keys() == [], "nothing is left")

    def test_every_lock_that_it_takes_is_said_to_be_released(self, deliver, app, tasks):
        from celery_redislock import signals

        seen = []

        def note(signal, **_):
            seen.append(signal is signals.lock_acquired)

        for signal in (signals.lock_acquired, signals.lock_released):
            signal.connect(note, sender=tasks.on_join)
        app.backend.mark_as_retry("holder", RuntimeError("later"))
        try:
            assert deliver(app, "lab.on_join", "k", **joining("holder"))[0] == states.IGNORED
        finally:
            for signal in (signals.lock_acquired, signals.lock_released):
                signal.disconnect(note, sender=tasks.on_join)
        assert seen == [True, False]


@pytest.mark.parametrize(("policy", "header"), [("wait", {}), ("join", {}), ("join", joining("holder"))])
def test_a_result_backend_that_is_away_keeps_no_message_from_coming_back(
    deliver, config, queued, policy, header, caplog
):
    """To show RETRY is a courtesy; the work is in the message."""
    config.backend = "redis+socket:///nowhere"
    config.settings["result_backend_transport_options"] = {"retry_policy": {"max_retries": 1, "interval_start": 0}}
    app = make_app(config)
    with app.tasks[f"lab.on_{policy}"].lock_for("k"):
        assert deliver(app, f"lab.on_{policy}", "k", "item", **header)[0] == states.IGNORED
    (message,) = queued()
    assert message["redislock"]["times"] == (2 if header else 1)
    assert "could not store RETRY while it waits" in caplog.text
    app.close()


def test_a_result_backend_that_is_away_keeps_no_key_of_a_run_that_ends_as_ignored(deliver, config, caplog):
    config.backend = "redis+socket:///nowhere"
    app = make_app(config)
    assert deliver(app, "lab.ends", "k", "ignore", retries=1)[0] == states.IGNORED
    assert "could not store IGNORED" in caplog.text
    wait_until(lambda: app.tasks["lab.ends"].lock_info("k") is None, "the key is free")
    app.close()


class TestASoftTimeLimitWhileTheResultBackendIsSilent:
    """Nothing else may swallow it: whoever wrote `soft_time_limit` counts on it."""

    @pytest.fixture
    def silent(self, config):
        """An app, and the fault that strikes as soon as its result backend is asked for a state."""
        with Proxy(config.backend).serve() as results:
            config.backend = results.url
            app = make_app(config)
            yield app, lambda: results.drop_command(to=b"GET")
            app.close()

    @pytest.mark.parametrize("policy", ["skip", "wait"])
    def test_ends_the_run_that_asks_of_the_holder_or_stores_retry(self, deliver, silent, locks, policy):
        app, silence = silent
        held = tokens.mint(tokens.mint_nonce(), Attempt("holder", 0, 0), tokens.origin("w@host", "lab.work"))
        locks.client.set("redislock:{k}", held.value)
        with raised_at(silence(), SoftTimeLimitExceeded()):
            state, outcome = deliver(app, f"lab.on_{policy}", "k")
        assert state == states.FAILURE
        assert isinstance(outcome.exception, SoftTimeLimitExceeded)

    def test_leaves_no_key_behind_where_the_run_ends_as_ignored(self, deliver, silent):
        app, silence = silent
        app.backend.mark_as_retry("id", RuntimeError("the attempt before"))
        with raised_at(silence(), SoftTimeLimitExceeded()):
            assert deliver(app, "lab.ends", "k", "ignore", retries=1)[0] == states.IGNORED
        wait_until(lambda: app.tasks["lab.ends"].lock_info("k") is None, "the key is free", 10)
