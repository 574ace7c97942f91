"""Sends the figures of a queue to its viewers, once a second."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from delayq._dashboard.queues import Cached
from delayq._dashboard.source import SECOND, late_us, undeliverable
from delayq.errors import Closed, DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from delayq._dashboard.board import Board
    from delayq._dashboard.source import AnySource
    from delayq.admin.catalog import QueueKind
    from delayq.stats import QueueDepth

# Maximum number of live views at a time; each holds a connection. They end by themselves, because a
# server that stops waits for them and cannot tell them. A browser then opens a new one.
_MOST_STREAMS = 64
_STREAM_LASTS = 15.0
_RETRY_MS = 300
_EVERY = 1.0
# Less than that, since a sleep of this length may end a moment early.
_FRESH = 0.9 * _EVERY
# Maximum number of queues whose figures are kept.
_MOST_WATCHED = 1000


async def events(board: Board, request: Request) -> Response:
    """Send the figures of a queue until the viewer leaves."""
    return board.live.view(await board.source(request))


class Live:
    """The queues that have viewers."""

    def __init__(self, now: Callable[[], Awaitable[int]]) -> None:
        self._now = now
        self._streams = 0
        self._watched: dict[tuple[str, str], _Watched] = {}

    async def depth(self, source: AnySource) -> QueueDepth | str:
        """Return the depth of a queue, at most a second old, or why it is unknown."""
        return await self._watch(source).depth.at_most(_FRESH)

    def view(self, source: AnySource) -> Response:
        """Begin a live view. Raises HTTPException if there are too many."""
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(
                503, "Too many live views are open. Close some of them and try again."
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        view = _LiveView(
            self._events(self._watch(source)), media_type="text/event-stream", headers=headers
        )
        # Count the view here, and not when it begins: others may be let in before that.
        self._streams += 1
        view.ended = self._ended
        return view

    def _ended(self) -> None:
        self._streams -= 1

    async def _events(self, watched: _Watched) -> AsyncIterator[str]:
        """Yield the figures of a queue once a second."""
        ends = time.monotonic() + _STREAM_LASTS
        last = ""
        yield f"retry: {_RETRY_MS}\n\n"
        while time.monotonic() < ends:
            try:
                said = await watched.figures.at_most(_FRESH)
            except DelayqError as error:
                said = f"event: trouble\ndata: {json.dumps(str(error))}\n\n"
                if isinstance(error, Closed):
                    yield said
                    return
            # An idle queue's figures look the same again, but they are new.
            if said is not last:
                yield said
                last = said
            await asyncio.sleep(_EVERY)

    def _watch(self, source: AnySource) -> _Watched:
        """Return the figures of a queue, shared by all its viewers."""
        key = source.kind, source.name
        if key not in self._watched and len(self._watched) >= _MOST_WATCHED:
            self._watched.clear()
        watched = self._watched.setdefault(key, _Watched(source, self._now))
        # The queue may have more partitions by now.
        watched.source = source
        return watched


class _LiveView(StreamingResponse):
    """A response without end that reports when it has ended, even if it never began."""

    ended: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


class _Watched:
    """A queue with viewers. However many there are, the server is asked once a second."""

    def __init__(self, source: AnySource, now: Callable[[], Awaitable[int]]) -> None:
        self.source = source
        self._now = now
        self.depth: Cached[QueueDepth | str] = Cached(self._depth)
        self.figures: Cached[str] = Cached(self._figures)
        self._before: tuple[int, QueueDepth, int] | None = None

    async def _depth(self) -> QueueDepth | str:
        """Return the number of messages in each state, or why it is unknown.

        A queue whose keys hold something else must not hide the others.
        """
        try:
            return await self.source.depth()
        except ServerRefused as error:
            return str(error)

    async def _figures(self) -> str:
        """Return an event with the current figures."""
        before, self._before = self._before, None
        now = await self._now()
        depth = await self.source.depth()
        # Messages that come due until the next look, and a little more: it may be late.
        soon = await self.source.due_between(now, now + int(_EVERY * SECOND))
        self._before = now, depth, soon
        if before is not None and now - before[0] > 3 * _EVERY * SECOND:
            # The queue had no viewers for a while: too much may have come and gone.
            before = None
        return f"data: {json.dumps(_figures(now, self.source.kind, depth, before))}\n\n"


def _figures(
    now: int, kind: QueueKind, depth: QueueDepth, before: tuple[int, QueueDepth, int] | None
) -> dict[str, Any]:
    """Return the figures that the live view shows.

    ``gone`` is how many messages were taken per second, at least: they were due, and have gone.
    """
    late, gone = late_us(depth, kind), None
    if before is not None:
        then, earlier, soon = before
        seconds = max((now - then) / SECOND, 0.001)
        left = earlier.ready + soon - depth.ready
        gone = round(max(0, left) / seconds, 1)
    return {
        "delayed": depth.delayed,
        "ready": depth.ready,
        "leased": depth.leased,
        "dead": undeliverable(depth),
        "paused": depth.paused,
        "late_ms": None if late is None else late // 1000,
        "gone": gone,
    }
