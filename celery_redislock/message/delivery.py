"""Delivery: what the worker's main process tells the run's process. Facts: what a policy knows about a message.

AskedKeys: the keys that runs report back.
"""

import io
import math
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC
from typing import Any, NamedTuple, Self

from celery import Task
from celery.app.task import Context
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.protocol.tokens import Attempt

from .header import HEADER, Header

#: The name of the request's attribute, and of the entry in its dict, that holds the `Delivery` as a tuple.
DELIVERY = "redislock_delivery"
#: Called with the delivery's nonce when a run begins, or `exits`, and its message must be acked. A worker adds its own
#: function before it forks its children.
ON_BEGIN: list[Callable[..., None]] = []
#: A child's report is a nonce, the length of a key, and the key. These are the sizes of the first two, in bytes.
_NONCE, _SIZE = 22, 4
#: A write of up to this many bytes to a pipe succeeds or fails as a whole, so the reports of two children never mix.
_MOST = select.PIPE_BUF
_CHUNK = 65_536

#: A message that a quorum queue has got back this many times is not given back again. RabbitMQ 4 drops it after twenty,
#: one for each time that the message was requeued, or its worker ended or lost its connection.
GIVEN_BACK_OFTEN = 10

_last = 0


class Delivery(NamedTuple):
    """One delivery of a message: what its worker knows about it. It shows whether the message may be a copy.

    The main process puts it into the request's dict as a plain tuple, because pickling this class takes four times as
    long. A message cannot forge one, because a header is never a tuple.

    What its properties say of each kind of message, and what a run does where one says yes::

        the message                               is_delivered_again  may_be_a_copy   has_begun
        was delivered once, or only waited        no                  no              no
        was published again by a worker           no                  yes             no
        is overdue, or the consumer has stopped   yes                 yes             no
        is redelivered, and acked early           yes                 yes             no
        is redelivered, and acked late            yes                 yes             yes
        is marked as begun                        yes                 yes             yes

        its run                                   leaves a note for   reads its       meets no
                                                  at least a day      attempt's note  policy
    """

    nonce: str
    """The nonce of the execution's token. The main process keeps it too, to release the lock of a dead child."""
    overdue_at: float = math.inf
    """When the worker has had the message for about the visibility timeout, so that the broker delivers it to another
    worker: in seconds by `time.monotonic()`, which all processes of a host share."""
    serializer: str | None = None
    """The serializer of the message's body; None for the task's."""
    headers: dict[str, Any] | None = None
    """The user's headers, if one of them is itself named ``headers``: `request.headers` then shows only the content of
    that header. None if `request.headers` shows them all."""
    acks_late: bool = False
    """The worker acks the message when the run ends, not when it begins."""
    is_redelivered: bool = False
    """The broker says that it has delivered the message before."""
    is_marked_begun: bool = False
    """The message's header says that a process may have begun to run it."""
    is_republished: bool = False
    """A worker published the message again, or tried to, instead of running it."""
    may_wait: bool = False
    """The message may wait in the room of its worker's main process."""
    call: bytes | None = None
    """Set if the message's turn in line has come: what the key holds until the execution acquires it."""
    acks_at_begin: bool = False
    """The message is acked early, so `ON_BEGIN` must be called when its run begins."""
    stops: int = 0
    """How often the worker's consumer had stopped when the message arrived; see `ConsumerStops`."""
    queue: str | None = None
    """The queue that the message came from; None if that is not known."""

    def for_run(self, nonce: str, header: Header, **others: Any) -> Self:
        """This delivery for a run of its message, the first or a later one. By then the message has this `header`.

        The `others` are what else may differ between the runs: `may_wait`, `call` and `acks_at_begin`.
        """
        return self._replace(nonce=nonce, is_marked_begun=header.begun, is_republished=header.republished, **others)

    @classmethod
    def of(cls, request: Context) -> Self | None:
        """The `Delivery` that the main process put into `request`; None if there is no main process."""
        values = getattr(request, DELIVERY, None)
        return tuple.__new__(cls, values) if isinstance(values, tuple) else None

    @property
    def is_delivered_again(self) -> bool:
        """Whether the broker has delivered the message to more than one worker, or soon will."""
        is_due = self.stops != STOPS.count[0] or time.monotonic() > self.overdue_at
        return is_due or self.is_redelivered or self.is_marked_begun

    @property
    def may_be_a_copy(self) -> bool:
        """Whether the message may exist twice: it was delivered before, or another delivery may still come.

        The execution of such a message reads the note of its attempt and leaves one. A message that a worker publishes
        again may be queued twice, because kombu resends what the broker did not confirm; the original may run too.
        A message that only waits in line in one worker exists once.
        """
        return self.is_republished or self.is_delivered_again

    @property
    def has_begun(self) -> bool:
        """Whether a process may have died while running the message, so that no policy may drop it.

        A redelivered message that is acked late may have begun; there is no way to know. A message that is acked early
        counts as not begun: it is acked at the moment its body begins, and the broker does not deliver it again after
        the ack. A message that is only overdue has not begun either.
        """
        return self.is_marked_begun or (self.acks_late and self.is_redelivered)


