"""Processes that a test kills or stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.forks import FORKS

if TYPE_CHECKING:
    from collections.abc import Callable


def start(main: Callable[..., None], *args: Any) -> Any:
    """Start a process that runs this function. It ends with its parent."""
    process = FORKS.Process(target=main, args=args, daemon=True)
    process.start()
    return process
