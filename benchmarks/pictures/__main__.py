"""Draw the pictures of docs/ from what was recorded: ``python -m benchmarks.pictures [--record] [name ...]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import drawn, tree
from .scenes import SCENES
from .stage import ROOT, stage

RECORDED = Path(__file__).with_name("recorded")
PICTURES = ROOT / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of: {', '.join(SCENES)}; default: all")
    parser.add_argument("--record", action="store_true", help="play the scenes anew, with real workers and servers")
    given = parser.parse_args()
    names = given.names or list(SCENES)
    if given.record:
        record(names)
    draw(PICTURES)


def record(names: list[str]) -> None:
    """Play scenes, and keep what happened."""
    with stage() as played:
        for name in names:
            cases = []
            for title, play in SCENES[name]:
                with played.case():
                    play(played)
                    cases.append({"title": title, **played.recorded()})
                print(f"{name}: {title}")
            lines = ",\n".join(json.dumps(case) for case in cases)
            (RECORDED / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    tree.picture().write(folder / "choosing.svg")
    for name in SCENES:
        cases = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
        drawn.picture(name, cases).write(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
