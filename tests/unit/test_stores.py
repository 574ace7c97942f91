"""Only the stores and the client of the server know the commands and scripts."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import delayq
from delayq._redis.scripts import Script
from tests.house import COMMANDS

PACKAGE = Path(delayq.__file__).parent
# Tests that move time have scripts of their own.
EXEMPT = {"testing/time_travel.py"}


def named(text: str) -> set[str]:
    """Return the commands and scripts that a module names, and the modules that have them."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in COMMANDS:
            names.add(str(node.value))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Script":
            names.add("Script")
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("delayq"):
            continue
        for name in (alias.name for alias in node.names):
            if name == "store" or is_script(str(node.module), name):
                names.add(name)
    return names


def is_script(module: str, name: str) -> bool:
    """Return whether a module has a script of this name. Those for Django have none."""
    if module.startswith("delayq.integrations.django"):
        return False
    return isinstance(getattr(import_module(module), name, None), Script)


def test_modules_ask_a_store_and_name_neither_commands_nor_scripts() -> None:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        if not module.startswith("_redis/") and not module.endswith("/store.py"):
            names[module] = named(path.read_text("utf-8"))
    assert {module: found for module, found in names.items() if found}.keys() == EXEMPT


def test_a_command_or_a_script_is_noticed() -> None:
    for text in (
        'await server.command("ZCARD", key)',
        'ask = ("WAIT", 0, 1)',
        "from delayq._reliable.store import CLAIM",
        "from delayq._reliable import store",
        'Script("reliable/claim")',
    ):
        assert named(text), text
    assert not named("from delayq._reliable.store import PAGE, ReliableStore")
