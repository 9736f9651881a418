"""Offers that last for a minute: for one who looks at them, or answers, a second may be over on a busy machine."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha1
from typing import Any

from celery_redislock.line import lines
from celery_redislock.protocol import scripts

_TIMES = "OFFER_MS, CALLED_MS, LINE_MS = {}, {}, 150000"


def lengthen(set_to: Callable[[Any, str, Any], None] = setattr) -> None:
    """Keep a key for a minute for a room to which it is offered, and for a waiter that was called.

    `set_to` sets an attribute of an object, as monkeypatch does for one test.
    """
    with_prelude = [one for one in vars(scripts).values() if scripts.PRELUDE in getattr(one, "text", "")]
    for script in with_prelude:
        assert _TIMES.format(1000, 5000) in script.text
        patient = script.text.replace(_TIMES.format(1000, 5000), _TIMES.format(60_000, 60_000))
        set_to(script, "text", patient)
        set_to(script, "sha", sha1(patient.encode(), usedforsecurity=False).hexdigest())
    for name in ("OFFERED_FOR", "CALLED_FOR"):
        set_to(lines, name, 60.0)
