"""The documents name tests, modules and targets that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import typer

import delayq
from delayq.cli.app import app

ROOT = Path(__file__).parents[2]
PACKAGE = Path(delayq.__file__).parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
APPLICATION = typer.main.get_command(app)


def missing_tests(text: str, files: dict[str, str]) -> list[str]:
    """Return the tests that a text names, as ``file.py::name`` or by file, and that are gone."""
    missing: list[str] = []
    for file, names in re.findall(r"(?<![\w{])(test_\w+\.py)((?:::\w+)*)", text):
        if (known := files.get(file)) is None:
            missing.append(file)
            continue
        parts = names.split("::")[1:]
        missing += [name for name in parts if not re.search(rf"(def|class) {name}\b", known)]
    return missing


def test_every_test_that_a_page_names_exists() -> None:
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text("utf-8")
    for page in PAGES:
        assert missing_tests(page.read_text("utf-8"), files) == [], page.name


def test_every_module_that_a_page_names_exists() -> None:
    # The module map names modules by their place in a package, and is checked below.
    for page in (page for page in PAGES if page.name != "module-map.md"):
        named = re.findall(
            r"`(?:delayq/)?((?:_\w+|admin|codecs|worker|cli|integrations|testing)/[\w/]+\.py)`",
            page.read_text("utf-8"),
        )
        assert [path for path in named if not (PACKAGE / path).exists()] == [], page.name


def test_the_module_map_is_made_from_the_docstrings_of_today() -> None:
    page = (ROOT / "docs" / "module-map.md").read_text("utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "modules.py"))["page"](), (
        "run: python docs/modules.py"
    )


def test_the_code_in_the_guide_for_contributors_is_in_the_package() -> None:
    sources = [
        dedent_all(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", ".lua"}
    ]
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    blocks = re.findall(r"^( *)```(?:python|lua)\n(.*?)^\1```", guide, re.DOTALL | re.MULTILINE)
    excerpts = [part for _, block in blocks for part in re.split(r"\n\s*\n\s*\n", block)]
    assert len(excerpts) > 4
    for excerpt in excerpts:
        text = dedent_all(excerpt).strip()
        assert any(text in source for source in sources), f"not in the package:\n{excerpt}"


def dedent_all(text: str) -> str:
    """Return a text without blank lines, and without the white space before and after lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_every_target_of_make_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ((?:[a-z-]+ ?)+)", page.read_text("utf-8"))
        assert {*" ".join(named).split()} <= targets, page.name


def wrong_commands(text: str) -> list[str]:
    """Return the ``delayq`` commands in a text that there are not, or not with these options."""
    wrong = []
    spans = re.findall(r"`(delayq +[^`]+)`|^(?:\$ |[A-Z_]+=\S+ )+(delayq .*)$", text, re.MULTILINE)
    for line in (inline or shown for inline, shown in spans):
        command: Any = APPLICATION
        words = line.partition(" | ")[0].split()[1:]
        while words and hasattr(command, "commands"):
            if words[0].startswith("-"):
                break
            command = command.commands.get(words.pop(0))
        known = {"--help", "--install-completion"}
        for each in getattr(command, "params", ()):
            known |= {*each.opts, *each.secondary_opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if command is None or given - known:
            wrong.append(line)
    return wrong


def test_every_command_that_a_page_shows_exists() -> None:
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert wrong_commands(page.read_text("utf-8")) == [], page.name
    wrong = ("delayq dead list --queue mails", "delayq lost", "delayq top --watch")
    right = "`delayq dead list mails --limit 5`\n$ delayq queues --json | head -n 1"
    assert wrong_commands("`{}`, `{}`\n$ {}\n".format(*wrong) + right) == [*wrong]
