"""Which errors of handlers are failures, for metrics and traces alike."""

from __future__ import annotations

import asyncio

from delayq._reliable.failures import (
    Interrupted,
    RetryAfter,
    Snooze,
    instruction_of,
    is_instruction,
)
from delayq.errors import MessageCancelled

# Instructions to the worker, a cancelled message, or a worker that is stopping.
_NO_FAILURES = (
    *(RetryAfter, Snooze, Interrupted),
    *(MessageCancelled, asyncio.CancelledError, GeneratorExit),
)


def failure_of(error: BaseException) -> BaseException | None:
    """Return the error if something has failed, and None if it only says what to do next."""
    if is_instruction(error):
        # Several may be in a group.
        error = instruction_of(error) or error
    return None if isinstance(error, _NO_FAILURES) else error


def type_name(error: BaseException) -> str:
    """Return the name of an error's class with its module, which builtins go without."""
    kind = type(error)
    if kind.__module__.startswith("delayq._"):
        # Users know it by its public name.
        return f"delayq.{kind.__qualname__}"
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
