"""Runs handlers that are not coroutine functions, in threads."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from functools import partial
from logging import ERROR, INFO, WARNING
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from delayq._logging import log

if TYPE_CHECKING:
    from collections.abc import Callable

_Outcome = tuple[Any, BaseException | None]


class NotBegun(BaseException):
    """Raised when the system cannot provide a thread, so that the function was not called.

    No ``Exception``: a middleware does not take it for an error of the handler.
    """


class Threads:
    """The threads of one listener.

    A thread cannot be stopped. A handler that times out, or whose message is lost, is abandoned:
    its thread *hangs* until the function returns, and takes one of the listener's places. All
    threads are daemons, so that a process can end although some of them hang.

    Attributes:
        hanging: Number of threads that hang now.
        on_change: Called in the event loop when that number has changed.
    """

    def __init__(self, queue: str, concurrency: int) -> None:
        """Create the threads of a listener, which runs ``concurrency`` handlers at a time."""
        self._queue = queue
        self._concurrency = concurrency
        self._idle: list[_Thread] = []
        # What to call when each thread that hangs returns.
        self._abandoned: dict[_Thread, Callable[[], None]] = {}
        self._is_closed = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def hanging(self) -> int:
        return len(self._abandoned)

    async def run(
        self, function: Callable[[], Any], on_abandon: Callable[[], Callable[[], None]]
    ) -> Any:
        """Call the function in a thread, which continues if the caller is cancelled: then
        ``on_abandon`` is called, and what it returns once the function has returned.

        Raises:
            NotBegun: There is no thread for the function.
        """
        thread = self._idle.pop() if self._idle else self._start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Outcome] = loop.create_future()
        thread.call(
            partial(copy_context().run, function), loop, partial(self._on_return, thread, outcome)
        )
        try:
            result, error = await outcome
        except asyncio.CancelledError:
            if thread.is_busy:
                self._abandon(thread, on_abandon)
            raise
        if error is None:
            return result
        try:
            # Not Ctrl-C, which arrives in the main thread: it must not end the event loop.
            raise (
                RuntimeError("the handler raised KeyboardInterrupt")
                if isinstance(error, KeyboardInterrupt)
                else error
            )
        finally:
            # The error's traceback refers to this frame.
            del error

    def close(self) -> None:
        """Let the threads end: idle ones now, the others when their function has returned."""
        self._is_closed = True
        for thread in self._idle:
            thread.end()
        self._idle.clear()
        if self._abandoned:
            log(WARNING, self._queue, "%d threads still hang and are abandoned", self.hanging)

    def _start(self) -> _Thread:
        thread = _Thread(f"delayq {self._queue}")
        try:
            thread.start()
        except RuntimeError as error:
            raise NotBegun(str(error)) from error
        return thread

    def _on_return(
        self, thread: _Thread, future: asyncio.Future[_Outcome], outcome: _Outcome
    ) -> None:
        thread.is_busy = False
        if not future.cancelled():
            future.set_result(outcome)
        if self._is_closed:
            thread.end()
        else:
            self._idle.append(thread)
        if thread in self._abandoned:
            self._abandoned.pop(thread)()
            log(INFO, self._queue, "a hung thread has returned; %d still hang", self.hanging)
            self.on_change()

    def _abandon(self, thread: _Thread, on_abandon: Callable[[], Callable[[], None]]) -> None:
        self._abandoned[thread] = on_abandon()
        all_hang = self.hanging >= self._concurrency
        log(
            ERROR if all_hang else WARNING,
            self._queue,
            "an abandoned handler is still running: %d of the listener's %d threads hang%s",
            self.hanging,
            self._concurrency,
            "; its messages wait until one of them returns" if all_hang else "",
        )
        self.on_change()


class _Thread(threading.Thread):
    """A thread that calls one function after another."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._calls: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
        self.is_busy = False

    def call(
        self,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        on_return: Callable[[_Outcome], None],
    ) -> None:
        """Call the function, then have ``on_return`` called in the loop."""
        self.is_busy = True
        self._calls.put(partial(_call, function, loop, on_return))

    def end(self) -> None:
        self._calls.put(None)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            is_delivered = call()
            # An idle thread keeps nothing of the message alive.
            del call
            if not is_delivered:
                return


def _call(
    function: Callable[[], Any],
    loop: asyncio.AbstractEventLoop,
    on_return: Callable[[_Outcome], None],
) -> bool:
    """Call the function, and return whether the loop gets its outcome."""
    outcome: _Outcome
    try:
        outcome = function(), None
    except BaseException as error:  # noqa: BLE001 - any error that a handler raises goes to its caller
        outcome = None, error
    try:
        loop.call_soon_threadsafe(on_return, outcome)
    except RuntimeError:
        # The loop was closed in the meantime.
        return False
    finally:
        del outcome
    return True
