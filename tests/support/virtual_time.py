"""Virtual time: waits end at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def skip_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the running loop's clock jump to the next timer whenever there is nothing else to do.

    Only for tests that wait for nothing but timers: by that clock, data from a network come late.
    """
    loop: Any = asyncio.get_running_loop()
    now, select = loop.time(), loop._selector.select

    def jump(timeout: float | None) -> Any:
        nonlocal now
        now += timeout or 0.0
        return select(0)

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", jump)
