"""The event loops on which a program may run delayq."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _eager() -> asyncio.AbstractEventLoop:
    """Make a loop whose tasks run at once until they first wait. Needs Python 3.12 or later."""
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
"""The factories, by the name that ``pytest --event-loop`` takes."""
