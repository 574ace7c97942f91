"""Read the Lua scripts: the keys and globals that a script uses. For its commands, see :func:`delayq._redis.rights.commands`.

This is not a parser: the scripts are ours, and their top level is plain. A top-level function begins with ``local function`` in
the first column, and ends with an ``end`` there or on the same line. Code outside functions always runs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq._redis.scripts import Script

_ONE_LINE = re.compile(r"^local function (\w+)\([^\n]*\bend$", re.MULTILINE)
_BLOCK = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)


def without_comments(text: str) -> str:
    """Return the text without its comments. Our scripts have no ``--`` within strings."""
    return re.sub(r"--.*", "", text)


def functions(text: str) -> tuple[dict[str, str], str]:
    """Return the top-level functions by name, and the rest of the text."""
    found: dict[str, str] = {}

    def take(match: re.Match[str]) -> str:
        assert match[1] not in found, f"two functions {match[1]}"
        found[match[1]] = match[0].partition(")")[2]
        return ""

    rest = _BLOCK.sub(take, _ONE_LINE.sub(take, text))
    assert "local function" not in re.sub(r"^ .*", "", rest, flags=re.MULTILINE), "a function that was not seen"
    return found, rest


def calls(text: str) -> list[tuple[str, str]]:
    """Return each command that is called and its first argument as written, which is empty if there is none."""
    found = []
    for match in re.finditer(r"redis\.p?call\(", text):
        command, *arguments = arguments_at(text, match.end())
        found.append((command, arguments[0] if arguments else ""))
    return found


def arguments_at(text: str, at: int) -> list[str]:
    """Return the arguments of a call whose parenthesis was opened before ``at``."""
    parts, depth, start = [], 0, at
    while True:
        character = text[at]
        if character in "'\"":
            at = text.index(character, at + 1)
        elif character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
        elif character in ",)" and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
            if character == ")":
                return parts
        at += 1


def parameters(text: str) -> dict[str, list[str]]:
    """Return the parameters of every local function by its name, including nested functions."""
    found = re.findall(r"\blocal function (\w+)\(([^)]*)\)", text)
    return {name: [part.strip() for part in words.split(",") if part.strip()] for name, words in found}


def unknown_keys(script: Script) -> list[str]:
    """Return arguments in the place of a key that do not come from KEYS, as far as the text shows.

    A key is ``KEYS[...]``, several of these unpacked, a local variable that holds one, or a parameter that every call fills
    with one.
    """
    text = without_comments(script.text)
    named = parameters(text)
    wanted = {argument for command, argument in calls(text) if command != "'TIME'"}
    wrong, done = [], set()
    while wanted:
        argument = wanted.pop()
        if argument in done or re.fullmatch(r"KEYS\[[^\]]+\]|unpack\(KEYS, [^)]+\)", argument):
            continue
        done.add(argument)
        sources = set(re.findall(rf"\blocal {re.escape(argument)} = (KEYS\[[^\]]+\])$", text, re.MULTILINE))
        for name, its in named.items():
            if argument in its:
                for call in re.finditer(rf"(?<!function )(?<![.\w]){name}\(", text):
                    sources.add(arguments_at(text, call.end())[its.index(argument)])
                for handed in re.finditer(rf"pcall\({name}, ([^,]+),", text):
                    sources.add(handed[1])
        # A parameter of a function that this script does not call has no source.
        if not sources and not any(argument in its for its in named.values()):
            wrong.append(argument)
        wanted |= sources
    return wrong


def global_writes(script: Script) -> set[str]:
    """Return the names that are assigned to but never declared as local."""
    text = re.sub(r"'[^'\n]*'", "''", without_comments(script.text))
    declared: set[str] = set()
    for words in re.findall(r"\blocal (?!function)([\w, ]+)", text) + re.findall(r"\bfor ([\w, ]+?) (?:=|in)\b", text):
        declared |= {word.strip() for word in words.split(",")}
    for words in re.findall(r"\bfunction\s*\w*\(([^)]*)\)", text):
        declared |= {word.strip() for word in words.split(",")}
    declared |= set(parameters(text))
    assigned: set[str] = set()
    for words in re.findall(r"(?:^|\bthen |\bdo |\belse |; )\s*((?:\w+)(?:, \w+)*) =(?!=)", text, re.MULTILINE):
        assigned |= {word.strip() for word in words.split(",")}
    globals_made = set(re.findall(r"^\s*function (\w+)", text, re.MULTILINE))
    return (assigned - declared) | globals_made
