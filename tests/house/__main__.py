"""``make house``: print how large and how deep the house is, and fail where a limit of house.toml is passed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from .code import lines_of, lines_of_python
from .imports import MODULES, WEB, longest_chain
from .strangers import strangers

PLAN = tomllib.loads((Path(__file__).parent / "house.toml").read_text(encoding="utf-8"))


def main() -> int:
    """Measure, print, and return the exit code."""
    limits: dict[str, int] = PLAN["limits"]
    undocumented = {name for names in PLAN["undocumented"].values() for name in names}
    chain, reaching = longest_chain(), strangers(PLAN["python"]["names"], undocumented)
    figures = {
        "chain": (len(chain), "modules in the longest chain of imports"),
        "modules": (len(MODULES.keys() - WEB - {"__init__", "__main__"}), "modules"),
        "python": (
            lines_of_python(MODULES.keys() - WEB),
            "lines of Python, without comments, docstrings and blank lines",
        ),
        "lua": (lines_of("*.lua"), "lines of Lua"),
        "strangers": (len(reaching), "modules that use private or undocumented names of other packages"),
        "web_chain": (len(longest_chain(WEB)), "modules in the longest chain of imports of the web page"),
        "web_modules": (len(WEB), "modules of the web page"),
        "web_python": (lines_of_python(WEB), "lines of Python of the web page"),
        "web_files": (lines_of("*.html", "*.css", "*.js"), "lines of its templates, style and script"),
    }
    for name, (figure, text) in figures.items():
        print(f"{figure:6} {text} (limit {limits[name]}){' TOO MANY' if figure > limits[name] else ''}")
    print(f"\nthe longest chain: {' > '.join(chain)}\n")
    for module, names in reaching.items():
        print(f"{module}: {', '.join(names)}")
    return int(any(figure > limits[name] for name, (figure, _) in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
