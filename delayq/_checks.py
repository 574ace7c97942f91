"""Checks of arguments, and the words in which errors name what was passed."""

from __future__ import annotations

from delayq.errors import BadInput

_MAX_TEXT = 60
# The server's proto-max-bulk-len, minus room for the data around a payload.
_LARGEST_STRING = 512 * 1024 * 1024 - 64 * 1024


def describe_value(value: object) -> str:
    """Return a value, cut if it is long, and its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a class may raise anything; ints of thousands of digits do
        return f"a value of type {type(value).__name__}"
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return text if value is None else f"{text} ({type(value).__name__})"


def check_count(count: int | None, name: str, minimum: int = 0) -> None:
    """Raise :class:`~delayq.BadInput` unless ``count`` is None or an int of at least
    ``minimum``.
    """
    if count is not None and (
        isinstance(count, bool) or not isinstance(count, int) or count < minimum
    ):
        raise BadInput(f"{name} must be an int of at least {minimum}, not {describe_value(count)}")


def check_limit(limit: int | None, name: str) -> None:
    """Raise :class:`~delayq.BadInput` unless ``limit`` is None or an int of at least 1."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadInput(f"{name} must be None or an int of at least 1, not {describe_value(limit)}")


def check_flag(flag: bool, name: str) -> None:
    """Raise :class:`~delayq.BadInput` unless ``flag`` is True or False."""
    if not isinstance(flag, bool):
        raise BadInput(f"{name} must be True or False, not {describe_value(flag)}")


def check_max_payload(size: int) -> None:
    """Raise :class:`~delayq.BadInput` unless ``size`` is a number of bytes that the server can
    store.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _LARGEST_STRING:
        raise BadInput(
            f"max_payload must be an int from 0 to {_LARGEST_STRING}, not {describe_value(size)}"
        )
