"""The event loops that a program may run delayq in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _eager() -> asyncio.AbstractEventLoop:
    """Make a loop whose tasks run at once until they first wait. Python 3.12 and later."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    return loop


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "eager": _eager,
    "uvloop": _uvloop,
}
"""By the name that ``pytest --event-loop`` takes."""
