"""Mutant: one mistake as a small patch, with the promise that it breaks and the test that must find it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from promises import Promise

ROOT = Path(__file__).resolve().parents[1]
PATCHES = Path(__file__).with_name("patches")
_HEAD = re.compile(
    r"(?P<mistake>.+?)\n\nPromise: (?P<promise>\w+)\nKilled by: (?P<killer>\S+)\n\n(?P<diff>--- .+)", re.DOTALL
).fullmatch
_FILE = re.compile(r"^--- a/(.+)\n\+\+\+ b/\1\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ .*\n", re.MULTILINE)


class Misfit(Exception):
    """A patch does not fit the code: its old lines are not there, or are there more than once."""


class Mutant(NamedTuple):
    """What a file of `PATCHES` says."""

    name: str
    mistake: str
    """What is wrong with it, in a sentence."""
    promise: Promise
    killer: str
    """The test that must fail, as pytest names it."""
    diff: str

    @classmethod
    def read(cls, file: Path) -> Self:
        """The mutant in `file`.

        Raises:
            ValueError: The file does not begin as it should.
        """
        found = _HEAD(file.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError(f"{file}: it begins with the mistake, its promise and its killer; see CONTRIBUTING.md")
        mistake = " ".join(found["mistake"].split())
        return cls(file.stem, mistake, Promise[found["promise"]], found["killer"], found["diff"])

    def changed(self, files: Mapping[str, str] | None = None) -> dict[str, str]:
        """The text of each file that the patch changes, after it.

        A change goes where its old lines stand, and not where its line numbers say: they move with each edit
        of the code. So these lines must stand there exactly once; `patch` would take the nearest that look like them.

        Args:
            files: The text of each file, by its path; None for those of this tree.

        Raises:
            Misfit: The patch does not fit.
        """
        texts: dict[str, list[str]] = {}
        for path, old, new in self._hunks():
            if path not in texts:
                text = files[path] if files else (ROOT / path).read_text(encoding="utf-8")
                texts[path] = text.splitlines(keepends=True)
            lines, count = texts[path], len(old)
            starts = [start for start in range(len(lines)) if lines[start : start + count] == old]
            if len(starts) != 1:
                raise Misfit(f"{self.name}: these lines must be in {path} once, and no more:\n{''.join(old)}")
            lines[starts[0] : starts[0] + count] = new
        return {path: "".join(lines) for path, lines in texts.items()}

    def _hunks(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """The path of each change, its old lines and its new ones."""
        _, *parts = _FILE.split(self.diff)
        for path, hunks in zip(parts[::2], parts[1::2], strict=True):
            for hunk in _HUNK.split(hunks)[1:]:
                lines = hunk.splitlines(keepends=True)
                yield path, [one[1:] for one in lines if one[0] in " -"], [one[1:] for one in lines if one[0] in " +"]


def mutants() -> list[Mutant]:
    """All mutants, in the order of their promises and names."""
    found = [Mutant.read(file) for file in sorted(PATCHES.glob("*.patch"))]
    order = list(Promise)
    return sorted(found, key=lambda mutant: order.index(mutant.promise))
