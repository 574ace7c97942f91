"""How Sphinx makes the documentation site: ``make docs``.

Pages are Markdown; the reference comes from docstrings.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref

ROOT = Path(__file__).parents[1]
# Of this tree, whatever is installed.
sys.path.insert(0, str(ROOT))

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
project = "delayq"
author = "the authors of delayq"
release = version = _PROJECT["version"]
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
# `make links` asks other sites, and ends in minutes even if none of them answers.
linkcheck_timeout = 10
linkcheck_retries = 2
linkcheck_rate_limit_timeout = 20
# Pages of the interface to which GitHub's scripts add the anchors.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
# Pages that are also read at the root of the repository, by the names that they have here.
_AT_ROOT = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# The address of the repository, once pyproject.toml has it.
_SOURCE = _PROJECT.get("urls", {}).get("Source")
_INCLUDE = re.compile(r"^<!-- include \.\./(\S+?)(?: until (.+?))? -->$", re.MULTILINE)
# Fenced code is found too, so that it is left alone.
_LINK = re.compile(
    r"^```.*?^```|(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE
)


def _page(app: Any, name: str, texts: list[str]) -> None:
    """Include the files that a page names, and let links lead to pages of this site.

    Links to other files lead to the repository, or become plain text as long as no
    address is known.
    """
    here = Path(app.srcdir)

    def included(found: re.Match[str]) -> str:
        app.env.note_dependency(str(ROOT / found[1]))
        text = (ROOT / found[1]).read_text("utf-8")
        return _linked(text.partition(found[2])[0] if found[2] else text, ROOT, here)

    texts[0] = _INCLUDE.sub(included, _linked(texts[0], (here / name).parent, here))


def _linked(text: str, start: Path, here: Path) -> str:
    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        if target is None:
            return found[0]
        path = (start / target).resolve()
        file = path.relative_to(ROOT).as_posix()
        if file in _AT_ROOT:
            to = _AT_ROOT[file]
        elif path.is_relative_to(here):
            to = path.relative_to(here).as_posix()
        elif not path.exists():
            return found[0]  # which the parser reports
        elif _SOURCE is None:
            return words
        else:
            to = f"{_SOURCE}/blob/v{release}/{file}"
        return f"{image}[{words}]({to}{anchor or ''})"

    return _LINK.sub(link, text)


def _say_which(_: Any, page: Any) -> None:
    """Let a name that delayq and delayq.sync have in common mean the one of delayq, except in the
    other.
    """
    for reference in page.findall(pending_xref):
        if reference.get("py:module") != "delayq.sync" and reference["reftarget"] in _IN_BOTH:
            reference["reftarget"] = f"delayq.{reference['reftarget']}"


_IN_BOTH = {"Batch", "Client", "DeadLetters", "DelayedQueue", "Receipt", "ReliableQueue"}


def setup(app: Any) -> None:
    """Have each page processed before and after it is parsed."""
    app.connect("source-read", _page)
    app.connect("doctree-read", _say_which)
