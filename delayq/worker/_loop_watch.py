"""Watches the event loop of workers, and names the code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from delayq._reliable.process_report import PROCESS
from delayq.worker._handling import CALLERS

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("delayq.worker")

# The loop counts as blocked after this time, seconds; and how often it is looked at.
BLOCKED_AFTER = 1.0
INTERVAL = 0.25
_ASYNCIO = str(Path(asyncio.__file__).parent)

# The watch of each event loop, and how many workers run there.
_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[LoopWatch, int]] = WeakKeyDictionary()


@contextmanager
def loop_watched() -> Iterator[None]:
    """Warn of code that blocks the running event loop, once for all workers in it."""
    loop = asyncio.get_running_loop()
    watch, count = _watches.get(loop) or (LoopWatch(loop), 0)
    _watches[loop] = watch, count + 1
    if not count:
        watch.start()
    try:
        yield
    finally:
        watch, count = _watches[loop]
        _watches[loop] = watch, count - 1
        if count == 1:
            del _watches[loop]
            watch.stop()


class LoopWatch:
    """Warns of code that blocks an event loop. A thread looks, because the loop cannot."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the loop, in which this is called."""
        thread = threading.Thread(target=self._watch, name="delayq loop watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # A worker can do without.
            _log.warning("nothing watches the event loop: cannot start a thread: %s", error)
            return
        self._thread = thread
        self._beat()

    def stop(self) -> None:
        """Watch it no longer."""
        self._is_over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            # It has little to do, and ends at once.
            self._thread.join()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(INTERVAL, self._beat)

    def _watch(self) -> None:
        woke_at, blocked_since, code = time.monotonic(), 0.0, ""
        while not self._is_over.wait(INTERVAL):
            last_woke_at, woke_at = woke_at, time.monotonic()
            if woke_at - last_woke_at > BLOCKED_AFTER + INTERVAL:
                text = (
                    "nothing ran in this process for %.1f s: it was stopped, the machine is"
                    " overloaded, or compiled code held Python's lock"
                )
                _log.warning(text, woke_at - last_woke_at)
            if woke_at - last_woke_at > 2 * INTERVAL:
                # The loop has had no time either.
                continue
            beat_at = self._beat_at
            if blocked_since and beat_at > blocked_since:
                _log.warning("the event loop runs again after %.1f s", beat_at - blocked_since)
                PROCESS.note_blocking(code, beat_at - blocked_since)
                blocked_since = 0.0
            if not blocked_since and woke_at - beat_at > BLOCKED_AFTER and (code := self._report()):
                blocked_since = beat_at

    def _report(self) -> str:
        """Warn of the code that the loop is running, and return it; empty if it runs none."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented
        stack = traceback.extract_stack(frame)
        if _is_waiting(stack):
            return ""
        # What a worker has called, if it has called anything; or else the loop.
        callers = [at for at, entry in enumerate(stack) if entry.filename.startswith(CALLERS)]
        is_handler = bool(callers)
        if not is_handler:
            callers = [at for at, entry in enumerate(stack) if entry.filename.startswith(_ASYNCIO)]
        blocking = stack[callers[-1] + 1 :] if callers else stack[-1:]
        if not blocking:
            return ""
        first = blocking[0]
        code = f"{first.name} ({Path(first.filename).name}, line {first.lineno})"
        advice = (
            " Make the handler a plain function, which runs in a thread, or use"
            " asyncio.to_thread()."
            if is_handler
            else ""
        )
        _log.warning(
            "the event loop has been blocked for %.1f s by %s: nothing else runs meanwhile, and"
            " leases may end.%s\n%s",
            time.monotonic() - self._beat_at,
            code,
            advice,
            "".join(traceback.format_list(blocking)).rstrip(),
        )
        return code


def _is_waiting(stack: traceback.StackSummary) -> bool:
    """Return whether a loop waits for something to do."""
    if stack and stack[-1].filename == selectors.__file__:
        # Other code waits by selectors as well, and blocks the loop.
        stack = traceback.StackSummary.from_list(stack[:-1])
    return not stack or stack[-1].filename.startswith(_ASYNCIO)
