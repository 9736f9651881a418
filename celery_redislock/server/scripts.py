"""The Lua scripts: the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import NoScriptError

Text = str | bytes


class Script:
    """One Lua file and its digest."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, RELEASE, RENEW, INSPECT, EXPECT = (
    Script(name) for name in ("acquire", "release", "renew", "inspect", "expect")
)


def evaluate(client: redis.Redis, script: Script, keys: Sequence[str], values: Sequence[Text]) -> Any:
    """Run `script` in one round trip; in two where the server does not know it yet."""
    execute: Callable[..., Any] = client.execute_command
    try:
        return execute("EVALSHA", script.sha, str(len(keys)), *keys, *values)
    except NoScriptError:  # a new or restarted server
        return execute("EVAL", script.text, str(len(keys)), *keys, *values)
