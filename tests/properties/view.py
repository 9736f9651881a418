"""What an onlooker sees on the lock server, and which changes of it may be whose doing."""

from __future__ import annotations

import re
from typing import NamedTuple

import redis

from celery_redislock.protocol.names import keys_of

#: Two readings of one time to live may differ by so many milliseconds.
SLACK = 10
_MINTED = re.compile(r"([>&~^=?!])([\w-]{22})(?![^ ])").match


def owner_of(value: str) -> str:
    """Whose `value` is: its state and its nonce. A copy that was seen makes no difference; a call is not an offer."""
    minted = _MINTED(value)
    return minted[1].replace("&", ">") + minted[2] if minted else value


def attempt_of(value: str) -> str:
    return value.split(" ")[1] if _MINTED(value) else "*"


class Kept(NamedTuple):
    """What one key holds, and until when, in milliseconds of the server's clock."""

    value: str
    ends: float

    @property
    def owner(self) -> str:
        return owner_of(self.value)


class View(NamedTuple):
    """The keys that somebody may hold, by name; and who stands in line."""

    now: float
    kept: dict[str, Kept]
    line: dict[str, float]
    fence: bytes | None

    def kept_of(self, owner: str) -> Kept | None:
        return next((kept for kept in self.kept.values() if kept.owner == owner), None)

    def contents(self) -> object:
        """All but the times to live."""
        return {name: kept.value for name, kept in self.kept.items()}, self.line, self.fence


class Act(NamedTuple):
    """Whose keys a command may remove or extend, and whose it may put in place of what is free."""

    owns: frozenset[str] = frozenset()
    makes: frozenset[str] = frozenset()


def act(*owns: str, makes: str = "") -> Act:
    return Act(frozenset(owns), frozenset({makes}) if makes else frozenset(owns))


def look(client: redis.Redis, lock: str) -> View:
    """Look at everything at one moment."""
    keys = keys_of(lock)
    names = [*(keys.permit(number) for number in range(1, 5)), keys.queued]
    pipe = client.pipeline(transaction=True)
    pipe.time().zrange(keys.line, 0, -1, withscores=True).get(keys.fence).mget(names)
    for name in names:
        pipe.pttl(name)
    (seconds, micros), line, fence, values, *left = pipe.execute()
    now = seconds * 1000 + micros / 1000
    kept = {
        name: Kept(value.decode(), now + ttl if ttl >= 0 else float("inf"))
        for name, value, ttl in zip(names, values, left, strict=True)
        if value is not None
    }
    return View(now, kept, {owner_of(room.decode()): rank for room, rank in line}, fence)


def check_change(before: View, after: View, act: Act) -> None:
    """Only its owner, or expiry, removes or extends a key; and what is free is given only to who asks, or is next."""
    for name in before.kept.keys() | after.kept.keys():
        old, new = before.kept.get(name), after.kept.get(name)
        story = f"{name}: {old} became {new}, by {act}"
        has_ended = old is not None and old.ends <= after.now + SLACK
        if old and new and old.owner == new.owner and not (has_ended and new.ends > old.ends + SLACK):
            assert new.ends <= old.ends + SLACK or old.owner in act.owns, f"extended by another: {story}"
            assert old.value[1:] == new.value[1:] or old.owner in act.owns, f"changed by another: {story}"
            continue
        if has_ended:
            old = None
        if old:
            assert old.owner in act.owns, f"removed by another: {story}"
        if new:
            is_next = new.value[0] == "?" and (new.owner in before.line or new.owner in act.owns)
            assert is_next or new.owner in act.makes, f"given to one who did not ask: {story}"
