"""Watches the event loop of a worker, and names the code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Self

from delayq.worker._handling import CALLERS

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger("delayq.worker")

# The loop counts as blocked after this time, seconds; and how often it is looked at.
BLOCKED_AFTER = 1.0
INTERVAL = 0.25
# The code in which a loop waits for something to do.
_WAITING = (str(Path(asyncio.__file__).parent), selectors.__file__)


class LoopWatch:
    """Warns of code that blocks the running event loop. A thread looks, because the loop cannot."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="delayq loop watch", daemon=True)

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._timer is not None:
            self._timer.cancel()
        # It has little to do, and ends at once.
        self._thread.join()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(INTERVAL, self._beat)

    def _watch(self) -> None:
        woke_at, blocked_since = time.monotonic(), 0.0
        while not self._is_over.wait(INTERVAL):
            last_woke_at, woke_at = woke_at, time.monotonic()
            if woke_at - last_woke_at > 2 * INTERVAL:
                # The whole process has stood still.
                continue
            beat_at = self._beat_at
            if blocked_since and beat_at > blocked_since:
                _log.warning("the event loop runs again after %.1f s", beat_at - blocked_since)
                blocked_since = 0.0
            if not blocked_since and woke_at - beat_at > BLOCKED_AFTER and self._report():
                blocked_since = beat_at

    def _report(self) -> bool:
        """Warn of the code that the loop is running; return False if it is not running any."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented
        stack = traceback.extract_stack(frame)
        if not stack or stack[-1].filename.startswith(_WAITING):
            return False
        # What the worker has called, if it has called anything.
        calls = [at for at, entry in enumerate(stack) if entry.filename.startswith(CALLERS)]
        blocking = stack[calls[-1] + 1 :] if calls else stack[-1:]
        if not blocking:
            return False
        _log.warning(
            "the event loop has been blocked for %.1f s by %s (%s, line %d): nothing else runs"
            " meanwhile, and leases may end. Make the handler a plain function, which runs in a"
            " thread, or use asyncio.to_thread().\n%s",
            time.monotonic() - self._beat_at,
            blocking[0].name,
            Path(blocking[0].filename).name,
            blocking[0].lineno,
            "".join(traceback.format_list(blocking)).rstrip(),
        )
        return True