class ConsumerStops:
    """How often this worker's consumer has stopped, because it lost its connection or for good.

    What was unacked then is delivered again. Runs read the number in memory that their process shares with the main
    process, so that they know it at once, without a command.

    Attributes:
        count: The number, as its only item. Only the main process writes it.
    """

    def __init__(self) -> None:
        self.count = memoryview(bytearray(4)).cast("I")
        self._main = 0

    def open(self) -> None:
        """Share the number. The worker's main process calls this before it forks its children.

        A second worker in the process goes on counting: a run of the first one may still compare the number.
        """
        if self._main != os.getpid():
            self.count = memoryview(mmap.mmap(-1, 4)).cast("I")
            self._main = os.getpid()


class Facts(NamedTuple):
    """What a worker knows about a message whose key another execution holds."""

    delivery: Delivery
    attempt: Attempt
    causes: frozenset[str]
    """The ids of the message's own task, its parent and its root, shortened as in tokens."""
    is_owed_its_key: bool = False
    """The message carries a claim to the key, but the reservation ended before the message began."""
    joins: str | None = None
    """The id of the task whose outcome the message waits for under the policy ``join``."""
    has_expired: bool = False
    """The message's `expires` has passed: Celery would no longer run it."""
    waited: float = 0.0
    """Seconds since the message first had to wait; 0 before that."""


