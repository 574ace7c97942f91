"""The keys and globals that a Lua script uses.

This is not a parser: the scripts are ours, and plain. Names count for the whole script.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from delayq._redis.scripts import names_in, scripts_in

if TYPE_CHECKING:
    from delayq._redis.scripts import Script

SCRIPTS = (*scripts_in(""), *scripts_in("redisson"), *scripts_in("reliable"))
"""The scripts that clients run."""
_WRITING = """
    SET DEL UNLINK RENAME PEXPIRE ZADD ZREM ZREMRANGEBYRANK HSET HDEL LPUSH RPUSH LPOP RPOP LSET
    LREM LTRIM
"""
WRITING = frozenset(_WRITING.split())
"""The commands in scripts that change what is stored."""
_KEYWORDS = """
    and break do else elseif end false for function if in local nil not or repeat return then
    true until while
"""
_GIVEN = """
    redis cjson struct string math table tonumber tostring type ipairs pairs pcall unpack KEYS ARGV
"""


def without_comments(text: str) -> str:
    """Return the text without its comments. Our scripts have no ``--`` within strings."""
    return re.sub(r"--.*", "", text)


def calls(text: str) -> list[tuple[str, str]]:
    """Return each command that is called and its first argument as written, if any."""
    names = []
    for match in re.finditer(r"redis\.p?call\(", text):
        command, *arguments = arguments_at(text, match.end())
        names.append((command, arguments[0] if arguments else ""))
    return names


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
    definitions = re.findall(r"\blocal function (\w+)\(([^)]*)\)", text)
    return {
        name: [part.strip() for part in words.split(",") if part.strip()]
        for name, words in definitions
    }


def unknown_keys(script: Script) -> list[str]:
    """Return expressions in the place of a key that do not come from KEYS.

    A key is an item of KEYS, several of these unpacked, a local variable or a table that holds
    such, the result of a function that returns such, or a parameter that every call fills with one.
    """
    text = without_comments(script.text)
    # These two name no key: PUBSUB has a subcommand and channels.
    exempt = {"'TIME'", "'PUBSUB'"}
    waiting = {argument for command, argument in calls(text) if command not in exempt}
    done, wrong = set(), []
    while waiting:
        expression = waiting.pop()
        if expression in done or re.fullmatch(r"KEYS(\[[^\]]+\])?", expression):
            continue
        done.add(expression)
        sources = _sources(text, expression)
        if not sources:
            wrong.append(expression)
        waiting |= sources
    return wrong


def _sources(text: str, expression: str) -> set[str]:
    """Return the expressions from which an expression gets its value."""
    if expression.startswith("unpack("):
        return {arguments_at(expression, len("unpack("))[0]}
    if re.fullmatch(r"\{.+\}", expression):
        return {member.removeprefix("[0] = ") for member in _listed(expression[1:-1])}
    if item := re.fullmatch(r"(\w+)\[[^\]]+\]", expression):
        return {item[1]}
    if call := re.fullmatch(r"(\w+)\(\)", expression):
        returned = re.findall(
            rf"\blocal function {call[1]}\(\) return (.+) end$", text, re.MULTILINE
        )
        return {value for values in returned for value in _listed(values)}
    if not re.fullmatch(r"\w+", expression):
        return set()
    found = set()
    for names, values in re.findall(r"^\s*(?:local )?(\w+(?:, \w+)*) = (.+)$", text, re.MULTILINE):
        if expression in names.split(", "):
            found.add(_listed(values)[names.split(", ").index(expression)])
    for loop in re.finditer(rf"\bfor \w+, {expression} in ipairs\(", text):
        found.add(arguments_at(text, loop.end())[0])
    for name, its in parameters(text).items():
        if expression in its:
            place = its.index(expression)
            for call in re.finditer(rf"(?<!function )(?<![.\w]){name}\(", text):
                found.add(arguments_at(text, call.end())[place])
            for call in re.finditer(rf"\bpcall\({name}, ", text):
                found.add(arguments_at(text, call.end())[place])
    return found


def _listed(values: str) -> list[str]:
    """Split expressions at their commas."""
    return arguments_at(f"{values})", 0)


def declared(text: str) -> list[str]:
    """Return the locals, loop variables, parameters and functions, once for each declaration."""
    names: list[str] = [*parameters(text)]
    for words in (
        *re.findall(r"\blocal (?!function)([\w, ]+)", text),
        *re.findall(r"\bfor ([\w, ]+?) (?:=|in) ", text),
        *re.findall(r"\bfunction\s*\w*\(([^)]*)\)", text),
    ):
        names += [word.strip() for word in words.split(",") if word.strip()]
    return names


def unknown_names(script: Script) -> set[str]:
    """Return the names that are used or assigned to, but neither declared nor given to every
    script.
    """
    text = re.sub(r"'[^'\n]*'", "''", without_comments(script.text))
    # What looks like the fields of a table may be variables that share an assignment.
    assignment = r"(^|\bthen |\bdo |\belse |; )\s*(local )?\w+(, \w+)* =(?!=)"
    tables = re.sub(assignment, r"\1", text, flags=re.MULTILINE)
    fields = set(re.findall(r"[{,]\s*(\w+) = ", tables))
    return names_in(text) - {*declared(text)} - {*_KEYWORDS.split(), *_GIVEN.split()} - fields
