"""Stopping a worker: on request, on a signal, or because of an error."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

# Apart from the records about messages and queues.
_log = logging.getLogger("delayq.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)

# What to call for each worker of this process that handles signals, and its event loop.
_calls: dict[object, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}
# The handlers that were there before those of the first worker.
_previous_handlers: dict[signal.Signals, Any] = {}


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
    for worker in [worker for worker, (loop, _) in _calls.items() if loop.is_closed()]:
        # Its loop was closed before it could end.
        del _calls[worker]
    worker, is_first = object(), not _calls
    _calls[worker] = asyncio.get_running_loop(), call
    if is_first:
        # Not loop.add_signal_handler: it cannot restore the handlers that were there before.
        new_handler = _new_handler()
        for number in SIGNALS:
            previous = signal.signal(number, new_handler)
            _previous_handlers.setdefault(number, previous)
    try:
        yield
    finally:
        _calls.pop(worker, None)
        if not _calls:
            for number, handler in _previous_handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            _previous_handlers.clear()


def _new_handler() -> Callable[[int, Any], None]:
    count = 0

    def on_signal(_number: int, _frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            # Here rather than in the loop: a handler may block the loop, or Python itself.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        for loop, call in [*_calls.values()]:
            if not loop.is_closed():
                # This also wakes the loop.
                loop.call_soon_threadsafe(call)

    return on_signal


class Stop:
    """Tracks whether a run of the worker should stop, and how.

    Attributes:
        requested: Set when the run should stop claiming.
        urgent: Set when the run should cancel its handlers.
        error: The error with which the run ends, if any.
        handlers_cancelled: Whether the run has cancelled its handlers.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        self.requested: asyncio.Event = asyncio.Event()
        self.urgent: asyncio.Event = asyncio.Event()
        self.error: BaseException | None = None
        self.handlers_cancelled: bool = False
        self._shutdown_timeout = shutdown_timeout
        self._task: asyncio.Task[Any] | None = None
        self._cancellations = 0
        # Cancels the run while it starts or ends, once a stop is requested.
        self._limit: asyncio.Timeout = asyncio.timeout(None)
        self._phase: Literal["starting", "working", "ending"] = "starting"

    @asynccontextmanager
    async def cancellable(self) -> AsyncIterator[None]:
        """Let :meth:`request` and :meth:`signalled` end the block while it starts or ends."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancellations = self._task.cancelling()
        try:
            async with self._limit:
                if self.requested.is_set():
                    self._cancel(self._shutdown_timeout)
                yield
        except TimeoutError:
            if not self._limit.expired():
                raise
            _log.warning(
                "the worker was cancelled while %s",
                "starting" if self._phase == "starting" else "stopping",
            )
        finally:
            self._task = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Handle messages in the block. A stop now ends it in order, and cancels nothing else."""
        self._phase = "working"
        if not self._limit.expired():
            self._limit.reschedule(None)
        try:
            yield
        finally:
            self._phase = "ending"

    def cancels_handlers(self) -> bool:
        """Return whether handlers that are cancelled now are cancelled because the run ends."""
        return self.handlers_cancelled or (
            self._task is not None and self._task.cancelling() > self._cancellations
        )

    def request(self, error: BaseException | None) -> None:
        """Stop the run, with an error if one is given.

        A start has ``shutdown_timeout`` to finish, and is then cancelled.
        """
        if error is not None and self.error is None:
            _log.error("the worker stops: %s", error)
        self.error = self.error or error
        if not self.requested.is_set():
            self.requested.set()
            if self._phase == "starting":
                self._cancel(self._shutdown_timeout)

    def signalled(self) -> None:
        """Act on a signal."""
        is_first = not self.requested.is_set()
        if is_first:
            _log.info("the worker is stopping")
            self.request(None)
        else:
            self.urgent.set()
        # Nothing has been claimed yet during a start, so nothing is left undone.
        if self._phase == "starting" or (self._phase == "ending" and not is_first):
            self._cancel(0.0)

    def _cancel(self, delay: float) -> None:
        # Only once: the cleanup in the cancelled part is not cancelled again.
        if self._task is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + delay)
