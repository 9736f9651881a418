"""The oldest versions that `pyproject.toml` admits, for pip: ``pip install $(python -m tests.packaging.oldest)``."""

from __future__ import annotations

import re
import tomllib

from tests.lab.workers import ROOT


def oldest() -> list[str]:
    """Each dependency of the package, pinned to its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.sub(r">=([^,]+).*", r"==\1", dependency) for dependency in project["dependencies"]]


if __name__ == "__main__":
    print(*oldest())
