"""What cannot work says so, to the right person, and locks, loses or crashes nothing."""

from __future__ import annotations

import re

import pytest

from celery_redislock import LockConfigError, LockedTask, LockKeyError
from tests.lab import nursery
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

HOSTILE = [
    None, 0, -1, 1e308, "", "x" * 10_000, [], [[]], {}, {"times": "many"}, {"times": 10**30, "since": 1},
    {"times": 1, "since": "yesterday"}, {"times": True, "since": 1}, ["nonce", 1.0],
    {"times": -1, "since": 1.0}, {"times": 1, "since": float("nan")},
]  # fmt: skip


def test_arguments_that_make_no_key_fail_the_task_naming_the_parameter(tasks, start_worker, ledger, locks):
    start_worker(1)
    with pytest.raises(LockKeyError, match="'sku' is a float"):
        tasks.keyed.delay(1.5).get(timeout=10)
    assert ledger.runs() == []
    assert locks.client.keys() == []


def test_arguments_that_do_not_fit_the_signature_get_celerys_own_error(app, tasks, start_worker, locks):
    start_worker(1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'key'"):
        tasks.work.delay()
    for args, kwargs in [((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"key": 2}), ((1,), {"nope": 2})]:
        with pytest.raises(TypeError, match=r"lab\.work\(\)"):
            app.send_task("lab.work", args, kwargs).get(timeout=10)
    assert locks.client.keys() == []


@pytest.mark.parametrize("name", ["redislock", "redislock_delivery", "redislock_execution"])
def test_hostile_headers_are_headers_of_nobody(tasks, start_worker, ledger, name):
    worker = start_worker(2)
    results = [tasks.work.apply_async((n, n), headers={name: value}) for n, value in enumerate(HOSTILE)]
    results += [tasks.again.apply_async((f"again{n}", 0), headers={name: value}) for n, value in enumerate(HOSTILE)]
    for result in results:
        result.get(timeout=10)
    assert "Traceback" not in worker.output()
    assert ledger.conflicts() == []


def test_hostile_headers_do_not_disturb_a_conflict(tasks, start_worker, ledger, gate):
    worker = start_worker(4)
    tasks.work.delay("k", "first", file=str(gate))
    wait_until(ledger.runs, "it runs")
    results = [tasks.work.apply_async(("k", n), headers={"redislock": value}) for n, value in enumerate(HOSTILE)]
    wait_until(lambda: len(ledger.conflicts()) >= len(HOSTILE), "all have met it")
    gate.open()
    assert [result.get(timeout=60) for result in results] == list(range(len(HOSTILE)))
    assert "Traceback" not in worker.output()
    assert ledger.overlaps() == []


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("redislock_leas", 5, "redislock_lease"),
        ("redislock_lease", "soon", "seconds greater than 0"),
        ("redislock_on_conflict", "skipp", "'skip'"),
        ("redislock_enabled", "yes", "True or False"),
        ("redislock_url", "http://nowhere", "redis://"),
        ("redislock_url", "redis://localhost:port/0", "redislock_url"),
        ("redislock_url", "sentinel://one;sentinel://two", "set master_name"),
        ("redislock_url", "redis+cluster://one:7000/3", "a Cluster has only database 0"),
        ("redislock_client_options", {"nonsense": 1}, "'nonsense'"),
        ("redislock_lease", 1.0, "at least 1.5"),
        ("redislock_wait_for", 0, "seconds greater than 0"),
        ("redislock_waiting_limit", -1, "a whole number, 0 or greater"),
        ("redislock_on_conflict", "join", "or a result backend such as Redis"),
    ],
)
def test_a_bad_setting_fails_at_the_first_use_of_a_task_and_at_every_later_one(config, setting, value, allowed):
    config.settings[setting] = value
    app = make_app(config)
    app.conf.task_ignore_result = True

    @app.task(base=LockedTask, shared=False)
    def task(key): ...

    for _ in range(2):  # a broken task must not come to life at the second look
        with pytest.raises(LockConfigError, match=setting) as caught:
            task.delay("k")
        assert allowed in str(caught.value)
        assert "lock_" not in str(caught.value).replace("redislock_", "")  # it was no option of the task


def test_a_worker_with_a_bad_setting_does_not_start_and_says_why(config, tmp_path):
    config.settings["redislock_lease"] = -1
    env = {"LAB_CONFIG": config.dump(), "LAB_READY": str(tmp_path / "ready"), "PATH": "", "PYTHONPATH": str(ROOT)}
    ended = nursery.run("celery", "-A", "tests.lab.worker", "worker", "-c", "1", env=env)
    assert ended.returncode != 0
    assert "redislock_lease = -1 is not allowed; allowed: seconds greater than 0" in ended.stderr + ended.stdout


def test_lock_options_on_a_task_without_the_base_give_a_warning_at_worker_start(start_worker):
    worker = start_worker(1)
    assert "task lab.misdeclared has lock_args, lock_lease but no lock: add base=LockedTask" in worker.output()


def test_the_warning_of_lock_options_without_the_base_is_a_line_of_the_workers_log(start_worker):
    """Before Celery has set up its logging a line goes to the standard error alone, and is in no log file."""
    worker = start_worker(1)
    assert re.search(r"^\[.*: WARNING/MainProcess\] task lab\.misdeclared has ", worker.output(), re.MULTILINE)


def test_options_that_task_annotations_set_for_all_tasks_give_no_warning_of_celerys_own(config, start_worker):
    config.settings["task_annotations"] = {"*": {"lock_lease": 60.0}}
    output = start_worker(1).output()
    assert "task lab.misdeclared has lock_args, lock_lease but no lock" in output
    assert "task celery." not in output
