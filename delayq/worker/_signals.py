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

# What to call for each worker of this process that handles signals, and its event loop.
_calls: dict[object, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
# The handlers that were there before those of the first worker.
_before: dict[signal.Signals, Any] = {}


@contextmanager
def signals_handled(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` in the event loop for the first and the second signal.

    A third one has its default action. Several workers may run in one process: all of them are
    called.

    Outside the main thread Python delivers no signals, and this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for other in [other for other, (loop, _) in _calls.items() if loop.is_closed()]:
        # Its loop was closed before it could end.
        del _calls[other]
    worker, is_first = object(), not _calls
    _calls[worker] = asyncio.get_running_loop(), call
    if is_first:
        # Not loop.add_signal_handler: it cannot restore the handlers that were there before.
        handle = _new_handler()
        for number in NUMBERS:
            before = signal.signal(number, handle)
            _before.setdefault(number, before)
    try:
        yield
    finally:
        _calls.pop(worker, None)
        if not _calls:
            for number, handler in _before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            _before.clear()


def _new_handler() -> Callable[[int, Any], None]:
    caught = 0

    def handle(_number: int, _frame: Any) -> None:
        nonlocal caught
        caught += 1
        if caught > 1:
            # Here rather than in the loop: a handler may block the loop, or Python itself.
            for number in NUMBERS:
                signal.signal(number, signal.SIG_DFL)
        for loop, call in [*_calls.values()]:
            if not loop.is_closed():
                # This also wakes the loop.
                loop.call_soon_threadsafe(call)

    return handle
