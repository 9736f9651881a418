"""The queries of the Grafana dashboard and of docs/monitoring.md, evaluated by Prometheus's own tool on our series."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY

from celery_redislock import metrics
from tests.lab.workers import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
RULES: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
ALERTS = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
EVERY = 15
"""Seconds between two scrapes."""


def exported() -> dict[str, set[str]]:
    """The names of all samples that we export, each with the names of its labels."""
    for counter, labels in (
        (metrics.ACQUIRED, ()), (metrics.UNAVAILABLE, ()), (metrics.CONFLICTS, ("wait",)), (metrics.LOST, ("gone",)),
        (metrics.MERGED, ()), (metrics.SUPERSEDED, ()), (metrics.REPLACED, ()),
    ):  # fmt: skip
        counter.labels("dashboard.task", *labels).inc()
    for histogram in (metrics.HOLD, metrics.WAIT):
        histogram.labels("dashboard.task").observe(2000.0)
    return {sample.name: set(sample.labels) for sample in samples()}


def samples() -> list[Any]:
    """What is counted of a task, and the gauges of a worker."""
    task = "dashboard.task"
    worker = metrics.families({task: dict.fromkeys(metrics.GAUGES, 2000.0)}, is_up=True)
    return [
        sample
        for metric in (*REGISTRY.collect(), *worker)
        for sample in metric.samples
        if sample.name.startswith("celery_redislock_") and sample.labels.get("task", task) == task
    ]


def names_in(query: str) -> list[str]:
    return re.findall(r"\bcelery_redislock_\w+", query)


def labels_in(query: str) -> set[str]:
    """Those that a query selects or sums by."""
    summed = [name.strip() for names in re.findall(r"\bby \(([^)]*)\)", query) for name in names.split(",")]
    return {*summed, *re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)}


@pytest.mark.parametrize("query", [*QUERIES, *ALERTS])
def test_every_metric_and_label_of_a_query_is_exported(query: str) -> None:
    known = exported()
    names = names_in(query)
    assert names
    assert [name for name in names if name not in known] == []
    assert labels_in(query) <= set.union(*(known[name] for name in names))


def test_the_dashboard_lists_tasks_and_shows_every_metric_that_the_page_names() -> None:
    assert [names_in(query) for query in VARIABLES] == [["celery_redislock_acquired_total"]]
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for query in QUERIES for name in names_in(query)}
    table = set(re.findall(r"^\| `(celery_redislock_\w+)", PAGE, re.MULTILINE))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if not name.endswith("_created")}
    assert shown == table == families


def test_the_check_sees_what_is_not_exported() -> None:
    assert names_in("rate(celery_redislock_gone_total[5m])") == ["celery_redislock_gone_total"]
    assert labels_in('sum by (a, b) (rate(x{c=~"$d"}[5m]))') == {"a", "b", "c"}


@pytest.mark.parametrize("query", [*QUERIES, *ALERTS])
def test_every_query_is_promql_and_each_function_gets_what_it_takes(query: str) -> None:
    promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$task", ".*"))


@pytest.mark.parametrize("wrong", ["sum by (task) (rate(x[1m])", "rate(x)", "histogram_quantile(x)"])
def test_the_parser_refuses_what_is_none(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        promql_parser.parse(wrong)


def series() -> list[dict[str, str]]:
    """What is exported, as it would be scraped for an hour: everything grows by its value from scrape to scrape."""
    return [
        {"series": sample.name + json_labels(sample.labels), "values": f"0+{sample.value:g}x{3600 // EVERY}"}
        for sample in samples()
        if not sample.name.endswith("_created")
    ]


def json_labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def test_prometheus_finds_something_for_every_query(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool, of Debian's package prometheus, is missing")
    exported()
    asked = [query.replace("$__rate_interval", "1m").replace("$task", ".*") for query in [*QUERIES, *ALERTS]]
    found = {"exp_samples": [{"labels": "{}", "value": 1}]}
    tests = [{"expr": f"count({query}) > bool 0", "eval_time": "1h", **found} for query in asked]
    file = tmp_path / "queries.yml"
    group = {"interval": f"{EVERY}s", "input_series": series(), "promql_expr_test": tests}
    file.write_text(yaml.safe_dump({"evaluation_interval": f"{EVERY}s", "tests": [group]}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(RULES))
    subprocess.run([tool, "check", "rules", str(tmp_path / "alerts.yml")], check=True)


def alerts(folder: Path, series: dict[str, str], at: str) -> set[str]:
    """The alerts of the page that fire at a time after the begin of some series, a sample for each 15 seconds."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool, of Debian's package prometheus, is missing")
    (folder / "alerts.yml").write_text(yaml.safe_dump(RULES))
    given = [{"series": name, "values": values} for name, values in series.items()]
    names, fires = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]], set()
    for name in names:
        query = {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})', "eval_time": at, "exp_samples": []}
        test = {"interval": f"{EVERY}s", "input_series": given, "promql_expr_test": [query]}
        file = folder / f"{name}.yml"
        file.write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": [test]}))
        done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "got:" in done.stdout + done.stderr, done.stdout + done.stderr
        if done.returncode:
            fires.add(name)
    return fires


HANGS = {
    'celery_redislock_worker_oldest_wait_seconds{task="shop.sync",instance="a"}': "0+15x60",
    'celery_redislock_worker_oldest_wait_seconds{task="shop.sync",instance="b"}': "0x60",
}


def test_one_wait_that_only_grows_raises_its_alert_within_its_for(tmp_path: Path) -> None:
    assert alerts(tmp_path, HANGS, "6m") == set()
    assert alerts(tmp_path, HANGS, "7m30s") == {"OldestWait"}


def test_a_lock_server_that_answers_no_worker_raises_its_alert_even_if_nothing_asks_for_a_lock(tmp_path: Path) -> None:
    up = 'celery_redislock_worker_server_up{instance="a"}'
    assert alerts(tmp_path, {up: "1x8 0x20"}, "2m") == set()
    assert alerts(tmp_path, {up: "1x8 0x20"}, "4m30s") == {"LockServerAway"}
