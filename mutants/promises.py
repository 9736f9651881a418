"""Promises: what a mutant breaks. docs/guarantees.md says each of them at length."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """What is promised, in the order of the tables in docs/how-it-is-tested.md."""

    OWNER = "Nobody's lock is released or extended by anyone but its owner"
    AT_MOST_N = "At most N hold a key at once; without a `lock_limit` one"
    TOLD = "A holder knows of its loss at its own deadline at the latest"
    FREED = "However a run ends, no key stays locked"
    COPIES = "A copy neither runs beside its first delivery nor after that has finished"
    NOT_DROPPED = "No task is dropped because a lock lapsed, a message came twice or Redis was away"
    POLICY = "A duplicate, and nothing else, meets its policy"
    PUBLISH = "A publish is answered with a job that its caller can wait for, or is sent"
    RESERVED = "A key is reserved for its message alone, and no longer than that may come"
    LINE = "Who waits has a turn, in the order of the ranks, and no key idles beside who waits"
    ACKS = "What waits in a worker stays with the broker, and the worker goes on fetching"
    FENCE = "Each holder has a greater fencing number than all before it"
    KEYS = "One call has one key, and different calls have different ones"
    CONTEXT = "A lock is held by the context, the thread and the process that have acquired it"
