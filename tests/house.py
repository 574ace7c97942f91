"""Measure how delayq is built and worded: ``python -m tests.house``, or ``make house``.

Fails if a figure is over its bound. ``--list FIGURE`` prints what a figure counts. A bound is what
the code has reached: when a figure falls, lower its bound, so that it cannot rise again. The goal
says where it should go, and the anchors are the figures of well-kept libraries.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import signal
import statistics
import sys
import tokenize
import tomllib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef

ROOT = Path(__file__).parents[1]
PACKAGE = "delayq"
VERBS = frozenset((ROOT / "tests/data/imperative_verbs.txt").read_text("utf-8").split())
"""The verbs that docstrings begin with. Add one that is missing."""
COMMANDS = frozenset((ROOT / "tests/data/server_commands.txt").read_text("utf-8").split())
IMPURE = frozenset(
    {
        *("anyio", "asyncio", "concurrent", "multiprocessing", "os", "pathlib", "redis", "select"),
        *("selectors", "signal", "socket", "ssl", "subprocess", "threading", "time"),
    }
)
"""What modules that decide must not import: I/O and clocks."""
IMPURE_CALLS = frozenset({"import_module", "now", "today", "utcnow"})
"""The methods that modules that decide must not call: they read a clock, or hide an import."""
PURE_MODULES = 27
"""The number of modules that decide: a docstring that loses the word would end their check."""
MOST_ATTRIBUTES = 12
SHORT_TEXT = 3
"""Words. Shorter strings and cells are names, not prose."""


@dataclass(frozen=True)
class Source:
    """A file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def at(self, node: ast.AST, text: str) -> str:
        """Prefix ``text`` with the place of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 0)}: {text}"


class Passage(NamedTuple):
    """A paragraph, a list item, a row of a table, a comment or a message."""

    path: str
    line: int
    text: str


class Figure(NamedTuple):
    """A figure, and the places that it counts. One without a bound is only reported."""

    name: str
    meaning: str
    value: float
    found: Sequence[str] = ()
    bound: float | None = None
    goal: float | None = None
    anchors: str = ""

    @property
    def fails(self) -> bool:
        return self.bound is not None and self.value > self.bound


def read(root: Path, *patterns: str) -> list[Source]:
    """Read the files of a repository that match any of the patterns."""
    paths = chain.from_iterable(sorted(root.glob(pattern)) for pattern in patterns)
    return [Source(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


def every(sources: Iterable[Source], kind: type[Node]) -> Iterator[tuple[Source, Node]]:
    """Yield all nodes of a kind, each with its file."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, kind):
                yield source, node


def functions(sources: Sequence[Source]) -> Iterator[tuple[Source, Function]]:
    """Yield all functions and methods, each with its file."""
    yield from every(sources, ast.FunctionDef)
    yield from every(sources, ast.AsyncFunctionDef)


# Docstrings


def is_order(docstring: str) -> bool:
    """Tell whether a docstring begins with an imperative: "Count it.", not "Count of messages."."""
    first, second, *_ = [*docstring.split(), "", ""]
    word = first.rstrip(".,:;").replace("-", "").lower()
    title = second == "of" and word not in {"dispose", "warn"}
    return not title and not VERBS.isdisjoint({word, word.removeprefix("re")})


def needs_order(function: Function, docstring: str) -> bool:
    """Tell whether a docstring has to be an order.

    A property names a value, and a constructor may only list its arguments.
    """
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    names_value = any(
        name.endswith(("property", "overload", ".setter", ".deleter")) for name in decorators
    )
    return not names_value and not (function.name == "__init__" and docstring.startswith("Args:"))


def titles(sources: Sequence[Source]) -> tuple[float, list[str]]:
    """Return the percentage of function docstrings that are not orders, and those docstrings."""
    count, found = 0, []
    for source, function in functions(sources):
        docstring = ast.get_docstring(function)
        if docstring and needs_order(function, docstring):
            count += 1
            if not is_order(docstring):
                found.append(source.at(function, f"{function.name}: {docstring.splitlines()[0]}"))
    return 100 * len(found) / max(count, 1), found


# Prose

_STARTS = re.compile(r"[-*+] |\d+\. |\||#|[\w.*`]+(?: \([^)]*\))?: ")
"""The start of a list item, a row, a heading, or an entry of a docstring's section."""
_DIRECTIVE = re.compile(r"#!|# (?:noqa|type|ruff|pragma)\b")
_CODE = re.compile(r"(?::[\w:]+:)?(`+).+?\1|\]\([^)]*\)")
_BREAK = re.compile(r"(?<=[.!?:;])[\"*_]*\s+|\s\(|\|")
_HEADLESS = re.compile(r"[\W_]*(?:what|who)\b(?! to\b)", re.IGNORECASE)
_CONSTANT = re.compile(r"\bso (?:long|many|often)\b(?!(?: \w+){0,2} (?:as|that)\b)", re.IGNORECASE)
_PERSON = re.compile(r"\b(?:some|no|any|every)body\b|\bwhoever\b", re.IGNORECASE)


