"""What `celery_redislock.worker.worker_port` needs of Celery, kombu and billiard."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from billiard import Pipe
from celery import Celery
from celery.app.amqp import AMQP
from celery.concurrency.prefork import TaskPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.exceptions import WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.worker import WorkController, state
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu import Connection, Exchange, Queue
from kombu.common import QoS
from kombu.utils.limits import TokenBucket

from celery_redislock.worker import worker_port
from tests.lab.servers import wait_until


@pytest.fixture
def app():
    app = Celery("contracts", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


def request_of(app: Celery) -> Request:
    @app.task(name="contracts.task", shared=False)
    def task() -> None: ...

    sent = AMQP(app).create_task_message(str(uuid4()), "contracts.task", (), {})
    message: Any = SimpleNamespace(
        headers=sent.headers, properties=sent.properties, body=sent.body, payload=sent.body, decode=lambda: sent.body
    )
    message.delivery_info, message.content_type, message.content_encoding = {}, "application/json", "utf-8"
    return Request(message, app=app, decoded=True, body=sent.body)


class Worked:
    """What a consumer does with messages of a bucket, by the methods that Celery's own has."""

    disable_rate_limits = False

    def __init__(self, bucket: TokenBucket) -> None:
        self.task_buckets: dict[str, TokenBucket | None] = {"limited": bucket, "free": None}
        self.scheduled: list[TokenBucket] = []
        self.moved: list[object] = []
        self._schedule_bucket_request = self.scheduled.append
        self._limit_move_to_pool = self.moved.append


# The pool and its semaphore.


#: In a process of its own: this one has threads, and a child that is forked from it may stand still for ever.
PREFORK = """
from celery import Celery
from celery.concurrency.prefork import TaskPool
from celery_redislock.worker import worker_port

app = Celery("contracts", broker="memory://", backend="cache+memory://")
pool = TaskPool(2, app=app, initargs=(app, "contracts@lab"))
pool.start()
print(sorted(worker_port.idle_children(pool)), sorted(pool.info["processes"]))
pool.terminate()
"""


def test_the_idle_children_of_a_fresh_prefork_pool_are_all_its_processes():
    run = subprocess.run([sys.executable, "-c", PREFORK], capture_output=True, text=True, timeout=60, check=True)
    ours, known = re.findall(r"\[(\d+), (\d+)\]", run.stdout)
    assert ours == known


#: As `PREFORK`, with an event loop.
IN_A_HUB = """
from inspect import isgenerator
from types import SimpleNamespace
from celery import Celery
from celery.concurrency.prefork import TaskPool
from kombu.asynchronous import Hub, set_event_loop
from celery_redislock.worker import worker_port

app = Celery("contracts", broker="memory://", backend="cache+memory://")
hub = Hub()
set_event_loop(hub)
pool = TaskPool(1, app=app, initargs=(app, "contracts@lab"), threads=False)
pool.start()
pool.register_with_event_loop(hub)
worker_port.HEARD_WITHIN = 30.0
"""

#: The event loop goes on until the child has been given the message, and not until it has been heard.
HEARING = f"""{IN_A_HUB}
accepted = []
job = pool.apply_async(len, ("four",), accept_callback=lambda *_: accepted.append("accepted"))
loop = hub.create_loop()
while not job._write_to:
    next(loop)
before = [*accepted]
worker_port.hear_children(SimpleNamespace(hub=hub, pool=pool))
print(before, accepted, job.accepted())
pool.terminate()
"""


