"""How error messages name what was passed."""

from __future__ import annotations

_LONGEST = 60


def given(value: object) -> str:
    """Return a value, cut if it is long, and its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a class may raise anything; ints of thousands of digits do
        return f"a value of type {type(value).__name__}"
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return shown if value is None else f"{shown} ({type(value).__name__})"
