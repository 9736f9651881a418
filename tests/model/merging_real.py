"""The real scripts and the commands of merged calls, compared: a state is put onto a real server, and read back.

As in `real`. A number of the model is a time of the server's clock in microseconds, which is long past; or it is still
to come, as if the clock had been set back.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from celery_redislock.protocol import commands
from celery_redislock.protocol.names import ALL_ROOMS, Demand, channel_of, keys_of
from celery_redislock.protocol.replies import Granted, Merged
from celery_redislock.protocol.scripts import Call, Note, Numbered, Passed, Tag
from celery_redislock.protocol.scripts import Claim as ClaimOfMessage
from celery_redislock.protocol.scripts import Command as SentCommand
from celery_redislock.protocol.tokens import Attempt

from . import real as keys_of_model
from .commands import Acquire, GiveUp, Release, Renew
from .merging import Answer, Ask, Calls, Command, Effect, End, Merge, Server, Time, apply
from .real import KEY, NEW_LEASE, OLD_LEASE, QUEUED, note, owner, real
from .server import Key
from .server import Server as Lock

#: The time to live of the place once its message has been sent, and when a call is due that is early, in seconds.
SENT_LEASE, EARLY = 200.0, 60.0
#: With how many calls the scripts take a ticket for full.
MOST_CALLS = 100
#: How far the numbers of the model are from the server's clock, in microseconds.
FAR = 10**9
NAMES = keys_of(KEY)
ALL = channel_of(ALL_ROOMS)


class State(NamedTuple):
    """What a real server knows of merged calls, in the words of the model."""

    key: str | None
    queued: str | None
    notes: set[str]
    pending: tuple[str, str, int, tuple[int, ...], Time, bool] | None
    given: dict[str, tuple[int, tuple[int, ...], Time]]
    newest: tuple[int, str] | None
    merged: dict[str, tuple[int, int, str]]


class Keys(keys_of_model.Keys):
    """Puts the states of the model onto a real server, and reads them back."""

    base = 0
    """The number 0 of the model."""

    def put(self, server: Server, *, full: int | None, is_clock_behind: bool) -> None:
        """Have the server in this state. Where calls are collected, the last `full` make a ticket full.

        The ones before were replaced, as they are by a publisher that still runs a version that keeps only the latest.
        """
        super().set_up(server.lock)
        now = self.now()
        self.base = now + (FAR if is_clock_behind else -FAR)
        pipe = self.client.pipeline(transaction=False)
        if server.pending:
            calls = server.pending
            before = MOST_CALLS - full if full else 0
            fields = {
                "claim": real(calls.claim),
                "job": calls.attempt.job,
                "first": now,
                "count": before + len(calls.bodies),
                **({"refused": 1} if calls.is_refused else {}),
                **self.fields(calls),
            }
            pipe.hset(NAMES.pending, mapping=fields)
            pipe.expire(NAMES.pending, 60)
        for attempt, calls in server.given:
            pipe.hset(NAMES.given(attempt.job), mapping=self.fields(calls))
            pipe.expire(NAMES.given(attempt.job), 60)
        if server.newest[0]:
            pipe.set(f"{KEY}:newest", f"{self.base + server.newest[0]} {server.newest[1]}", ex=60)
        for claim, asked, number, ticket in server.merged:
            answer = f"{self.base + number} {self.base + asked if asked else ''} {self.value(ticket)}"
            pipe.set(f"{KEY}:merged:{real(claim)}", answer, ex=60)
        pipe.execute()

    def fields(self, calls: Calls) -> dict[str, Any]:
        bodies = [str(body) for body in calls.bodies]
        fields = {str(number): body for number, body in enumerate(bodies, 1)}
        fields |= {"number": self.base + calls.number, "bodies": len(bodies)}
        if calls.time is Time.BEGUN:
            return fields
        now = self.now()
        due = now + int(EARLY * 1e6) if calls.time is Time.EARLY else now - 1
        return {**fields, "due": due, "expires": now - 1 if calls.time is Time.EXPIRED else ""}

    def now(self) -> int:
        seconds, microseconds = self.client.time()
        return int(seconds) * 1_000_000 + int(microseconds)

    def send(self, command: Command) -> SentCommand:
        """What the code sends for `command`."""
        match command:
            case Merge(claim, attempt, ended, unsent, number):
                call = Call(
                    str(number).encode() if command.is_retry else b"new",
                    *(ALL if command.joins else None, EARLY if command.is_early else 0.0),
                    number=self.base + number if number else 0,
                    is_retry=command.is_retry,
                )
                passed = Passed(ended, frozenset(), unsent)
                return commands.merge(KEY, self.sending(claim, attempt), NEW_LEASE, SENT_LEASE, passed, call)
            case Ask(Acquire(nonce, attempt, reads_note) as asked, number, body):
                return commands.acquire(
                    *(Demand(KEY), self.token(nonce, attempt), NEW_LEASE),
                    note=note(attempt) if reads_note else None,
                    claim=ClaimOfMessage(real(asked.claim), NEW_LEASE) if asked.claim else None,
                    numbered=None
                    if number is None
                    else Numbered(self.base + number if number else 0, str(body).encode() if body else None),
                )
            case End(Release(nonce, attempt, unseen_copy), over):
                given = NAMES.given(over.job) if over else None
                left = Note(note(attempt), in_any_case=unseen_copy, given=given) if attempt else None
                return commands.release(Demand(KEY), owner(nonce).owner, left)
            case _:
                return super().sent(command)

    def look(self, new: int) -> State:
        """What the server knows now. All must have a time to live. `new` is what the model calls a new number."""
        names = [name.decode() for name in self.client.keys("*")]
        assert all(self.client.pttl(name) > 0 for name in names), names
        key, queued = (value and value.decode() for value in self.client.mget(KEY, QUEUED))
        given, merged = {}, {}
        for name in names:
            kind, _, rest = name.removeprefix(KEY).removeprefix(":").partition(":")
            if kind == "args":
                number, bodies, fields = self.calls(name, new)
                given[rest] = number, bodies, self.time_in(fields)
            elif kind == "merged":
                number, asked, ticket = self.client.get(name).decode().split(" ", 2)
                merged[rest] = self.number(asked, new) if asked else 0, self.number(number, new), ticket
        pending, newest, found = None, None, self.client.get(f"{KEY}:newest")
        if NAMES.pending in names:
            number, bodies, fields = self.calls(NAMES.pending, new)
            pending = fields["claim"], fields["job"], number, bodies, self.time_in(fields), "refused" in fields
        if found:
            number, _, job = found.decode().partition(" ")
            newest = self.number(number, new), job
        return State(key, queued, {name for name in names if ":note:" in name}, pending, given, newest, merged)

    def time_in(self, fields: dict[str, str]) -> Time:
        if not fields.get("due"):
            return Time.BEGUN
        if fields["expires"]:
            return Time.EXPIRED
        return Time.EARLY if int(fields["due"]) > self.now() else Time.DUE

    def calls(self, name: str, new: int) -> tuple[int, tuple[int, ...], dict[str, str]]:
        fields = {field.decode(): value.decode() for field, value in self.client.hgetall(name).items()}
        bodies = [fields.get(str(number)) for number in range(1, int(fields["bodies"]) + 1)]
        assert None not in bodies, "there is a hole among the calls"
        of_model = (new if body == "new" else int(body or 0) for body in bodies)
        return self.number(fields["number"], new), tuple(of_model), fields

    def number(self, value: str | int, new: int) -> int:
        """What the model calls a number of the server: a small one, or a new one that is the server's clock."""
        number = int(value) - self.base
        if abs(number) < FAR // 2:
            return number
        assert 0 <= self.now() - int(value) < FAR // 2, value
        return new

    def of_model(self, server: Server) -> State:
        """What the server should know in this state."""
        key, calls = server.lock.permits[0], server.pending
        return State(
            key and self.value(key),
            server.lock.queued and self.value(server.lock.queued),
            {note(attempt) for attempt in server.lock.notes},
            calls and (real(calls.claim), calls.attempt.job, calls.number, calls.bodies, calls.time, calls.is_refused),
            {attempt.job: (calls.number, calls.bodies, calls.time) for attempt, calls in server.given},
            server.newest if server.newest[0] else None,
            {real(claim): (asked, number, str(self.value(ticket))) for claim, asked, number, ticket in server.merged},
        )


