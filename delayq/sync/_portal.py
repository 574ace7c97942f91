"""The portal: the thread whose event loop does the work of a process's synchronous clients.

All clients share it, so that offers of different threads share calls to the server. It starts with
the first call, and ends when the interpreter exits. A forked child has a portal of its own.

The portal of anyio blocks its caller twice in each call, has nothing to cancel while it does so the
first time, waits forever in a forked child, and joins its thread without a limit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import selectors
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from delayq._background import Background
from delayq.errors import Closed, ConfigurationError, DelayqError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")

_log = logging.getLogger("delayq")

# Seconds that a thread waits for the end of a call that it has cancelled.
_END_OF_CALL = 1.0
# Seconds that a fork waits for the loop, and the loop for the fork.
_PAUSE = 1.0
# Seconds that a daemon waits in a call while the interpreter exits, which stops it meanwhile. An
# error would only be printed; but a thread that waits for the daemon must not wait for ever.
_LAST_WAIT = 5.0
# Seconds within which everything is closed when the interpreter exits; then its loop ends.
_CLOSING, _ENDING = 2.0, 1.0


class Closable(Protocol):
    """What is closed before the loop ends, unless it has been dropped."""

    async def aclose(self) -> None: ...


class Portal:
    """An event loop in a thread of its own, and the calls that other threads make there.

    Attributes:
        to_close: Closed in the loop before it ends.
        has_ended: Whether everything is being closed, or is closed, because the interpreter exits.
    """

    def __init__(self) -> None:
        """Start the thread.

        Raises:
            DelayqError: The system cannot provide one now.
        """
        self.to_close: WeakSet[Closable] = WeakSet()
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._background = Background()
        self.has_ended = False
        # A daemon: nothing that hangs in it keeps the interpreter from exiting.
        self._thread = threading.Thread(target=self._serve, name="delayq sync", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            # From Python 3.12 on, no thread can be started once the main thread has ended. A system
            # that has no thread now may have one for the next call.
            self.has_ended = (
                not threading.main_thread().is_alive() or "interpreter shutdown" in str(error)
            )
            if not self.has_ended:
                raise DelayqError(
                    f"the thread that does the work of synchronous clients did not start: {error}."
                    " Nothing was done; try again, or raise the limit of threads (ulimit -u, or"
                    " pids.max of a container)"
                ) from error

    @property
    def is_usable(self) -> bool:
        """Whether the loop runs, and belongs to this process."""
        return not self.has_ended and not self.is_inherited

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child process, which has no such thread."""
        # Not only by a hook: a server in C may fork without telling Python.
        return os.getpid() != self._process

    def run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine in the loop, in the caller's context, and return its result.

        If an exception is raised in the waiting thread, as by a signal, the coroutine is cancelled.

        Raises:
            ConfigurationError: The caller is in the portal's own thread.
            Closed: The interpreter is exiting.
        """
        if threading.get_ident() == self._thread.ident:
            raise ConfigurationError(
                "a synchronous client was called in the thread that does its work, which would"
                " wait for itself: codecs, observers and progress callbacks run there. Call it"
                " elsewhere"
            )
        self._check_open()
        call = _Call(self, self._loop, work)
        try:
            self._call_soon(call.start)
            return call.outcome.result()
        except BaseException as error:
            if not call.has_raised(error):
                self._interrupt(call, error)
            raise
        finally:
            # The error's traceback refers to this frame, and the call to the error.
            del call

    async def await_run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine in the loop, in the caller's context, for a caller in another loop.

        If the caller is cancelled, so is the coroutine.

        Raises:
            Closed: The interpreter is exiting.
        """
        self._check_open()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine in the loop, without waiting for it. Does nothing after its end."""
        if self.is_usable:
            self._loop.call_soon_threadsafe(lambda: self._background.spawn(work(), "sync"))

    def end(self) -> None:
        """Close everything and end the thread, within a few seconds."""
        self.has_ended = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join(_CLOSING + _ENDING)

    def pause(self, released: threading.Event) -> None:
        """Wait until the loop is between two steps, and hold it there until ``released`` is set.

        A thread that is anywhere else may hold a lock, of a module that it imports for example. In
        a child that is forked meanwhile, nothing would ever release it.
        """
        is_paused = threading.Event()

        def hold() -> None:
            is_paused.set()
            # Not for ever: a signal handler may make a call before the thread has forked.
            released.wait(_PAUSE)

        if threading.get_ident() != self._thread.ident and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hold)
            is_paused.wait(_PAUSE)

    def disown(self) -> None:
        """Let go of the loop in a forked child, for the parent's sake.

        The kernel's list of watched sockets is shared with the parent: whatever finalizers did with
        it here, the parent would no longer hear of its sockets.
        """
        _inherited.append(self)
        if self._loop.is_closed():
            return
        for task in asyncio.all_tasks(self._loop):
            # Nothing destroys them but the end of this process.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
        if isinstance(self._selector, getattr(selectors, "EpollSelector", ())):
            with select.epoll() as empty:
                os.dup2(empty.fileno(), self._selector.fileno(), inheritable=False)

    def _call_soon(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            # The loop has been closed since the check.
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self.has_ended:
            if _is_daemon():
                time.sleep(_LAST_WAIT)
            raise Closed(
                "the interpreter is exiting: synchronous clients are closed, or were not used"
                " before the main thread ended; make the first call earlier"
            )

    def _interrupt(self, call: _Call[Any], error: BaseException) -> None:
        """Cancel a call whose thread was interrupted, and note on the error what became of it."""
        self._loop.call_soon_threadsafe(call.cancel)
        futures.wait([call.outcome], _END_OF_CALL)
        if not call.outcome.done() or call.is_cancelled:
            error.add_note(
                "delayq: the call was interrupted. If it had been sent to the server, it is carried"
                " out all the same; otherwise it is not"
            )
        elif (failed_with := call.outcome.exception()) is not None:
            error.add_note(f"delayq: the interrupted call had failed: {failed_with!r}")
        else:
            error.add_note("delayq: the interrupted call had been carried out")

    def _serve(self) -> None:
        loop = self._loop
        try:
            loop.run_forever()
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks, timeout=_ENDING))
        finally:
            loop.close()

    async def _close(self) -> None:
        closing = [asyncio.create_task(client.aclose()) for client in self.to_close]
        try:
            if closing:
                await asyncio.wait(closing, timeout=_CLOSING)
            for task in closing:
                # From Python 3.12 on, no thread can be started any more, to stop a private server
                # for example: its watchdog stops it.
                if task.done() and not task.cancelled() and (error := task.exception()):
                    _log.debug("a client was not closed properly", exc_info=error)
        finally:
            self._loop.stop()


class _Call(Generic[R]):
    """A coroutine that runs in the loop for a thread that waits for its outcome."""

    __slots__ = ("_loop", "_portal", "_task", "_work", "outcome")

    def __init__(
        self,
        portal: Portal,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[], Coroutine[Any, Any, R]],
    ) -> None:
        self.outcome: futures.Future[R] = futures.Future()
        self._portal = portal
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether it has ended because it was cancelled."""
        return isinstance(self.outcome.exception(), asyncio.CancelledError)

    def has_raised(self, error: BaseException) -> bool:
        """Return whether this error is its outcome."""
        return self.outcome.done() and self.outcome.exception() is error

    def start(self) -> None:
        """Start it. Called in the loop."""
        self._task = self._loop.create_task(self._run())

    def cancel(self) -> None:
        """Cancel it. Called in the loop."""
        if self._task is None:
            self.outcome.set_exception(asyncio.CancelledError())
        else:
            # Once it has taken its first step: a task that was cancelled before runs no code.
            self._loop.call_soon(self._task.cancel)

    async def _run(self) -> None:
        try:
            result = await self._work()
        except BaseException as error:  # noqa: BLE001 - any error goes to the waiting thread
            # When the interpreter exits, only daemons still wait, and must not report errors.
            if not self._portal.has_ended:
                self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
        finally:
            # The error's traceback refers to this frame.
            del self


