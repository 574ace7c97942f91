"""Signals that stop a worker."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heeding(call: Callable[[], None]) -> Iterator[None]:
    """Have ``call`` called in the event loop for each signal. Outside the main thread there are none to be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def caught(_number: int, _frame: Any) -> None:
        # Also wakes the loop.
        loop.call_soon_threadsafe(call)

    # Not loop.add_signal_handler: it cannot put back what was there before, such as what asyncio.run() does on Ctrl-C.
    before = {number: signal.signal(number, caught) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
