"""Only the stores and the client of the server know the commands and scripts."""

from __future__ import annotations

import ast
from pathlib import Path

import delayq
from delayq._delayed import store as delayed
from delayq._redis.scripts import Script
from delayq._reliable import store as reliable
from tests.house import COMMANDS

PACKAGE = Path(delayq.__file__).parent
# Tests that move time have scripts of their own.
EXEMPT = {"testing/time_travel.py"}
SCRIPTS = {
    name
    for store in (delayed, reliable)
    for name, value in vars(store).items()
    if isinstance(value, Script)
}


def named(text: str) -> set[str]:
    """Return the commands and scripts that a module names, and the modules that have them."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in COMMANDS:
            names.add(str(node.value))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Script":
            names.add("Script")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("delayq"):
            names |= {alias.name for alias in node.names} & {"store", *SCRIPTS}
    return names


def test_modules_ask_a_store_and_name_neither_commands_nor_scripts() -> None:
    modules = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert {
        module
        for module, path in modules.items()
        if not module.startswith("_redis/") and not module.endswith("/store.py")
        if named(path.read_text("utf-8"))
    } == EXEMPT
    for text in (
        'ask = ("WAIT", 0, 1)',
        "from delayq._reliable.store import CLAIM",
        "from delayq._reliable import store",
        'Script("reliable/claim")',
    ):
        assert named(text), text
    assert not named("from delayq._reliable.store import PAGE, ReliableStore")