def paragraphs(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    """Join numbered lines into passages.

    An empty line, a gap or the start of an item ends the passage before it.
    """
    start, last, parts = 0, 0, list[str]()
    for number, text in lines:
        line = text.strip()
        if parts and (not line or number != last + 1 or _STARTS.match(line)):
            yield Passage(path, start, " ".join(parts))
            parts = []
        if line:
            start = start if parts else number
            parts.append(line)
        last = number
    if parts:
        yield Passage(path, start, " ".join(parts))


def python_prose(source: Source) -> Iterator[Passage]:
    """Yield the docstrings, comments and messages of a module."""
    documenting = {node.value for _, node in every([source], ast.Expr)}
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = [
        token
        for token in tokens
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string)
    ]
    lines = [
        (token.start[0], token.string.strip("# "), token.line.lstrip().startswith("#"))
        for token in comments
    ]
    yield from paragraphs(source.path, ((number, text) for number, text, alone in lines if alone))
    yield from (Passage(source.path, number, text) for number, text, alone in lines if not alone)
    inside = {part for _, node in every([source], ast.JoinedStr) for part in node.values}
    for node in source.nodes:
        text = text_of(node)
        if node in documenting:
            yield from paragraphs(
                source.path,
                enumerate(inspect.cleandoc(text).splitlines(), getattr(node, "lineno", 0)),
            )
        elif node not in inside and len(text.split()) >= SHORT_TEXT:
            yield Passage(source.path, getattr(node, "lineno", 0), " ".join(text.split()))


def text_of(node: ast.AST) -> str:
    """Return a string's text, with "x" for each interpolated value; empty for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def lua_prose(source: Source) -> Iterator[Passage]:
    """Yield the comments of a script."""
    lines = (
        (number, line.partition("--")) for number, line in enumerate(source.text.splitlines(), 1)
    )
    yield from paragraphs(
        source.path, ((number, text) for number, (_, dashes, text) in lines if dashes)
    )


def markdown_prose(source: Source) -> Iterator[Passage]:
    """Yield the paragraphs, headings, items and rows of a page, without its code blocks."""
    lines, fence = list[tuple[int, str]](), ""
    for number, line in enumerate(source.text.splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence and not line.startswith(":::"):
            lines.append((number, line.lstrip("> ")))
    yield from paragraphs(source.path, lines)


def is_headless(text: str) -> bool:
    """Tell whether a clause is a sentence or its subject, or "so many" a number."""
    plain = _CODE.sub("x", text)
    clauses = (
        part
        for part in _BREAK.split(plain)
        if len(part.split()) >= SHORT_TEXT and _HEADLESS.match(part)
    )
    return any(not part.rstrip(' "*_)').endswith("?") for part in clauses) or bool(
        _CONSTANT.search(plain)
    )


def names_person(text: str) -> bool:
    """Tell whether a text names an indefinite person, where a client or "you" is meant."""
    return bool(_PERSON.search(_CODE.sub("x", text)))


def per_thousand(
    passages: Iterable[Passage], test: Callable[[str], bool]
) -> tuple[float, list[str]]:
    """Return how many passages pass ``test``, per 1,000 words, and those passages."""
    words, found = 0, []
    for path, line, text in passages:
        words += len(text.split())
        if test(text):
            found.append(f"{path}:{line}: {text}")
    return 1000 * len(found) / max(words, 1), found


# Layers


def raw_commands(sources: Iterable[Source]) -> list[str]:
    """Find the server's commands in calls and lists outside the stores and ``_redis``."""
    outside = [
        source
        for source in sources
        if not re.match(
            rf"{PACKAGE}/(?:_redis/|(?:.*/)?(?:(?:\w+_)?store|moved_partition)\.py$)", source.path
        )
    ]
    calls = ((source, node, node.args) for source, node in every(outside, ast.Call))
    tuples = ((source, node, node.elts[:1]) for source, node in every(outside, ast.Tuple))
    lists = ((source, node, node.elts[:1]) for source, node in every(outside, ast.List))
    return [
        source.at(node, ast.unparse(node))
        for source, node, words in chain[tuple[Source, ast.expr, list[ast.expr]]](
            calls, tuples, lists
        )
        if any(text_of(word) in COMMANDS for word in words)
    ]