def follow(keys: Keys, server: Server, command: Command, *, is_clock_behind: bool = False) -> None:
    """Hold the script of `command` against the model, in this state."""
    server = server._replace(clock=0) if is_clock_behind else server
    effect = apply(server, command)
    full = command.full if isinstance(command, Merge) and command.joins else None
    keys.put(server, full=full, is_clock_behind=is_clock_behind)
    reply = keys.store.ask(keys.send(command))[0]
    story = f"{command} on {server}"
    assert reply[0] == effect.reply, story
    if effect.reply in {Tag.QUEUED, Tag.MERGED}:
        assert keys.number(reply[1], effect.number) == effect.number, story
        last = max(server.newest[0], server.pending.number if server.pending else 0)
        assert (reply[1] > keys.base + last) == (effect.number > last) or last == 0, story
    if effect.reply is Tag.MERGED:
        ticket = Merged.of(reply).ticket
        assert (ticket and str(ticket)) == (effect.ticket and str(keys.value(effect.ticket))), story
    if effect.reply is Tag.GRANTED:
        granted = Granted.of(reply, 0.0)
        assert granted.calls == tuple(str(body).encode() for body in effect.bodies), story
        assert (granted.number and keys.number(granted.number, 0)) == (effect.number or 0), story
    if effect.reply is Tag.SUPERSEDED:
        assert reply[1] == server.newest[1].encode(), story
    assert keys.look(effect.number) == keys.of_model(effect.server), story
    left, longest = keys.client.pttl(QUEUED) / 1000, longest_place(server, command, effect)
    assert longest / 2 < left <= longest or not effect.server.lock.queued, story


