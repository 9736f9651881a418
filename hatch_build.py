"""The metadata that hangs on the repository's address, which is one line of `pyproject.toml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A relative link of Markdown: its text and its target.
RELATIVE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")
NO_ADDRESS = "The pages that this text names are in the folder `docs` of the source distribution.\n"


class FromAddress(MetadataHookInterface):
    """Sets the project's URLs and the description that a package index shows."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Complete the `[project]` table.

        Args:
            metadata: The table, as it stands in `pyproject.toml`.
        """
        address = self.config["repository"].rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": described(readme, f"{address}/blob/v{metadata['version']}" if address else ""),
        }
        metadata["urls"] = urls(address) if address else {}


def urls(address: str) -> dict[str, str]:
    """The links that a package index shows next to the description."""
    return {
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Source": address,
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def described(readme: str, files: str) -> str:
    """The README for a reader who does not have the repository's files.

    Args:
        readme: Its Markdown, with links that are relative to the repository.
        files: The address of the files of this version. Empty: there is none yet, so a link becomes its text.
    """
    if files:
        return RELATIVE.sub(rf"[\1]({files}/\2)", readme)
    return RELATIVE.sub(r"\1", readme) + "\n" + NO_ADDRESS
