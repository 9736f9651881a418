"""What OpenTelemetry sees of a run's lock: in the span that is current in Celery's hooks, by the SDK's own exporter."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
from celery import states
from celery.signals import task_postrun, task_prerun
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_redislock import LockedTask, signals, tracing
from celery_redislock.testing import busy
from tests.lab.measured import MEASURED
from tests.lab.servers import free_port
from tests.lab.workers import ROOT

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

SIGNALS = [getattr(signals, name) for name in signals.__all__]


@pytest.fixture
def connected():
    """This process tells its spans of its locks."""
    before = [signal.receivers[:] for signal in SIGNALS]
    tracing.connect()
    yield
    for signal, receivers in zip(SIGNALS, before, strict=True):
        signal.receivers[:] = receivers
        signal.sender_receivers_cache.clear()


@pytest.fixture
def spans(connected):
    """The spans that have ended: one for each run, which begins and ends where those of Celery's instrumentation do."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer, running = provider.get_tracer("test"), {}

    def begin(task_id, sender, **_):
        span = tracer.start_span(f"run/{sender.name}")
        running[task_id] = span, context.attach(trace.set_span_in_context(span))

    def end(task_id, **_):
        span, token = running.pop(task_id)
        span.end()
        context.detach(token)

    task_prerun.connect(begin)
    task_postrun.connect(end)
    yield exporter.get_finished_spans
    task_prerun.disconnect(begin)
    task_postrun.disconnect(end)


def events_of(span):
    return [(event.name, dict(event.attributes)) for event in span.events]


def test_a_run_tells_its_key_and_what_became_of_it(app, tasks, deliver, spans):
    tracing.connect()  # once more changes nothing
    assert deliver(app, "lab.once", "k")[0] == states.SUCCESS
    (span,) = spans()
    key = tasks.once.lock_for("k").name
    assert dict(span.attributes) == {"redislock.key": key, "redislock.waited": 0.0}
    assert events_of(span) == [
        ("redislock.acquired", {"redislock.key": key}),
        ("redislock.released", {"redislock.key": key}),
    ]


def test_a_fence_is_an_attribute_of_the_span(app, deliver, spans):
    @app.task(base=LockedTask, bind=True, shared=False, name="lab.fenced", lock_key="fenced", lock_fence=True)
    def fenced(self):
        return self.lock.fence

    _, fence = deliver(app, "lab.fenced")
    (span,) = spans()
    assert span.attributes["redislock.fence"] == fence


def test_a_conflict_tells_holder_and_policy(app, tasks, deliver, spans):
    with busy(tasks.once.lock_for("k")) as lock:
        assert deliver(app, "lab.once", "k")[0] == states.IGNORED
        key, who = lock.name, tasks.once.lock_info("k").who
    (span,) = spans()
    about = {"redislock.key": key, "redislock.holder": who, "redislock.policy": "skip"}
    assert events_of(span) == [("redislock.conflict", about)]


@pytest.mark.skipif(MEASURED, reason="on CPython 3.11 it may stand still inside coverage.py's trace function")
def test_a_loss_that_a_thread_notices_is_told_in_the_span_of_the_run(app, tasks, deliver, spans, locks):
    key = tasks.aborted.lock_for("k").name

    def delete(**_):
        locks.client.delete(key)

    signals.lock_acquired.connect(delete)
    assert deliver(app, "lab.aborted", "k")[0] == states.FAILURE
    (span,) = spans()
    reason = "its key was deleted, expired or taken"
    assert ("redislock.lost", {"redislock.key": key, "redislock.reason": reason}) in events_of(span)


def test_an_outage_is_told(config, app, deliver, spans):
    app.conf.redislock_url = f"redis://127.0.0.1:{free_port()}/0"
    deliver(app, "lab.once", "k")
    (span,) = spans()
    ((name, about),) = events_of(span)
    assert name == "redislock.unavailable"
    assert "Connection refused" in about["redislock.reason"]


def test_a_call_that_is_merged_and_a_run_that_is_overtaken_or_replaced_name_the_other(
    app, tasks, deliver, locks, spans
):
    with TracerProvider().get_tracer("test").start_as_current_span("calls") as calls:
        ticket = tasks.latest.delay("k", 1)
        assert tasks.latest.delay("k", 2).duplicate
    key = tasks.latest.lock_for("k").name
    assert events_of(calls) == [("redislock.merged", {"redislock.key": key, "redislock.other": ticket.id})]
    deliver(app, "lab.latest", "other", id="newer", redislock={"number": 2})
    deliver(app, "lab.latest", "other", id="stale", redislock={"number": 1})
    locks.client.set(f"{tasks.newest.lock_for('k').name}:replaced:old", "2 newer old/0/0")
    deliver(app, "lab.newest", "k", id="old", redislock={"number": 1})
    told = [
        (name, about["redislock.other"]) for span in spans() for name, about in events_of(span)[-1:] if len(about) > 1
    ]
    assert told == [("redislock.superseded", "newer"), ("redislock.replaced", "newer")]


def test_a_run_without_a_span_goes_on(tasks, connected):
    assert tasks.once.apply(("k", "item")).get() == "item"


def test_without_opentelemetry_the_error_names_the_extra():
    code = "import sys; sys.modules['opentelemetry'] = None; import celery_redislock.tracing"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "pip install 'celery-redislock[opentelemetry]'" in done.stderr.splitlines()[-1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name.split(">")[0] for name in extras["opentelemetry"]] == ["opentelemetry-api"]