def longest_place(server: Server, command: Command, effect: Effect) -> float:
    """How long the place in the queue may live at most after a command, in seconds."""
    if effect.reply is Tag.KEPT:
        return NEW_LEASE
    if isinstance(command, Merge) and effect.server != server and effect.reply is not Tag.OUTSTANDING:
        if effect.reply is Tag.MERGED:  # a call that is due at once does not prolong it
            is_early = effect.server.pending is not None and effect.server.pending.time is Time.EARLY
            return SENT_LEASE + EARLY if is_early else OLD_LEASE
        return NEW_LEASE
    queued = effect.server.lock.queued
    if not isinstance(command, Ask) or queued is None or queued.nonce != command.acquire.claim:
        return OLD_LEASE
    return {Tag.CONFLICT: NEW_LEASE, Tag.DUE: NEW_LEASE + EARLY}.get(effect.reply, OLD_LEASE)


def plain(server: Server, command: Command) -> tuple[Server, Command]:
    """The pair with small numbers, and without what the command does not look at: many pairs differ in nothing else."""
    lock, newest, merged = server.lock, server.newest, frozenset[Answer]()
    mine = {getattr(command, "attempt", None)}
    match command:
        case Merge(claim, attempt):
            lock = Lock(queued=lock.queued)
            mine = {attempt, attempt._replace(retries=attempt.retries - 1), server.pending and server.pending.attempt}
            merged = frozenset(one for one in server.merged if one.claim == claim)
        case Ask(Acquire(_, attempt)):
            mine = {attempt, attempt._replace(retries=attempt.retries - 1)}
            lock = lock._replace(notes=lock.notes & {attempt})
        case End(_, over):
            mine, newest = {over}, (0, "")
            server = server._replace(pending=None)
            lock = lock._replace(queued=None, notes=lock.notes & {over})
        case GiveUp(over=over):
            lock, newest, mine = Lock(queued=lock.queued), (0, ""), {over, server.pending and server.pending.attempt}
        case Renew():
            lock, newest = Lock(queued=lock.queued), (0, "")
    given = frozenset(one for one in server.given if one[0] in mine)
    calls = [one for _, one in given] + ([server.pending] if server.pending else [])
    numbers = {
        newest[0],
        getattr(command, "number", 0),
        *(number for one in merged for number in (one.asked, one.number)),
    } - {None}
    numbers |= {number for one in calls for number in (one.number, *one.bodies)}
    small = {number: index for index, number in enumerate(sorted(numbers | {0}))}

    def smaller(one: Calls) -> Calls:
        return one._replace(number=small[one.number], bodies=tuple(small[body] for body in one.bodies))

    if isinstance(command, Merge | Ask) and command.number:
        command = command._replace(number=small[command.number])
    after = Server(
        lock,
        server.pending and smaller(server.pending),
        frozenset((attempt, smaller(one)) for attempt, one in given),
        (small[newest[0]], newest[1]),
        frozenset(one._replace(asked=small[one.asked], number=small[one.number]) for one in merged),
        clock=len(small),
    )
    return after, command