def publish_time(options: Mapping[str, Any]) -> int:
    """When a message that is published now is due, in microseconds since the epoch, by this host's clock.

    Of two publishes in one process without `countdown` and `eta`, the later gets the greater number. Options that
    Celery will refuse are ignored.
    """
    global _last
    _last = now = max(time.time_ns() // 1000, _last + 1)
    countdown, eta = options.get("countdown"), options.get("eta")
    try:
        if countdown:
            return now + int(countdown * 1_000_000)
        if due := maybe_iso8601(eta):
            return int(maybe_make_aware(due, UTC).timestamp() * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        pass
    return now


def was_delivered_before(request: Mapping[str, Any]) -> bool:
    """Whether the broker says that it has delivered the message of `request`, a request's dict, before.

    AMQP and kombu's Redis transport mark such a message as redelivered. SQS counts how many times a message was
    received, and kombu requests that count.

    Source: `kombu.transport.SQS`, `Channel.get_message_attributes`.
    """
    if (request.get("delivery_info") or {}).get("redelivered"):
        return True
    info: Any = (request.get("properties") or {}).get("delivery_info")
    try:
        return int(info["sqs_message"]["Attributes"]["ApproximateReceiveCount"]) > 1
    except (KeyError, TypeError, ValueError):  # not from SQS
        return False


def given_back_often(headers: Any) -> bool:
    """Whether a quorum queue may soon drop the message with these `headers`, because it has got it back so often."""
    count = headers.get("x-delivery-count") if isinstance(headers, dict) else None
    return isinstance(count, int) and count >= GIVEN_BACK_OFTEN


def is_requeued(task: "Task[..., Any]", outcome: Any) -> bool:
    """Whether a run with this outcome has put its message back into the queue, as `Reject(requeue=True)` does.

    A message that was acked early is gone from the broker, so it cannot be put back.
    """
    return task.acks_late and isinstance(outcome, Reject) and bool(outcome.requeue)  # type: ignore[attr-defined]


def hide_headers(request: Context) -> None:
    """Remove the plugin's entries from the headers that Celery copies into the next attempt of `request`.

    An eager request has no others, so the lock options of its call are kept as those of a message are.
    """
    if isinstance(request.headers, dict):
        request.headers.pop(DELIVERY, None)
        header = request.headers.pop(HEADER, None)
        if request.is_eager and isinstance(header, dict) and "options" in header:
            setattr(request, HEADER, {"options": header["options"]})


class AskedKeys:
    """The keys that the runs of one worker have asked for.

    A child reports its key through a pipe that it has inherited. A report outlives the child.
    """

    def __init__(self) -> None:
        self._pipe: io.FileIO | None = None
        self._writer = -1
        self._main = 0
        self._rest = b""
        self._keys: dict[str, tuple[str, ...]] = {}
        self._reading = threading.Lock()

    def open(self) -> None:
        """Create the pipe. The worker's main process calls this once, before it forks its children."""
        if self._main != os.getpid():
            reader, self._writer = os.pipe()
            for end in (reader, self._writer):
                os.set_blocking(end, False)
            self._pipe = io.FileIO(reader, closefd=False)
            self._main = os.getpid()

    def asks(self, nonce: str, key: str) -> None:
        """Report that the run of the delivery `nonce` is about to ask for `key`. Called in the run's process.

        Nothing is reported if the pipe is full or the key is too long. If the child then dies, the key expires with its
        lease.
        """
        if self._main == os.getpid():
            self._add(nonce, key)
        elif self._pipe is not None:
            name = key.encode(errors="surrogatepass")
            report = b"%b%0*d%b" % (nonce.encode(), _SIZE, len(name), name)
            if len(report) <= _MOST:
                with suppress(BlockingIOError):
                    os.write(self._writer, report)

    def of(self, nonce: str) -> tuple[str, ...]:
        """The keys that the run of the delivery `nonce` has asked for, in that order. Thread-safe."""
        self.read()
        return self._keys.get(nonce, ())

    def forget(self, nonce: str) -> None:
        """Forget the run of the delivery `nonce`, which is over."""
        self._keys.pop(nonce, None)

    def read(self) -> None:
        """Read the children's reports. Called in the main process, at any time."""
        if self._pipe is None:
            return
        with self._reading:
            while chunk := self._pipe.read(_CHUNK):
                self._note(self._rest + chunk)
                if len(chunk) < _CHUNK:
                    return

    def _note(self, reports: bytes) -> None:
        start = 0
        while (name_at := start + _NONCE + _SIZE) <= len(reports):
            end = name_at + int(reports[name_at - _SIZE : name_at])
            if end > len(reports):
                break
            nonce = reports[start : start + _NONCE].decode()
            self._add(nonce, reports[name_at:end].decode(errors="surrogatepass"))
            start = end
        self._rest = reports[start:]

    def _add(self, nonce: str, key: str) -> None:
        before = self._keys.get(nonce, ())
        if key not in before:
            self._keys[nonce] = (*before, key)


#: Of the worker that this process belongs to.
STOPS = ConsumerStops()
#: The keys asked for by this process and the children that it forks.
ASKED_KEYS = AskedKeys()
