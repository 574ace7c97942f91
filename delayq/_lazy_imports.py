"""Imports the names of a package when they are used first (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    Hide both from type checkers, to which every name would seem to exist otherwise.

    Args:
        package: The package's ``__name__``.
        homes: The module in the package that defines each name; ``"."`` if the name is a module
            itself.
    """
    module = sys.modules[package]

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == ".":
            return import_module(f"{package}.{name}")
        try:
            loaded = import_module(f"{package}.{home}")
        except AttributeError as error:
            # Python would take it to mean that there is no such name.
            raise ImportError(f"{package}.{home} cannot be imported: {error}") from error
        value = getattr(loaded, name)
        # From now on, the name is found without this call.
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *homes})
