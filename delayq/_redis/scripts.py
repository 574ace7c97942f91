"""Lua scripts, which declare themselves at their heads, and calls to them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)
# A line of the head that names keys or arguments, and not the next line of a description.
_NAMES = re.compile(r"^--   (\S.*?)(?:  +(.*))?$", re.MULTILINE)
_FROM_INCLUDE = re.compile(r"see (\w+/)?(include/\w+\.lua)")
_NUMBERED = re.compile(r"(\w+_)(\d) to \1(\d)")
_COMMENT_LINES = re.compile(r"^ *--[^\n]*\n", re.MULTILINE)
# A top-level function, up to an ``end`` in the first column or on its first line.
_FUNCTION = re.compile(
    r"^local function (\w+)\((?:[^\n]*\bend$|(?:[^\n]*\n)*?end$)\n?", re.MULTILINE
)
_COMMENT_OR_STRING = re.compile(r"--[^\n]*|'[^'\n]*'")
_NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


@dataclass(frozen=True)
class Script:
    """One script, which declares itself in the comment at the head of its file.

    CONTRIBUTING.md shows one.

    The body reads its KEYS and ARGV by these names. Names that end in ``...`` come last, and
    repeat. A single one gives the script a table named in the plural. With several, the script
    walks from ``FIRST`` in steps of ``STRIDE``, and finds ``id...`` of each step at the offset
    ``ID``; there are ``COUNT`` steps. Names that end in ``_0``, ``_1``, and so on give it one table
    by that number.

    Attributes:
        name: The file in ``lua``, with its folder.
    """

    name: str

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The names of the keys, with those that an include lists."""
        return tuple(_names("Keys", self.head, self._folder))

    @cached_property
    def args(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(_names("Arguments", self.head, self._folder))

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that run the script: see :mod:`delayq.admin.acl`."""
        return frozenset(filter(None, self._fact("Roles").split(", ")))

    @cached_property
    def repeatable(self) -> bool:
        """Whether running it again changes nothing: then it is retried after a lost reply."""
        return self._fact("Repeatable") == "yes"

    @cached_property
    def stores(self) -> bool:
        """Whether it stores new messages: then there must be room for them on the disk."""
        return self._fact("Stores") == "yes"

    @cached_property
    def undone_by(self) -> Script | None:
        """The script that undoes this one, whose rights are checked along with its own."""
        name = self._fact("Undone by")
        return Script(f"{self._folder}/{name}") if name else None

    @cached_property
    def head(self) -> str:
        """The comment that declares the script, up to its reply."""
        return self._body.partition("\n-- Returns ")[0] + "\n"

    @cached_property
    def text(self) -> str:
        """The script as the server gets it: with local names and includes, without lines that are
        comments, and without functions that it does not call.
        """
        text = _COMMENT_LINES.sub("", self._with_includes(self._body))
        text, names = without_unused_functions(text)
        local = {name: value for name, value in self.variables.items() if name in names}
        return f"local {', '.join(local)} = {', '.join(local.values())}\n{text}"

    @cached_property
    def variables(self) -> dict[str, str]:
        """The local names that the script may use, each with its value in Lua."""
        return variables_of(self.keys, self.args)

    @cached_property
    def sha(self) -> str:
        """The script's name on the server."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @property
    def _folder(self) -> str:
        return self.name.rpartition("/")[0]

    @cached_property
    def _body(self) -> str:
        return _lua(f"{self.name}.lua").read_text("utf-8")

    def _with_includes(self, text: str) -> str:
        """Put the includes that a text names in their places, and those that they name."""
        return _INCLUDE.sub(lambda match: self._with_includes(self._include(match[1])), text)

    def _include(self, name: str) -> str:
        """Read an include from beside the script, or from those that all scripts share."""
        beside = _lua(f"{self._folder}/include/{name}.lua")
        return (beside if beside.is_file() else _lua(f"include/{name}.lua")).read_text("utf-8")

    def _fact(self, title: str) -> str:
        line = re.search(rf"^-- {title}: (.+)$", self.head, re.MULTILINE)
        return line[1] if line else ""


class Request(NamedTuple):
    """A call to a script.

    Attributes:
        script: The script.
        keys: Its keys.
        args: Its arguments.
        deadline: Until when to retry it, by the event loop's clock; None: for as long as others.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int]
    deadline: float | None = None

    def __repr__(self) -> str:
        return f"<Request {self.script.name}, {len(self.args)} arguments>"


@cache
def scripts_in(folder: str) -> tuple[Script, ...]:
    """Return the scripts in a folder of ``lua``, by name."""
    files = sorted(file.name for file in _lua(folder).iterdir() if file.name.endswith(".lua"))
    return tuple(Script(f"{folder}/{file.removesuffix('.lua')}".lstrip("/")) for file in files)


def variables_of(keys: Sequence[str], args: Sequence[str]) -> dict[str, str]:
    """Return the local names for keys and arguments of these names, each with its value in Lua."""
    return dict(chain(_variables("KEYS", keys), _variables("ARGV", args)))


def names_in(text: str) -> set[str]:
    """Return the names that a Lua text uses, except for fields after a dot."""
    return set(_NAME.findall(_COMMENT_OR_STRING.sub("''", text)))


def without_unused_functions(text: str) -> tuple[str, set[str]]:
    """Return a Lua text without the functions of its top level that it never calls, and the names
    that it uses.
    """
    parts: list[str] = []
    names: set[str] = set()
    # From the end, because a function is known only to the text that follows it.
    for function in reversed([*_FUNCTION.finditer(text)]):
        text, tail = text[: function.start()], text[function.end() :]
        parts.append(tail)
        names |= names_in(tail)
        if function[1] in names:
            parts.append(function[0])
            names |= names_in(function[0])
    return text + "".join(reversed(parts)), names | names_in(text)


def _lua(path: str) -> Traversable:
    # Importing it takes a tenth of the time that importing delayq does.
    from importlib.resources import files  # noqa: PLC0415

    return files("delayq").joinpath("lua", *path.split("/"))


def _names(title: str, head: str, folder: str) -> Iterator[str]:
    """Yield the names that a section of a head lists, in order."""
    section = re.search(rf"^-- {title}:\n((?:--   .*\n)+)", head, re.MULTILINE)
    for names, description in _NAMES.findall(section[1]) if section else ():
        if elsewhere := _FROM_INCLUDE.fullmatch(description):
            beside = (elsewhere[1] or folder).removesuffix("/")
            include = _lua(f"{beside}/{elsewhere[2]}").read_text("utf-8")
            yield from _names(title, include, beside)
        elif numbered := _NUMBERED.fullmatch(names):
            first, last = int(numbered[2]), int(numbered[3])
            yield from (f"{numbered[1]}{number}" for number in range(first, last + 1))
        else:
            yield from names.split(", ")


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
