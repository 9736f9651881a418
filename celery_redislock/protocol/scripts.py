"""Loads the scripts of lua/, which implement the protocol, and defines the types of their arguments.

A script's reply is a list whose first item is a `Tag`; a renewal's is one tag for each of its keys. A tag alone is sent
without the list: Redis takes about a microsecond to turn a Lua table into a reply.
"""

import re
from collections.abc import Sequence
from enum import Enum
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

Text = str | bytes

#: How long a note lives by default, in seconds. A copy may wait in the broker's queue for that long.
NOTE_TTL = 24 * 3600.0
#: The line of a script that is replaced by the prelude. The code above that line does not need the prelude.
PRELUDE_STANDS_HERE = "-- The prelude stands here.\n"


#: Where a script tests whether a value begins with an owner of 23 characters and a space, and the test: written out,
#: because a function takes longer.
_OWNS, _TEST = r"OWNS\(([\w.\[\]]+), (\w+)\)", r"string.sub(\2, 1, 24) == \1 .. ' ' and string.find(\2, '^[>~=#?]')"


def _read(name: str) -> str:
    loader: Any = __spec__.loader  # reads from a zip as well, and is quicker than importlib.resources
    return re.sub(_OWNS, _TEST, loader.get_data(str(Path(__file__).with_name("lua") / f"{name}.lua")).decode())


PRELUDE = _read("prelude")


class Script:
    """One Lua file with the prelude inserted, and its SHA-1, under which the server knows it."""

    def __init__(self, name: str) -> None:
        self.text = _read(name).replace(PRELUDE_STANDS_HERE, PRELUDE)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, RESERVE, RELEASE, RENEW = Script("acquire"), Script("reserve"), Script("release"), Script("renew")
MERGE, REPLACE, INSPECT = Script("merge"), Script("replace"), Script("inspect")
STAND, LEAVE = Script("stand"), Script("leave")


class Tag(bytes, Enum):
    """What a script replies."""

    GRANTED = b"granted"
    FINISHED = b"finished"
    CONFLICT = b"conflict"
    RANKED = b"ranked"
    COPY = b"copy"
    DUE = b"due"
    EXPIRED = b"expired"
    SUPERSEDED = b"superseded"
    STOPPED = b"stopped"
    QUEUED = b"queued"
    MERGED = b"merged"
    OUTSTANDING = b"outstanding"
    WINDOW = b"window"
    RELEASED = b"released"
    REPLACED = b"replaced"
    KEPT = b"kept"
    LOST = b"lost"
    ENTERED = b"entered"
    CALLED = b"called"
    LEFT = b"left"
    FREE = b"free"


#: The tags that each run meets: until Python 3.12, `Tag.GRANTED` is a call of a function.
GRANTED, LOST = Tag.GRANTED, Tag.LOST

#: A tag, and what the script's header says.
Reply = Sequence[Any]


class Command(NamedTuple):
    """A script with its KEYS and ARGV."""

    script: Script
    keys: tuple[str, ...]
    values: tuple[Text, ...]


class Passed(NamedTuple):
    """The task ids of the jobs that a publisher knows about and passes over.

    Tokens would not do: a job that is queued at the first call may be running at the second.
    """

    ended: frozenset[str] = frozenset()
    """Jobs whose end the publisher's caller may have seen: their reservations are no longer needed."""
    preceding: frozenset[str] = frozenset()
    """Jobs whose result cannot answer the call: those that the message must follow, other tasks' jobs, and runs whose
    result is out of reach."""
    unsent: frozenset[str] = frozenset()
    """Jobs whose publishers have taken too long: what is reserved for them is taken, unless they have been sent."""


class Call(NamedTuple):
    """A call that may be merged with others into one message."""

    body: bytes
    """Its arguments, from `celery_redislock.message.calls`."""
    channel: str | None
    """If the run is given all calls that were merged, not only the last one: where rooms hear that there are enough."""
    due_in: float = 0.0
    """In how many seconds it is due: its countdown."""
    expires_in: float | None = None
    """In how many seconds it expires."""
    debounce: float | None = None
    """How many seconds after its last call the message is due."""
    debounce_max: float | None = None
    """How many seconds after its first call the message is due at the latest."""
    number: int = 0
    """The number that it was given before; 0 for a new call."""
    is_retry: bool = False
    """Whether it is the next attempt of a run with this number, which is given the run's earlier calls too."""
    stops_but: frozenset[str] | None = None
    """If the run that has the key is asked to stop: the ids of the jobs that caused the call, which are not."""


class Numbered(NamedTuple):
    """The call in a message that others may be merged into, as its run shows it when it asks for its key."""

    number: int
    """The number that it was given before; 0 if no newer call replaces it."""
    body: bytes | None = None
    """Its arguments, if it is the next attempt of a run and could not be merged."""
    stops_but: frozenset[str] | None = None
    """As in `Call`; empty if the run asks no other to stop, but may be replaced itself."""


class Claim(NamedTuple):
    """What a message carries if the key, or the place in the queue, is reserved for it."""

    nonce: str
    """The nonce of the reservation's token."""
    ttl: float
    """If the key turns out to be held, how much longer the place in the queue stays reserved, in seconds."""


class Note(NamedTuple):
    """The note that a release writes for copies of the holder's message, if the attempt is over."""

    key: str
    """The note's key in Redis, from `LockKeys.note`."""
    ttl: float = NOTE_TTL
    """How long the note lives, in seconds."""
    in_any_case: bool = False
    """Write the note even if no copy was seen: one may be waiting in the broker's queue."""
    given: str | None = None
    """The key of the calls that the attempt was given, if no later attempt needs them."""
