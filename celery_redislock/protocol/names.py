"""The names of the Redis keys of a lock. Only this module builds them."""

import functools
import re
from typing import NamedTuple, Self

#: The most holders that a lock can have at once, as in lua/prelude.lua.
MAX_CAPACITY = 50
#: The most keys that one run may need.
MOST_KEYS = 8
#: Ranks from this one on are virtual times, which lua/acquire.lua gives out. All others are times of the clock.
FIRST_TURN = 2**52
#: NOTE separates the lock's key from an attempt, GONE from a claim, WINDOW from a task, GIVEN from a job, MERGED from a
#: publish, REPLACED from a task id.
NOTE, GONE, WINDOW, GIVEN, MERGED, REPLACED = ":note:", ":gone:", ":window:", ":args:", ":merged:", ":replaced:"
#: Names the channel of all rooms.
ALL_ROOMS = "all"
#: The longest key, in characters, that a room accepts in a hint about a line where it has no waiter.
LONGEST_KEY = 10_000
_CAPACITIES = frozenset(map(str, range(1, MAX_CAPACITY + 1)))
_OTHERS = rf"{GIVEN}.*|{MERGED}.*|{REPLACED}.*|{WINDOW}.*|{NOTE}.*|{GONE}.*"
_KINDS = rf":queued|:pending|:fair|:newest|:line|:fence|:permit:\d+|{_OTHERS}"
_PART = rf"(?P<stem>.*\}})(?P<kind>{_KINDS})"


class Share(NamedTuple):
    """What a run that has to wait is entitled to, if the groups that wait for its key take turns."""

    group: str
    """The run's group, as the command line shows it."""
    digest: str
    """The group as Redis knows it."""
    turn: int
    """How long a turn of the group is, in microseconds of virtual time."""
    rank: int = 0
    """The rank that the run's message has been given; 0 if it has none."""


class Demand(NamedTuple):
    """What a run, a waiter or a `Lock` asks for: a lock, by its key and by how many holders it can have at once."""

    key: str
    """The lock's key in Redis."""
    capacity: int = 1
    """How many holders the lock can have at once, 1 to `MAX_CAPACITY`. An acquire gets no permit with a higher number,
    but a search for a holder goes up to `MAX_CAPACITY`."""
    spent: float = 0.0
    """With a rate: its time in seconds. From its grant, a permit is spent for this time or a share of it, and has no
    owner. 0 without."""
    runs: int = 0
    """With a rate: how many runs may begin in that time."""
    share: Share | None = None
    """None if waiters go by time."""

    @property
    def line(self) -> str:
        """The name that hints use for the line of the key and its capacity: ``<capacity> <key>``."""
        return f"{self.capacity} {self.key}"

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Return what the rooms in a line ask for.

        Raises:
            ValueError: `line` does not name a line.
        """
        capacity, _, key = line.partition(" ")
        return cls(key, int(capacity))


def is_line(text: str) -> bool:
    """Whether `text` can be a `Demand.line`. Anyone can publish a hint; a bad capacity must not reach a script."""
    capacity, _, key = text.partition(" ")
    fits = capacity in _CAPACITIES and 0 < len(key) <= LONGEST_KEY
    return fits and (key.isascii() or not any("\ud800" <= one <= "\udfff" for one in key))  # undecoded bytes


class LockKeys:
    """The Redis keys of one lock, all in one hash slot of a Cluster.

    The hash slot depends on the part between braces, the hash tag. If the lock's key has a hash tag, the other keys
    share it. If not, the whole key becomes the hash tag of the others. (That does not work for a key that contains a
    closing brace but no hash tag: such a lock's keys are in different hash slots.)

    Attributes:
        lock: The key that the lock's holder owns.
        queued: The place of the one message that may wait in the queue, in scope ``queue``.
        line: The rooms that wait for the lock, each with the rank of its first waiter.
        fence: The last fencing number.
        pending: The calls that were merged into the message that has the place in the queue.
    """

    __slots__ = ("_stem", "fence", "line", "lock", "pending", "queued")

    def __init__(self, lock: str) -> None:
        start = lock.find("{")
        end = lock.find("}", start + 1)
        tagged = end >= 0 if start < 0 else end > start + 1  # an empty tag does not count
        self.lock = lock
        self._stem = stem = lock if tagged else f"{{{lock}}}"
        self.queued, self.fence, self.line = f"{stem}:queued", f"{stem}:fence", f"{stem}:line"
        self.pending = f"{stem}:pending"

    def permit(self, number: int) -> str:
        """Return the key of permit `number`, counted from 1, of the lock."""
        return self.lock if number == 1 else f"{self._stem}:permit:{number}"

    def window(self, task: str) -> str:
        """Return the key of the window of `task`, spelled as in tokens: its last job, for as long as `lock_window`."""
        return f"{self._stem}{WINDOW}{task}"

    def given(self, job: str) -> str:
        """Return the key of the calls that the attempt with this `Attempt.job` was given."""
        return f"{self._stem}{GIVEN}{job}"

    def note(self, attempt: object) -> str:
        """Return the key of the note saying that `attempt` is over, for copies of its message."""
        return f"{self._stem}{NOTE}{attempt}"

    def gone(self, claim: str) -> str:
        """Return the key of the note saying that `claim` is no longer needed."""
        return f"{self._stem}{GONE}{claim}"


#: Returns the `LockKeys` of a lock. Cached, because one run uses them several times.
keys_of = functools.lru_cache(1024)(LockKeys)


class LockPart(NamedTuple):
    """A Redis key that can hold a token, as a part of its lock."""

    key: str
    """The key in Redis."""
    lock: str
    """The key of the lock; the same as `key` unless `key` is a permit above 1, or the place in the queue."""
    kind: str = "lock"
    """``"lock"``, ``"permit"`` or ``"queued"``."""

    @classmethod
    def of(cls, key: str) -> Self | None:
        """Return which part of which lock `key` is; None if it holds no token: a line, a fencing number, a note."""
        if (found := re.fullmatch(_PART, key, re.DOTALL)) is None:
            return cls(key, key)
        stem, kind = found["stem"], found["kind"].split(":")[1]
        if kind not in {"permit", "queued"}:
            return None
        # A stem that is one whole hash tag comes from a lock's key without a hash tag.
        whole_is_tag = stem.startswith("{") and stem.find("}") == len(stem) - 1
        return cls(key, stem[1:-1] if whole_is_tag else stem, kind)


def redis_key(prefix: str, name: str) -> str:
    """Return the Redis key of the lock `name`, from a `KeyMaker`. The braces make the name the hash tag."""
    return f"{prefix}:{{{name}}}"


def channel_of(room: str, keyprefix: str = "") -> str:
    """Return the channel of a room, as lua/prelude.lua does.

    A message on the channel is one of these, with the line as `Demand.line` names it: ``offer <line>``, the key is
    offered to the room for its waiters in that line; ``soon <line>``, the key is offered to an earlier room;
    ``look <line>``, the key now holds another token; ``in<milliseconds> <line>``, the room is the first by now, and a
    permit will be free then; ``due <line>``, a message that sleeps until it is due is due now.

    Args:
        room: The nonce of the room's token; or `ALL_ROOMS`, for the channel that each room listens to as well.
        keyprefix: The prefix of all names on the room's server.
    """
    return f"{keyprefix}redislock:room:{room}"