def test_a_child_that_was_given_a_message_is_heard_to_accept_it_without_the_event_loop():
    run = subprocess.run([sys.executable, "-c", HEARING], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[] ['accepted'] True\n"


#: What is idle before a child is given a message, from then on, from its acceptance on, and after its end.
GIVEN = f"""{IN_A_HUB}
idle = [worker_port.idle_children(pool)]
job = pool.apply_async(len, ("four",))
loop = hub.create_loop()
for done in (lambda: job._write_to, job.accepted, job.ready):
    while not done():
        next(loop)
    idle.append(worker_port.idle_children(pool))
print([len(pids) for pids in idle])
pool.terminate()
"""


def test_a_child_is_not_idle_while_it_has_a_message():
    run = subprocess.run([sys.executable, "-c", GIVEN], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[1, 0, 0, 1]\n"


#: The pipe is too small for the result: the child writes on once its begin has been read, and stands still before that.
HALF_READ = f"""{IN_A_HUB}
import os, psutil, signal, time
from billiard import active_children
results = []
job = pool.apply_async("x".__mul__, (1_000_000,), callback=results.append)
loop = hub.create_loop()
while not job.accepted():
    next(loop)
(child,) = active_children()
pipe = getattr(child.outq, "_reader")
assert pipe.poll(30)
os.kill(child.pid, signal.SIGSTOP)
while psutil.Process(child.pid).status() != "stopped":
    time.sleep(0.01)
read, args = hub.readers[pipe.fileno()]
read(*args)
print(isgenerator(hub.readers[pipe.fileno()][0]), results)
os.kill(child.pid, signal.SIGCONT)
worker_port.hear_children(SimpleNamespace(hub=hub, pool=pool))
print([len(result) for result in results])
pool.terminate()
"""


def test_a_result_of_which_half_has_come_is_read_to_its_end():
    """Celery before 5.7 would take its rest for a message, and hang."""
    run = subprocess.run([sys.executable, "-c", HALF_READ], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "True []\n[1000000]\n"


def test_what_fails_as_a_child_is_heard_is_logged_and_the_stop_goes_on(caplog):
    ours, theirs = Pipe()
    child = SimpleNamespace(outq=SimpleNamespace(_reader=ours))
    pool = SimpleNamespace(_pool=SimpleNamespace(_fileno_to_outq={ours.fileno(): child}))

    def fail() -> None:
        raise MemoryError("of a body")

    theirs.send("a result")
    worker_port.hear_children(SimpleNamespace(hub=SimpleNamespace(readers={ours.fileno(): (fail, ())}), pool=pool))
    assert "could not read what a child of the pool has written" in caplog.text
    theirs.close()
    ours.close()


def test_a_child_whose_pipe_is_closed_is_no_error_however_often_it_is_looked_at(caplog):
    """A child that was recycled: its file number belongs to another reader by now, and its entry is still there."""
    ours, theirs = Pipe()
    gone = SimpleNamespace(outq=SimpleNamespace(_reader=ours))
    number, unheard = ours.fileno(), SimpleNamespace(_write_to=gone, accepted=lambda: False)
    ours.close()
    theirs.close()
    pool = SimpleNamespace(_pool=SimpleNamespace(_fileno_to_outq={number: gone}, _cache={1: unheard}))
    worker_port.hear_children(SimpleNamespace(hub=SimpleNamespace(readers={number: (print, ())}), pool=pool))
    assert caplog.text == ""


@pytest.mark.parametrize("pool", [None, object()], ids=["no pool", "one without children"])
def test_nobody_is_waited_for_where_there_are_no_children(pool):
    worker_port.hear_children(SimpleNamespace(hub=None, pool=SimpleNamespace(_pool=pool)))


def test_what_is_to_be_done_before_a_consumer_closes_is_done_while_its_requests_are_known(app):
    seen: list[list[Request]] = []
    controller = SimpleNamespace(use_eventloop=False, semaphore=None, state=state)
    consumer: Any = Consumer(lambda request: None, app=app, controller=controller)
    request = request_of(app)
    worker_port.before_close(consumer, lambda: seen.append([*state.reserved_requests]))
    state.task_reserved(request)
    consumer.blueprint.close(consumer)
    consumer.on_close()
    assert seen == [[request], []]


def test_a_worker_has_the_methods_that_give_messages_to_its_pool_with_and_without_a_semaphore():
    names = [inspect.signature(getattr(WorkController, name)) for name in ("_process_task", "_process_task_sem")]
    assert [[*one.parameters][1:] for one in names] == [["req"], ["req"]]
    assert "_process_task_sem" in inspect.getsource(WorkController._process_task_sem)
    controller = SimpleNamespace(_process_task_sem=print)
    assert worker_port.is_behind_semaphore(SimpleNamespace(on_task_request=print, controller=controller))
    assert not worker_port.is_behind_semaphore(SimpleNamespace(on_task_request=repr, controller=controller))


# A task's `rate_limit`.


def test_a_consumer_has_what_works_with_buckets():
    for name in ("_schedule_bucket_request", "_limit_move_to_pool", "bucket_for_task"):
        assert callable(getattr(Consumer, name))
    source = inspect.getsource(Consumer.reset_rate_limits)
    assert "task_buckets" in source


def test_a_message_is_put_into_a_bucket_in_front_and_found_there():
    bucket = TokenBucket(1.0)
    consumer = Worked(bucket)
    bucket.add(("second", 1))
    worker_port.insert_into(consumer, bucket, 0, "first")
    assert worker_port.bucket_of(consumer, "limited") is bucket
    assert worker_port.bucket_of(consumer, "free") is None
    assert worker_port.requests_in(bucket) == ["first", "second"]
    assert worker_port.limited_requests(consumer) == ["first", "second"]
    assert consumer.scheduled == [bucket]


def test_a_token_that_is_given_back_is_there_and_the_next_message_has_it():
    bucket = TokenBucket(0.001)
    consumer = Worked(bucket)
    assert bucket.can_consume(1)
    assert not bucket.can_consume(1)
    worker_port.give_rate_token_back(consumer, "limited")
    assert bucket.can_consume(1)
    bucket.add(("next", 1))
    worker_port.give_rate_token_back(consumer, "limited")
    assert consumer.moved == ["next"]
    assert not bucket.can_consume(1)


def test_a_token_is_given_back_while_another_thread_takes_the_last_message():
    """As that of Celery's timer does, in a worker without an event loop."""

    class Bucket(TokenBucket):
        def can_consume(self, tokens: int = 1) -> bool:
            had_enough = super().can_consume(tokens)
            if tokens > 0:
                self.contents.clear()
            return had_enough

    bucket = Bucket(0.001)
    consumer = Worked(bucket)
    assert bucket.can_consume(1)
    bucket.add(("last", 1))
    worker_port.give_rate_token_back(consumer, "limited")
    assert consumer.moved == []


# A request.


def test_requests_are_listed_while_another_thread_adds_one():
    """Here it is added as each request is hashed, which `set` does while it goes over them."""

    class Adds:
        is_read = False

        def __hash__(self):
            if Adds.is_read:
                Adds.is_read = False
                more.append(Adds())
                state.active_requests.add(more[-1])
                Adds.is_read = True
            return id(self)

        def __eq__(self, other):
            return self is other

    more: list[Any] = []
    requests = [Adds() for _ in range(3)]
    state.active_requests.update(requests)
    Adds.is_read = True
    try:
        if sys.version_info < (3, 14):  # since then, a WeakSet goes over a copy of itself
            with pytest.raises(RuntimeError, match="changed size"):
                set(state.active_requests)
        seen = worker_port.listed(state.active_requests)
    finally:
        Adds.is_read = False
        state.active_requests.difference_update([*requests, *more])
    assert all(one in seen for one in requests)


def test_a_request_tells_how_its_task_sees_it_and_whether_it_was_revoked_or_cancelled(app):
    request = request_of(app)
    assert worker_port.context_of(request).id == request.id
    assert not worker_port.was_revoked(request)
    assert not worker_port.was_cancelled(request)


def test_a_request_that_was_revoked_says_so(app):
    request = request_of(app)
    request._announce_revoked("revoked", False, None, False)
    assert worker_port.was_revoked(request)


def test_a_request_that_was_terminated_before_a_thread_accepts_it_never_runs(app):
    request = request_of(app)
    request.terminate(ThreadPool(1, app=app))
    assert not worker_port.never_runs(request)
    with pytest.raises(NotImplementedError):  # it goes nowhere: the callback runs in the thread
        request.on_accepted(1, 0.0)
    assert worker_port.never_runs(request)


def test_a_request_that_has_forgotten_its_run_terminates_nothing(app):
    request = request_of(app)
    request.time_start, request.worker_pid = 1.0, 7
    request._apply_result = request._terminate_on_ack = print
    worker_port.forget_run(request)
    killed: list[int] = []
    request.terminate(SimpleNamespace(terminate_job=lambda pid, _: killed.append(pid)))
    assert killed == []


# The connection to the broker.


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("", "feeds", "feeds"),
        ("topics", "feeds.created", "feeds"),
        ("topics", "feeds.urgent", "feeds"),  # the first of two
        ("topics", "others", None),
        ("directs", "orders", "orders"),
        ("fans", "", None),
    ],
)
def test_of_a_message_that_does_not_name_its_queue_the_first_one_that_fits_is_found(exchange, key, queue):
    kinds = {"topics": "topic", "directs": "direct", "fans": "fanout"}
    exchanges = {name: Exchange(name, kind) for name, kind in kinds.items()}
    queues = [
        Queue("no-exchange", exchange=None, bindings=[]),
        Queue("feeds", exchanges["topics"], "feeds.#"),
        Queue("urgent", exchanges["topics"], "feeds.urgent"),
        Queue("orders", exchanges["directs"], "orders"),
        Queue("all", exchanges["fans"]),
    ]
    with Connection("memory://") as connection:
        channel = connection.channel()
        for one in exchanges.values():
            one(channel).declare()
        message = SimpleNamespace(delivery_info={"exchange": exchange, "routing_key": key}, channel=channel)
        assert worker_port.queue_that_fits(message, queues) == queue
        channel.close()
        assert worker_port.queue_that_fits(message, queues) == (None if exchange else queue)


def test_a_consumer_consumes_anew_from_a_queue_whose_tag_it_has_forgotten():
    with Connection("memory://") as connection:
        consumer = connection.Consumer([Queue("contracts")], accept=["json"])
        consumer.consume()
        (tag,) = worker_port.tags_of(consumer).values()
        assert worker_port.forget_tag(consumer, "contracts") == tag
        assert worker_port.forget_tag(consumer, "contracts") is None
        consumer.consume()
        assert [*worker_port.tags_of(consumer)] == ["contracts"]
        assert tag not in worker_port.tags_of(consumer).values()
        consumer.cancel()


def test_the_most_that_a_worker_keeps_is_that_of_its_quality_of_service():
    assert worker_port.most_prefetched(SimpleNamespace(qos=QoS(print, 4, 50))) == 50
    assert worker_port.most_prefetched(SimpleNamespace(qos=QoS(print, 4))) is None


def test_celerys_consumer_asks_by_name_what_to_do_when_a_connection_is_lost():
    assert "self.on_connection_error_after_connected(" in inspect.getsource(Consumer)


def test_the_one_error_of_kombu_is_survived_and_every_other_is_raised(caplog):
    caplog.set_level(logging.WARNING, worker_port.__name__)  # Celery's test worker leaves the root logger at ERROR
    handled: list[BaseException] = []

    def handle(error: BaseException) -> None:
        if error.args == ("other",):
            raise AttributeError("a defect of somebody else's")
        closed, consumer.connection = consumer.connection, None  # as Celery does
        if closed is not None:
            _ = closed.client.hostname
        handled.append(error)

    lost = SimpleNamespace(client=None)
    consumer = SimpleNamespace(on_connection_error_after_connected=handle, connection=lost)
    worker_port.survive_lost_connections(consumer, lambda: None)
    consumer.on_connection_error_after_connected(OSError("lost"))
    assert "could not close the lost connection" in caplog.text
    assert len(handled) == 1
    with pytest.raises(AttributeError, match="somebody else"):
        consumer.on_connection_error_after_connected(OSError("other"))


def test_a_cold_shutdown_that_stops_the_pool_while_a_lost_connection_is_handled_goes_on(app, monkeypatch):
    pool = TaskPool(1, app=app)

    def handle(error: BaseException) -> None:
        if error.args == ("shutdown",):
            monkeypatch.setattr(state, "should_terminate", EX_FAILURE)
            pool.stop()
        _ = pool.num_processes

    consumer = SimpleNamespace(on_connection_error_after_connected=handle)
    worker_port.survive_lost_connections(consumer, lambda: None)
    with pytest.raises(AttributeError, match="_processes"):
        consumer.on_connection_error_after_connected(OSError("lost"))
    with pytest.raises(WorkerTerminate):
        consumer.on_connection_error_after_connected(OSError("shutdown"))


def test_a_redis_broker_delivers_again_what_is_restored_unless_another_has_it_by_now(broker_server):
    queue = Queue(f"contracts-{uuid4().hex}")
    with Connection(broker_server.celery_url(0)) as connection:
        producer, channel = connection.Producer(), connection.channel()
        producer.publish({"n": 1}, routing_key=queue.name, declare=[queue])
        message = queue.bind(channel).get()
        assert queue.bind(channel).get() is None
        worker_port.restore(channel, message)
        again = queue.bind(channel).get()
        assert again.payload == {"n": 1}
        assert again.delivery_tag == message.delivery_tag
        worker_port.restore(channel, message)
        assert queue.bind(channel).get() is None
        again.ack()
        worker_port.restore(channel, again)
        assert queue.bind(channel).get() is None
    worker_port.restore(SimpleNamespace(), "a message of another broker's")


def test_the_last_message_of_a_redis_channel_comes_while_it_is_closing(broker_server):
    queue = Queue(f"contracts-{uuid4().hex}")
    seen: list[bool] = []
    with Connection(broker_server.celery_url(0)) as connection, Connection(broker_server.celery_url(0)) as other:
        channel = connection.channel()
        consumer = connection.Consumer([queue], channel=channel, accept=["json"])
        consumer.register_callback(lambda *_: seen.append(worker_port.is_closing(channel)))
        consumer.consume()
        connection.transport.cycle.on_poll_start()
        channel._brpop_start()
        assert not worker_port.is_closing(channel)
        other.Producer().publish({"n": 1}, routing_key=queue.name, declare=[queue])
        channel.close()
        assert seen == [True]
        assert queue.bind(other.channel()).get().payload == {"n": 1}
    assert not worker_port.is_closing(SimpleNamespace())


def test_the_last_answer_of_a_redis_broker_can_be_read(broker_server):
    queue = Queue(f"contracts-{uuid4().hex}")
    with Connection(broker_server.celery_url(0)) as connection, Connection(broker_server.celery_url(0)) as other:
        channel = connection.channel()
        assert worker_port.last_answer(channel, 0.0) is None
        consumer = connection.Consumer([queue], channel=channel, accept=["json"])
        consumer.consume()
        connection.transport.cycle.on_poll_start()
        channel._brpop_start()
        assert worker_port.last_answer(channel, 0.0) is None
        other.Producer().publish({"n": 1}, routing_key=queue.name, declare=[queue])
        popped: list[Any] = []
        wait_until(lambda: popped.extend(worker_port.last_answer(channel, 1.0) or ()) or popped, "the answer comes")
        assert popped[0].decode() == queue.name
        assert worker_port.last_answer(channel, 0.0) is None


# The worker.


def test_a_workers_wait_in_a_soft_shutdown_can_be_wrapped():
    assert "wait_for_soft_shutdown" in inspect.getsource(WorkController)
    waited: list[str] = []
    worker = SimpleNamespace(wait_for_soft_shutdown=lambda: waited.append("its own"))

    def wrap(wait: Any) -> None:
        waited.append("before")
        wait()

    worker_port.wrap_soft_shutdown(worker, wrap)
    worker.wait_for_soft_shutdown()
    assert waited == ["before", "its own"]
