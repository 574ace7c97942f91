"""The declaration of a Lua script, which is its contract, and calls to it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)
# A function of the top level, with its comment: it ends with an ``end`` in the first column, or on
# the line on which it begins.
_FUNCTION = re.compile(
    r"(?:^--[^\n]*\n)*^local function (\w+)\((?:[^\n]*\bend$|.*?^end$)\n?", re.MULTILINE | re.DOTALL
)
_COMMENT_OR_STRING = re.compile(r"--[^\n]*|'[^'\n]*'")
_NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


@dataclass(frozen=True)
class Script:
    """One script, which reads its KEYS and ARGV by the names that are declared here.

    Names that end in ``...`` come last, and repeat. A single one gives the script a table named in
    the plural. With several, the script walks from ``FIRST`` in steps of ``STRIDE``, and finds
    ``id...`` of each step at the offset ``ID``; there are ``COUNT`` steps. Names that end in
    ``_0``, ``_1``, and so on give it one table by that number.

    Attributes:
        name: The file in ``lua``, with its folder.
        repeatable: Whether running it twice has the same effect as running it once, so that it is
            retried if its answer is lost.
        followed_by: The script that undoes it, whose rights are checked along with its own.
        package: The package that has the folder ``lua``.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    repeatable: bool = False
    followed_by: Script | None = None
    package: str = "delayq"

    @cached_property
    def text(self) -> str:
        """The script as the server gets it: its local names, its includes and its body, without
        functions that it never calls.

        An include is looked up beside the script first, then among those that all scripts share.
        """
        from importlib.resources import files  # noqa: PLC0415 - it takes a tenth of the time that importing delayq does

        root = files(self.package).joinpath("lua")
        folder = root.joinpath(*self.name.split("/")[:-1])

        def include(name: str) -> str:
            own = folder.joinpath("include", f"{name}.lua")
            return (own if own.is_file() else root.joinpath("include", f"{name}.lua")).read_text(
                "utf-8"
            )

        body = root.joinpath(*f"{self.name}.lua".split("/")).read_text("utf-8")
        text = without_unused_functions(_INCLUDE.sub(lambda match: include(match[1]), body))
        used = names_in(text)
        local = {name: value for name, value in self.variables.items() if name in used}
        return f"local {', '.join(local)} = {', '.join(local.values())}\n{text}"

    @cached_property
    def variables(self) -> dict[str, str]:
        """The local names that the script may use, each with its value in Lua."""
        return dict(chain(_variables("KEYS", self.keys), _variables("ARGV", self.args)))

    @cached_property
    def sha(self) -> str:
        """The script's name on the server."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Request(NamedTuple):
    """A call to a script.

    Attributes:
        until: When to stop retrying it, on the event loop's clock. None: after the same time as any
            other call.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int]
    until: float | None = None

    def __repr__(self) -> str:
        return f"<Request {self.script.name}, {len(self.args)} arguments>"


def names_in(text: str) -> set[str]:
    """Return the names that a Lua text uses, except for fields after a dot."""
    return set(_NAME.findall(_COMMENT_OR_STRING.sub("''", text)))


def without_unused_functions(text: str) -> str:
    """Return a Lua text without the functions of its top level that it never calls."""
    kept: list[str] = []
    used: set[str] = set()
    # From the end, because a function is known only to the text that follows it.
    for function in reversed([*_FUNCTION.finditer(text)]):
        text, rest = text[: function.start()], text[function.end() :]
        kept.append(rest)
        used |= names_in(rest)
        if function[1] in used:
            kept.append(function[0])
            used |= names_in(function[0])
    return text + "".join(reversed(kept))


def _variables(source: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    columns = [name.removesuffix("...") for name in names if name.endswith("...")]
    before = len(names) - len(columns)
    numbered: dict[str, list[str]] = {}
    for at, name in enumerate(names[:before], 1):
        table, _, number = name.rpartition("_")
        if number.isdigit():
            numbered.setdefault(table, []).append(f"{source}[{at}]")
        else:
            yield name, f"{source}[{at}]"
    for table, members in numbered.items():
        yield table, f"{{[0] = {', '.join(members)}}}"
    if len(columns) == 1:
        yield f"{columns[0]}s", f"{{unpack({source}, {before + 1})}}" if before else source
    elif columns:
        yield from (("FIRST", f"{before + 1}"), ("STRIDE", f"{len(columns)}"))
        yield "COUNT", f"(#{source} - {before}) / {len(columns)}"
        yield from ((column.upper(), f"{offset}") for offset, column in enumerate(columns))
