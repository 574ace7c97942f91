"""A look into the Lua texts: which commands a script can reach.

No parser: the texts are ours, and their top level is plain. A function of the top level begins with ``local function`` in the
first column, and ends with an ``end`` there or on its own line. What stands outside of functions runs always.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq._redis.scripts import Script

_ONE_LINE = re.compile(r"^local function (\w+)\([^\n]*\bend$", re.MULTILINE)
_BLOCK = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")


def without_comments(text: str) -> str:
    """The text without what follows ``--``; ours has none of these within strings."""
    return re.sub(r"--.*", "", text)


def functions(text: str) -> tuple[dict[str, str], str]:
    """The functions of the top level by name, and the rest."""
    found: dict[str, str] = {}

    def take(match: re.Match[str]) -> str:
        assert match[1] not in found, f"two functions {match[1]}"
        found[match[1]] = match[0].partition(")")[2]
        return ""

    rest = _BLOCK.sub(take, _ONE_LINE.sub(take, text))
    assert "local function" not in re.sub(r"^ .*", "", rest, flags=re.MULTILINE), "a function that was not seen"
    return found, rest


def commands(script: Script) -> set[str]:
    """The commands that a script may call: those of its own, and of every function that it can reach."""
    known, rest = functions(without_comments(script.text))
    reached: set[str] = set()
    waiting = [rest]
    result: set[str] = set()
    while waiting:
        text = waiting.pop()
        result |= set(_CALL.findall(text))
        # Called, or handed to pcall.
        names = {name for name in known if re.search(rf"(?<![.\w]){name}(?=\()|\({name}(?=,)", text)} - reached
        reached |= names
        waiting += [known[name] for name in names]
    return result
