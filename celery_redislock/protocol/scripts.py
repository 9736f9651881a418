"""The Lua scripts of the folder lua/, in which the protocol is written."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

Text = str | bytes


def _read(name: str) -> str:
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


PRELUDE = _read("prelude")


#: The line of a script behind which it needs the prelude.
PRELUDE_STANDS_HERE = "\n-- The prelude stands here.\n"


class Script:
    """One Lua file with the prelude in it, and the SHA-1 of both by which the server knows the script."""

    def __init__(self, name: str) -> None:
        before, _, after = _read(name).rpartition(PRELUDE_STANDS_HERE)
        self.text = f"{before}\n{PRELUDE}\n{after}"
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, ACQUIRE_SLOT = Script("acquire"), Script("acquire_slot")
RESERVE, EXPECT, GIVE_UP = Script("reserve"), Script("expect"), Script("give_up")
RELEASE, RENEW = Script("release"), Script("renew")
ENTER, STAND, LEAVE, INSPECT = Script("enter"), Script("stand"), Script("leave"), Script("inspect")


class Command(NamedTuple):
    """A script with its KEYS and ARGV."""

    script: Script
    keys: tuple[str, ...]
    values: tuple[Text, ...]