def _is_daemon() -> bool:
    thread = threading.current_thread()
    # Threads that Python has not started, as those of a server in C, count as daemons there.
    is_foreign = isinstance(thread, threading._DummyThread)  # noqa: SLF001
    return thread.daemon and not is_foreign


_current: Portal | None = None
_starting = threading.Lock()
# Holds the event that releases the loop after a fork. Several threads may fork at once.
_forking = threading.local()
# Kept: collected, their sockets would leave the parent's event loop.
_inherited: list[Portal] = []


def find() -> Portal | None:
    """Return the portal of this process, if it has been started."""
    portal = _current
    if portal is None or portal.is_inherited:
        return None
    return portal


def start() -> Portal:
    """Return the portal of this process, which is started if necessary.

    Raises:
        DelayqError: The system cannot provide a thread now.
    """
    global _current  # noqa: PLW0603 - a process has one
    if (portal := find()) is not None:
        return portal
    with _starting:
        if (portal := find()) is None:
            if _current is not None:
                _current.disown()
                _current = None
            portal = _current = Portal()
    return portal


def _at_exit() -> None:
    if (portal := find()) is not None and portal.is_usable:
        portal.end()


def _before_fork() -> None:
    if (portal := find()) is not None:
        # Noted first: a signal handler may end the wait with an exception, which Python ignores.
        _forking.released = threading.Event()
        portal.pause(_forking.released)


def _after_fork_in_parent() -> None:
    if (released := vars(_forking).pop("released", None)) is not None:
        released.set()


def _after_fork_in_child() -> None:
    global _current, _starting  # noqa: PLW0603 - as above
    # Another thread may have had the lock.
    _starting = threading.Lock()
    if _current is not None:
        _current.disown()
        _current = None


# By then, all threads but the daemons have ended: none of them needs a client any longer.
atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
