"""Calls that are merged, many at once and amid faults, as a recorder sees them that knows nothing of locks."""

from __future__ import annotations

import itertools
import subprocess
import time
from contextlib import suppress

import pytest

from celery_redislock.protocol import scripts
from tests.conftest import IS_MATRIX, on_every_broker
from tests.lab.merge_judge import Judge
from tests.lab.publishers import DONE, ORDERS, Plan, publishing
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups

#: With these a publish fails at once where the broker does not answer.
NO_RETRIES = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
#: Seconds for which the publishers of the recorder publish at least, and the pauses between two faults.
FOR, BETWEEN_FAULTS = 60.0 if IS_MATRIX else 8.0, 0.4
#: One after the other, again and again. An order is carried out by the publisher that sends the next message. The first
#: fault waits for the publishers; what must be witnessed comes before the first start of a worker, which may take long.
FAULTS = ["refuse", "cut", *ORDERS, "kill", "cut off", "double", "die", "dawdle"]
#: What the recorder must see, or it proves nothing.
WITNESSED = {"jobs", "merged", "error", "killed", "dies", "dawdles", "doubles"}
#: How many processes call, and how often each.
CROWD, CALLS = 8, 125 if IS_MATRIX else 25


@pytest.fixture
def orders(tmp_path):
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


@counts_on_wake_ups("a lease of 2 s is too short for its time-outs")
class TestManyCallsWhileOneRuns:
    """They are merged into one message: one more run, with the last call's arguments."""

    @pytest.fixture
    def crowd_calls(self, config, tasks, start_worker, ledger, running, gate, orders):
        # With the lab's half second, a call of a crowd may time out on a busy machine, and is then sent alone.
        config.settings["redislock_client_options"] = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}

        def call():
            start_worker(4)
            tasks.latest.delay(0, "holder", str(gate))
            running("holder")
            tasks.latest.delay(0, "first")  # calls are merged into what has been sent, not into what is being sent
            plan = Plan("latest", 300.0, str(orders), keys=1, publishers=CROWD, calls=CALLS)
            with publishing(config, plan) as publishers:
                assert publishers.wait(300) == 0
            last = tasks.latest.delay(0, "last")
            gate.open()
            assert last.get(timeout=30) == "last"
            judge = Judge(ledger)
            assert len(judge.calls) == CROWD * CALLS
            assert judge.counts["merged"] == CROWD * CALLS
            assert ledger.items() == ["holder", "last"]

        return call

    @on_every_broker
    def test_one_more_run_follows(self, crowd_calls, nothing_is_left):
        crowd_calls()
        nothing_is_left()

    def test_so_it_is_if_the_first_reply_to_each_is_lost(self, lock_proxy, crowd_calls, nothing_is_left):
        fault = lock_proxy.drop_first_replies(b"EVALSHA", scripts.MERGE.sha.encode())
        crowd_calls()
        assert fault.struck >= CROWD * CALLS
        nothing_is_left()


class TestARecorderThatKnowsNothingOfLocks:
    """Ten publishers, two workers, and faults: of connections, workers and publishers. Redis keeps its data."""

    @pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
    def test_sees_no_stale_run_and_no_call_without_a_run_of_its_arguments_or_later_ones(
        self, config, tasks, broker_proxy, lock_proxy, start_worker, ledger, locks, orders
    ):
        """RabbitMQ delivers again at once what a worker that is cut off or killed had not acked."""
        config.settings["broker_transport_options"] = {**NO_RETRIES, "confirm_publish": True}
        workers = [start_worker(2) for _ in range(2)]
        kills = 0

        def refuse_until_a_publish_fails():
            before = Judge(ledger).counts["error"]
            broker_proxy.refuse()
            wait_until(
                lambda: Judge(ledger).counts["error"] > before or publishers.poll() is not None,
                "a publish fails",
            )
            broker_proxy.mend()

        def has_witnessed_all():
            return kills and {what for what, count in Judge(ledger).counts.items() if count} >= WITNESSED

        began = time.monotonic()
        with publishing(config, Plan("latest_short", 300.0, str(orders), moves=0.5, deadly=0.03)) as publishers:
            for fault in itertools.cycle(FAULTS):
                with suppress(subprocess.TimeoutExpired):
                    publishers.wait(BETWEEN_FAULTS)
                if publishers.poll() is not None or (time.monotonic() > began + FOR and has_witnessed_all()):
                    break
                match fault:
                    case "cut":
                        broker_proxy.cut()
                    case "cut off":
                        lock_proxy.cut()
                    case "kill":
                        workers.pop(0).kill()
                        workers.append(start_worker(2))
                        kills += 1
                    case "refuse":
                        refuse_until_a_publish_fails()
                    case order:
                        (orders / order).touch()
            (orders / DONE).touch()
            assert publishers.wait(60) == 0
        wait_until(lambda: Judge(ledger).lost() == [], "each call has a run with its arguments or later ones")
        judge = Judge(ledger)
        print(f"{dict(judge.counts)}, excused: {dict(judge.excuses())}, {kills} workers killed")
        assert judge.unexcused() == []
        assert judge.of_nobody() == []
        assert has_witnessed_all()