A, B, C = (Attempt(name, 0, 0) for name in "abc")


def small_merges() -> list[tuple[Server, Command]]:
    """Every merge on every place with every calls: the explorations do not meet all of them."""
    jobs = [
        Key(claim, attempt, sending=sending) for claim, attempt in (("h1", A), ("h9", C)) for sending in (False, True)
    ]
    pending = [
        Calls(4, bodies, claim, attempt) for claim, attempt in (("h1", A), ("h9", C)) for bodies in ((4,), (3, 4))
    ]
    pending.append(Calls(4, (4,), "h1", A, Time.EARLY))
    pending.append(Calls(4, (4,), "h1", A, is_refused=True))
    answers = [frozenset({Answer("h9", asked, 4, Key("h1", A))} if asked >= 0 else {}) for asked in (-1, 0, 3)]
    retried = Attempt("c", 1, 0)
    asked = [
        *(Merge("h9", C, joins=joins, is_early=is_early) for joins in (False, True) for is_early in (False, True)),
        *(
            Merge("h9", C, ended=frozenset({"a"}), number=number, joins=joins)
            for number in (0, 3)
            for joins in (False, True)
        ),
        Merge("h9", C, unsent=frozenset({"a"})),
        *(Merge("h9", retried, number=2, is_retry=True, joins=joins) for joins in (False, True)),
    ]
    given = [frozenset[tuple[Attempt, Calls]](), frozenset({(C, Calls(2, (1, 2), time=Time.BEGUN))})]
    states = [
        Server(Lock(queued=queued), calls, before, newest, merged, clock=9)
        for queued, calls in itertools.product((None, *jobs), (None, *pending))
        # A run that is refused gives up its place in the same command.
        if not (queued and calls and calls.is_refused and queued.nonce == calls.claim)
        for newest in ((0, ""), (3, "a"), (7, "b"))
        for merged, before in (*((answer, given[0]) for answer in answers), (answers[0], given[1]))
    ]
    return list(itertools.product(states, asked))


def small_acquires() -> list[tuple[Server, Command]]:
    """Every acquire of a numbered message, whatever its attempt was given and whatever waits."""
    mine, before = Attempt("a", 1, 0), A
    keys = [None, Key("n1", mine), Key("n2", mine), Key("n2", B)]
    pending = [Calls(4, (4,), "h1", mine, time) for time in (Time.EARLY, Time.DUE, Time.EXPIRED)]
    pending += [Calls(4, (3, 4), "h1", mine), Calls(4, (4,), "h2", B)]
    given = [((), ()), ((mine,), (3,)), ((before,), (2,)), ((mine, before), (3, 2))]
    states = [
        Server(
            *(Lock((key,), frozenset({B}), queued=queued), calls),
            frozenset((attempt, Calls(number, (1, number), time=time)) for attempt, number in zip(*kept, strict=True)),
            newest,
        )
        for key, calls, kept in itertools.product(keys, (None, *pending), given)
        for queued in (None, Key("h1", mine), Key("h2", B, sending=True))
        for newest in ((0, ""), (3, "b"), (9, "b"))
        for time in ((Time.BEGUN, Time.EARLY, Time.EXPIRED) if kept[0] == (mine,) and calls is None else (Time.BEGUN,))
    ]
    asked = [
        Ask(Acquire("n1", mine, reads_note, claim=claim), number, body)
        for reads_note, claim, number, body in (
            *((False, "h1", 2, 0), (True, "", 2, 0), (True, "h1", 0, 0)),
            *((False, "", 2, 5), (False, "", 0, 5)),
        )
    ]
    return list(itertools.product(states, asked))
