"""What OpenTelemetry's Celery instrumentation shows of locked tasks, in the publisher and in the worker."""

from __future__ import annotations

import json

import pytest

from tests.lab.servers import wait_until

pytest.importorskip("opentelemetry.instrumentation.celery", exc_type=ImportError)

SHOP = """
import json
import os
import time

from celery import Celery
from celery.signals import worker_process_init
from celery_redislock import LockedTask
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

REDIS_URL = os.environ["REDIS_URL"]
app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL)


class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:  # a line at a time, so that processes do not mix theirs
            for span in spans:
                told = {
                    "name": span.name,
                    "trace": span.context.trace_id,
                    "id": span.context.span_id,
                    "parent": span.parent and span.parent.span_id,
                    "task": span.attributes["messaging.message.id"],
                    "state": span.attributes.get("celery.state"),
                    "status": span.status.status_code.name,
                    "errors": [event.attributes["exception.type"] for event in span.events],
                }
                file.write(json.dumps(told) + "\\n")
        return SpanExportResult.SUCCESS


@worker_process_init.connect
def trace_this_process(**_):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToFile()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="skip")
def skip(key): ...


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="wait")
def wait(key): ...


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="raise")
def refuse(key): ...


@app.task(base=LockedTask, lock_key="{key}", lock_scope="job")
def job(key):
    while not os.path.exists("go"):
        time.sleep(0.01)
"""

PROGRAM = """
import json
from celery_redislock.testing import busy
from shop import job, refuse, skip, trace_this_process, wait

trace_this_process()
results = {"done": skip.delay("free")}
with busy(skip.lock_for("k")):
    results |= {"skipped": skip.delay("k"), "waited": wait.delay("k"), "refused": refuse.delay("k")}
    for name in ("skipped", "refused"):
        results[name].get(timeout=30, propagate=False)
    while not (skip.lock_info("k").waiting_processes and results["waited"].state == "RETRY"): pass
results["keyless"] = skip.delay(1.5)
results["job"] = job.delay("j")
assert all(job.delay("j").duplicate for _ in range(3))
open("go", "w").close()
for result in results.values():
    result.get(timeout=30, propagate=False)
print(json.dumps({name: result.id for name, result in results.items()}))
"""


@pytest.fixture
def spans(project):
    """The spans of each call in the program, in the order in which they ended: those of its publishes and its runs."""
    log = project.start_worker("shop")
    ids = json.loads(project.run("-c", PROGRAM))
    file = project.folder / "spans"

    def look(kind):
        told = [json.loads(line) for line in file.read_text().splitlines()]
        told = [span for span in told if span["name"].startswith(kind)]
        return {name: [span for span in told if span["task"] == task_id] for name, task_id in ids.items()}

    ended = ("SUCCESS", "FAILURE", "IGNORED")
    wait_until(lambda: all(of and of[-1]["state"] in ended for of in look("run").values()), "all runs have ended")
    yield look("apply_async"), look("run")
    for complaint in ("Failed to detach context", "no existing span found"):
        assert complaint not in log()


def test_each_run_has_its_span_below_that_of_its_publish(spans):
    publishes, runs = spans
    shown = {name: [(run["state"], run["status"], *run["errors"]) for run in of] for name, of in runs.items()}
    done = ("SUCCESS", "UNSET")
    assert shown == {
        "done": [done],
        "skipped": [("IGNORED", "UNSET")],
        "waited": [("IGNORED", "UNSET"), done],
        "refused": [("FAILURE", "ERROR", "celery_redislock.errors.LockConflict")],
        "keyless": [("FAILURE", "ERROR", "celery_redislock.errors.LockKeyError")],
        "job": [done],
    }
    for name, of in runs.items():
        (publish,) = publishes[name]  # what is not sent has no span
        assert {(run["trace"], run["parent"]) for run in of} == {(publish["trace"], publish["id"])}


MEASURED = """
import json
import os
import time

from celery import Celery
from celery_redislock import LockedTask, tracing
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader

REDIS_URL = os.environ["REDIS_URL"]
app = Celery("measured", broker=REDIS_URL, backend=REDIS_URL)


class ToFile(MetricExporter):
    def export(self, data, **_):
        with open("metrics", "a") as file:
            for of in data.resource_metrics:
                for metric in (one for scope in of.scope_metrics for one in scope.metrics):
                    for point in metric.data.data_points:
                        value = getattr(point, "value", None)
                        file.write(json.dumps([metric.name, dict(point.attributes), value]) + "\\n")
        return MetricExportResult.SUCCESS

    def shutdown(self, *_, **more): ...
    def force_flush(self, *_): return True


metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(ToFile(), 100)]))
tracing.connect()


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="wait")
def wait(key):
    while not os.path.exists("go"):
        time.sleep(0.01)
"""


def test_the_gauges_of_a_worker_reach_the_apps_own_reader(project):
    (project.folder / "measured.py").write_text(MEASURED)
    project.start_worker("measured")
    project.run("-c", "from measured import wait; wait.delay('k'); wait.delay('k')")
    file = project.folder / "metrics"

    def told(name, **about):
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")]
        about = {f"redislock.{key}": value for key, value in about.items()}
        return [value for which, attributes, value in lines if (which, attributes) == (f"redislock.{name}", about)]

    task = {"task": "measured.wait"}
    wait_until(lambda: 1 in told("worker.waiting", **task), "the second waits")
    wait_until(lambda: any(age > 1 for age in told("worker.longest_hold_seconds", **task)), "the first holds its lock")
    assert 1 in told("worker.server_up")
    (project.folder / "go").touch()
    wait_until(lambda: told("worker.waiting", **task)[-1] == 0, "nothing waits")
