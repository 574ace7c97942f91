"""Several fields of one thing in one assertion."""

from __future__ import annotations

from typing import Any


def fields(of: Any, names: str) -> tuple[Any, ...]:
    """Return the entries of a dict, or the attributes of an object, that ``names`` lists."""
    return tuple(of[name] if isinstance(of, dict) else getattr(of, name) for name in names.split())
