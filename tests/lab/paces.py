"""Paces: which tokens of Celery's `rate_limit` a worker takes and gives back, by the clock of their bucket.

A body starts some time after its message has taken a token: on a busy machine one starts late, and the next does not.
So the starts of bodies do not tell how often a worker lets one begin.
"""

from __future__ import annotations

from kombu.utils.limits import TokenBucket

from tests.lab.ledger import Ledger


def note_tokens(ledger: Ledger) -> None:
    """From now on, write down in the ledger what this process takes out of a bucket, and what it puts back there."""
    can_consume = TokenBucket.can_consume

    def noted(bucket: TokenBucket, tokens: float = 1) -> bool:
        taken = can_consume(bucket, tokens)
        if taken:  # by `timestamp` the bucket itself has counted
            ledger.write({"event": "token", "tokens": tokens, "at": bucket.timestamp})
        return bool(taken)

    TokenBucket.can_consume = noted


def tokens_noted(ledger: Ledger) -> list[tuple[float, float]]:
    """How many tokens were taken, below 0 where they were given back, and when; in the order of time."""
    return [(line["tokens"], line["at"]) for line in ledger.lines() if line["event"] == "token"]
