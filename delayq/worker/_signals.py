"""Handles the signals that stop a worker."""

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
def signals_handled(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` in the event loop for the first and the second signal.

    A third one has its default action.

    Outside the main thread Python delivers no signals, and this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    caught = 0

    def handle(_number: int, _frame: Any) -> None:
        nonlocal caught
        caught += 1
        if caught > 1:
            # Here rather than in the loop: a handler may block the loop, or Python itself.
            for number in NUMBERS:
                signal.signal(number, signal.SIG_DFL)
        # This also wakes the loop.
        loop.call_soon_threadsafe(call)

    # Not loop.add_signal_handler: it cannot restore the handlers that were there before.
    before = {number: signal.signal(number, handle) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