def positions(scripts: Iterable[Source]) -> list[str]:
    """Find keys and arguments that the code of a script names by number."""
    return [
        f"{script.path}:{number}: {line.strip()}"
        for script in scripts
        for number, line in enumerate(script.text.splitlines(), 1)
        for _ in re.findall(r"(?:KEYS|ARGV)\[\d+\]", line.partition("--")[0])
    ]


def contract_modules(configuration: Mapping[str, Any]) -> list[str]:
    """List the modules that the import contracts name, each as often as they name it."""
    places = []
    for contract in configuration["tool"]["importlinter"]["contracts"]:
        fields = ("layers", "containers", "modules", "source_modules", "forbidden_modules")
        entries = chain.from_iterable(contract.get(field, ()) for field in fields)
        modules = chain.from_iterable(re.findall(r"[\w.*]+", entry) for entry in entries)
        places += [
            f"{module} in {contract['name']!r}"
            for module in modules
            if module.split(".")[0] == PACKAGE
        ]
    return places


def pure_modules(sources: Iterable[Source]) -> list[Source]:
    """Find the modules whose docstrings call them pure."""
    return [
        source
        for source in sources
        if re.search(r"\bPure[.:]", ast.get_docstring(ast.parse(source.text)) or "")
    ]


def impurities(pure: Sequence[Source]) -> list[str]:
    """Find imports of I/O and clocks in modules, and calls that open files or read a clock."""
    by_name = [
        (source, node, alias.name)
        for source, node in every(pure, ast.Import)
        for alias in node.names
    ]
    from_modules = [
        (source, node, node.module or "") for source, node in every(pure, ast.ImportFrom)
    ]
    imports = [
        source.at(node, module)
        for source, node, module in [*by_name, *from_modules]
        if module.split(".")[0] in IMPURE
    ]
    calls = [
        source.at(node, name)
        for source, node in every(pure, ast.Call)
        if (name := ast.unparse(node.func)) in {"open", "__import__"}
        or name.rpartition(".")[2] in IMPURE_CALLS
    ]
    return imports + calls


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Find groups of modules that import each other.

    Args:
        imports: For each module, the modules that it imports, directly or not.
    """
    groups = {
        frozenset({one, *(other for other in reached if one in imports[other])})
        for one, reached in imports.items()
    }
    return sorted(" <-> ".join(sorted(group)) for group in groups if len(group) > 1)


def imports_of(package: str, *, for_types: bool) -> dict[str, set[str]]:
    """Return the modules of a package, each with all that it imports, directly or not."""
    import grimp  # It comes with import-linter, which the tests can do without.

    graph = grimp.build_graph(package, exclude_type_checking_imports=not for_types, cache_dir=None)
    return {module: graph.find_upstream_modules(module) for module in graph.modules}


# Sizes


def state_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that ``__init__`` sets, and the fields of a mutable dataclass."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    mutable = any("dataclass" in text and "frozen=True" not in text for text in decorators)
    fields = [part for part in node.body if mutable and isinstance(part, ast.AnnAssign)]
    names = {
        ast.unparse(field.target)
        for field in fields
        if "ClassVar" not in ast.unparse(field.annotation)
    }
    for function in node.body:
        if isinstance(function, Function) and function.name == "__init__":
            stored = (
                part
                for part in ast.walk(function)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            )
            names |= {part.attr for part in stored if ast.unparse(part.value) == "self"}
    return names


def heavy_classes(sources: Iterable[Source]) -> list[str]:
    """Find classes with more attributes than a reader can keep in mind."""
    classes = (
        (source, node, sorted(state_of(node))) for source, node in every(sources, ast.ClassDef)
    )
    return [
        source.at(node, f"{node.name} has {len(names)}: {', '.join(names)}")
        for source, node, names in classes
        if len(names) > MOST_ATTRIBUTES
    ]


def bodies(sources: Sequence[Source]) -> list[tuple[int, str]]:
    """Measure function bodies in logical lines, the longest first.

    Docstrings, comments and empty lines do not count. Every statement takes one line, whatever the
    width of the page.
    """
    places = []
    for source, function in functions(sources):
        statements = function.body[ast.get_docstring(function) is not None :]
        lines = sum(len(ast.unparse(statement).splitlines()) for statement in statements)
        if statements:
            places.append((lines, source.at(function, f"{function.name} has {lines} lines")))
    return sorted(places, reverse=True)


# The table


def measure(root: Path) -> Iterator[Figure]:
    """Measure a repository. The package must be importable, too."""
    package, scripts = read(root, f"{PACKAGE}/**/*.py"), read(root, f"{PACKAGE}/**/*.lua")
    tests, pages = read(root, "tests/**/*.py"), read(root, "*.md", "docs/*.md")
    code = [
        *chain.from_iterable(map(python_prose, package)),
        *chain.from_iterable(map(lua_prose, scripts)),
    ]
    docs = [*chain.from_iterable(map(markdown_prose, pages))]

    def share(name: str, meaning: str, found: tuple[float, list[str]], *bounds: Any) -> Figure:
        return Figure(name, meaning, *found, *bounds)

    def count(name: str, meaning: str, found: list[str], *bounds: Any) -> Figure:
        return Figure(name, meaning, len(found), found, *bounds)

    yield share(
        "titles", "function docstrings that are not orders, %", titles(package), 5, 0, "0-3"
    )
    for name, passages in ("code", code), ("docs", docs):
        words = f"per 1,000 words of the {name}"
        found = per_thousand(passages, is_headless)
        yield share(f"headless-{name}", f"clauses as sentences {words}", found, 0.3, 0.3, "0.2")
        found = per_thousand(passages, names_person)
        yield share(f"persons-{name}", f"somebody, nobody, whoever {words}", found, 0.3, 0.3, "0")

    contracts = contract_modules(tomllib.loads((root / "pyproject.toml").read_text("utf-8")))
    at_run_time = circles(imports_of(PACKAGE, for_types=False))
    with_types = circles(imports_of(PACKAGE, for_types=True))
    outside, heavy = raw_commands(package), heavy_classes(package)
    yield count("commands", "server commands outside stores and _redis", outside, 0, 0, "0")
    yield count(
        "positions", "positions instead of names in Lua bodies", positions(scripts), 0, 0, "0"
    )
    yield count("contracts", "module names in the import contracts", contracts, 13, 12, "12")
    pure = pure_modules(package)
    missing = max(0, PURE_MODULES - len(pure))
    yield count("impure", "uses of I/O and clocks in modules called pure", impurities(pure), 0, 0)
    yield Figure("pure", f"modules called pure, fewer than {PURE_MODULES}", missing, (), 0, 0)
    yield count("circles", "circles of imports at run time", at_run_time, 0, 0, "0")
    yield count("circles-types", "circles of imports, types too", with_types, 0, 0, "0")
    yield count("attributes", f"classes with over {MOST_ATTRIBUTES} attributes", heavy, 0, 0, "0")

    measured = bodies(package)
    percentiles = statistics.quantiles([lines for lines, _ in measured], n=100, method="inclusive")
    # A function that only hands on makes the median smaller, and the package no simpler.
    for percentile, bound in (50, 4), (90, 13), (99, 26):
        longer = [place for lines, place in measured if lines > bound]
        meaning = f"lines of function bodies, percentile {percentile}"
        yield Figure(f"bodies-{percentile}", meaning, percentiles[percentile - 1], longer, bound)

    lines, of_tests = (sum(source.lines for source in sources) for sources in (package, tests))
    yield Figure("package-lines", "lines of the package", lines, anchors="12,000-24,000")
    yield Figure("test-lines", "lines of the tests", of_tests)


def table(figures: Iterable[Figure]) -> str:
    """Format figures in aligned columns, one on each line."""

    def shown(number: float | None) -> str:
        return "" if number is None else f"{number:,.2f}".rstrip("0").rstrip(".")

    rows = [("figure", "", "today", "bound", "goal", "anchors")]
    for name, meaning, value, _, bound, goal, anchors in figures:
        rows.append((name, meaning, shown(value), shown(bound), shown(goal), anchors))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>><", widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and what puts figures over their bounds. Return 1 if there is any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house", description="Measure how delayq is built and worded."
    )
    parser.add_argument(
        "--list", metavar="FIGURE", help="print what this figure counts, and nothing else"
    )
    chosen = parser.parse_args(arguments).list
    figures = {figure.name: figure for figure in measure(ROOT)}
    if chosen and chosen not in figures:
        parser.error(f"unknown figure {chosen!r}: choose one of {', '.join(figures)}")
    if chosen:
        print(*figures[chosen].found, sep="\n")
        return 0
    print(table(figures.values()))
    failing = [figure for figure in figures.values() if figure.fails]
    for figure in failing:
        title = f"\n{figure.name} is {figure.value:g}, over its bound of {figure.bound:g}:"
        print(title, *figure.found, sep="\n  ")
    return 1 if failing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence.
    sys.exit(main())
