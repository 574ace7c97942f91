"""How Sphinx makes the documentation site: ``make docs``.

Pages are Markdown; the reference comes from docstrings.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref

ROOT = Path(__file__).parents[1]
# Of this tree, whatever is installed.
sys.path.insert(0, str(ROOT))

project = "delayq"
author = "the authors of delayq"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "delayq"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence"]
# A link to a heading is its words in small letters with dashes, as on the pages of repositories.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# No other site is asked while this one is made.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
# Pages are also read in the repository, where some links lead to files beside docs/. A test looks
# after those.
suppress_warnings = ["myst.xref_missing"]


def _say_which(_: Any, page: Any) -> None:
    """Let a name that delayq and delayq.sync have in common mean the one of delayq, except in the
    other.
    """
    for reference in page.findall(pending_xref):
        if reference.get("py:module") != "delayq.sync" and reference["reftarget"] in _IN_BOTH:
            reference["reftarget"] = f"delayq.{reference['reftarget']}"


_IN_BOTH = {"Client", "DeadLetters", "DelayedQueue", "Receipt", "ReliableQueue"}


def setup(app: Any) -> None:
    """Have each page processed after it was read."""
    app.connect("doctree-read", _say_which)
