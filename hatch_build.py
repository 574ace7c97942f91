"""Makes the links of README.md absolute in packages, so that they work on the package index.

On the pages of the repository they are relative, and lead to files of the same version. Until
``[project.urls]`` names the source, the text of the links is kept without them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Fenced code is found too, so that it is left alone.
LINK = re.compile(r"^```.*?^```|(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", re.DOTALL | re.MULTILINE)


def absolute(text: str, source: str | None, version: str) -> str:
    """Return Markdown whose links to files lead to the release with this version."""

    def link(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if target is None:
            return found[0]
        if source is None:
            return "" if image else words
        kind = "raw" if image else "blob"
        return f"{image}[{words}]({source.rstrip('/')}/{kind}/v{version}/{target})"

    return LINK.sub(link, text)


class LongDescription(MetadataHookInterface):
    """Provides the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, source, metadata["version"]),
        }
