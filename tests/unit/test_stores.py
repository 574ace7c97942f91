"""Only the stores and the client of the server know the commands and scripts."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq._redis.scripts import Script
from tests.house import COMMANDS

if TYPE_CHECKING:
    from types import ModuleType

PACKAGE = Path(delayq.__file__).parent

# Tests that move time have scripts of their own.
EXEMPT = {"testing/time_travel.py"}


def modules() -> list[str]:
    """Return the modules that have to ask a store."""
    found = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sorted(
        path for path in found if not path.startswith("_redis/") and not path.endswith("/store.py")
    )


def commands_in(text: str) -> set[str]:
    """Return the commands that a module names."""
    return {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in COMMANDS
    }


def imported(module: str) -> ModuleType:
    """Import a module. Skip the test if it needs a Django that this interpreter cannot have."""
    if module.startswith("delayq.integrations.django"):
        pytest.importorskip("django.tasks", reason="needs Django 6.0, and so Python 3.12")
    return import_module(module)


def scripts_in(text: str) -> set[str]:
    """Return the scripts that a module makes or imports, and the modules that have them."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Script":
            found.add("Script")
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("delayq"):
            continue
        for name in (alias.name for alias in node.names):
            if name == "store" or isinstance(
                getattr(imported(str(node.module)), name, None), Script
            ):
                found.add(name)
    return found


@pytest.mark.parametrize("module", modules())
def test_a_module_asks_a_store_and_names_neither_command_nor_script(module: str) -> None:
    text = (PACKAGE / module).read_text("utf-8")
    named = commands_in(text) | scripts_in(text)
    if module in EXEMPT:
        assert named, f"{module} names none any more: take it off the list"
    else:
        assert not named


def test_each_listed_module_exists() -> None:
    assert set(modules()) >= EXEMPT


@pytest.mark.parametrize(
    "text",
    [
        'await server.command("ZCARD", key)',
        'ask = ("WAIT", 0, 1)',
        "from delayq._reliable.store import CLAIM",
        "from delayq._reliable import store",
        'Script("reliable/claim")',
    ],
)
def test_a_command_or_a_script_is_found(text: str) -> None:
    assert commands_in(text) | scripts_in(text)


def test_other_names_from_a_store_are_not_scripts() -> None:
    assert not scripts_in("from delayq._reliable.store import PAGE, ReliableStore")
