"""Links that work on the package index, made by hatch_build.py."""

from __future__ import annotations

import re
import sys
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest

from tests.support.terminal import ROOT


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of hatch_build.py, which imports an interface that only builds have."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface: Any = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = type("Hook", (), {"root": str(ROOT)})
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return run_path(str(ROOT / "hatch_build.py"))


def test_links_lead_to_the_files_of_the_release(hook: dict[str, Any]) -> None:
    text = "[a](docs/a.md#b), ![c](docs/c.svg), [d](https://example.org/d), [e](#e)"
    assert hook["absolute"](text, "https://host/us/it/", "1.2.0") == (
        "[a](https://host/us/it/blob/v1.2.0/docs/a.md#b),"
        " ![c](https://host/us/it/raw/v1.2.0/docs/c.svg), [d](https://example.org/d), [e](#e)"
    )
    # Without a source the words stay, and code is left alone.
    assert hook["absolute"]("![c](docs/c.svg)[a](docs/a.md)", None, "1.2.0") == "a"
    code = "```python\nhandlers[name](value)\n```\n"
    assert hook["absolute"](code + "[a](a.md)", None, "1") == code + "a"


def test_no_link_in_the_long_description_is_relative(hook: dict[str, Any]) -> None:
    for urls in ({}, {"urls": {"Source": "https://host/us/it"}}):
        metadata: dict[str, Any] = {"version": "1.2.0", **urls}
        hook["LongDescription"]().update(metadata)
        text = metadata["readme"]["text"]
        assert metadata["readme"]["content-type"] == "text/markdown"
        assert text.startswith("# delayq\n")
        assert re.findall(r"\]\((?!https://)[^)]+\)", text) == []
        assert ("https://host/us/it/blob/v1.2.0/docs/tutorial.md" in text) == bool(urls)
