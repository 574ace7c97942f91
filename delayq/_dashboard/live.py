"""Keeps pages up to date: sends their live parts to the viewers, once a second.

The parts of a page that are live are the blocks of its template whose names begin with ``live_``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from delayq._background import gather_all
from delayq._dashboard.health import SECOND
from delayq._dashboard.queues import Cached
from delayq._dashboard.recent import MINUTES, Minutes
from delayq._dashboard.rendering import span
from delayq._dashboard.sources import AnySource, ReliableSource
from delayq.admin.delays import Delay, explain_delay
from delayq.admin.failures import WAVE_MINUTES, last_errors
from delayq.errors import Closed, DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence

    from starlette.types import Receive, Scope, Send

    from delayq.stats import QueueDepth, WorkerInfo

    Render = Callable[[], Coroutine[None, None, dict[str, str]]]

S = TypeVar("S", bound=AnySource)
T = TypeVar("T")

# Maximum number of live views at a time; each holds a connection. They end by themselves, because a
# server that stops waits for them and cannot notify them. A browser then opens a new one.
_MOST_STREAMS = 64
# Of these, for each login, and for all visitors together who may not act: the rest is reserved for
# operators, who need live views most.
_MOST_OF_LOGIN = 16
_MOST_OF_VIEWERS = 48
# No login has such a name.
_ALL, _VIEWERS = "all", "viewers"
_STREAM_SECONDS = 15.0
_RETRY_MS = 300
_INTERVAL = 1.0
# Less than that, since a sleep of this length may end a moment early.
_FRESH = 0.9 * _INTERVAL
# How long the reason why a queue is late counts, seconds: to find it takes several calls. Clients
# report their work every five seconds, too.
_CAUSES_COUNT_FOR = 5.0
_MINUTES_COUNT_FOR = 5.0
# A queue without viewers for that long starts anew: too much may have come and gone.
_STALE_AFTER = 3 * _INTERVAL
# Maximum number of queues whose figures are kept.
_MOST_WATCHED = 2000
# Maximum number of queues that are asked at a time.
_AT_ONCE = 50


class Trail:
    """The latest figures of a queue for its sparklines, once a second while it has viewers."""

    def __init__(self) -> None:
        self.late: deque[float] = deque(maxlen=60)
        self.claimed: deque[float] = deque(maxlen=60)
        self._added_at = self._counted_at = float("-inf")
        self._due = 0

    def add(self, depth: QueueDepth, late_us: int | None, soon: int | None = None) -> None:
        """Add the figures of this moment.

        Args:
            depth: The numbers of messages.
            late_us: How long the oldest message has been due; None if that is unknown.
            soon: How many messages come due within a second; None if that was not counted.
        """
        now = time.monotonic()
        if soon is not None:
            self._count(now, depth, soon)
        elapsed = now - self._added_at
        if elapsed < _FRESH:
            return
        if elapsed > _STALE_AFTER:
            self.late.clear()
        self._added_at = now
        if late_us is not None:
            self.late.append(late_us / SECOND)

    def _count(self, now: float, depth: QueueDepth, soon: int) -> None:
        """Count what was claimed. Figures without ``soon``, of other pages, may come in between."""
        elapsed = now - self._counted_at
        if elapsed < _FRESH:
            return
        if elapsed > _STALE_AFTER:
            self.claimed.clear()
        else:
            # At least: these messages were due, and have gone.
            self.claimed.append(round(max(0, self._due - depth.ready) / elapsed, 1))
        self._counted_at, self._due = now, depth.ready + soon


class Answers(Generic[S, T]):
    """The answers of queues to one question, shared by all who want them.

    Asking more than 50 queues takes up to a twentieth of the time, however many viewers there are.
    """

    def __init__(self, ask: Callable[[S], Coroutine[None, None, T]]) -> None:
        self._ask = ask
        self._answers: dict[tuple[object, ...], Cached[T | str]] = {}

    async def of(self, sources: Sequence[S], age: float) -> list[T | str]:
        """Return the answer of each queue, or why the server refused it.

        The answers are at most ``age`` seconds old, or older if asking many queues took long.
        """
        started = time.monotonic()
        turn = asyncio.Semaphore(_AT_ONCE)
        answers = [
            _value_of(self._answers, source, partial(self._cached, source)) for source in sources
        ]

        async def answer(cached: Cached[T | str]) -> T | str:
            async with turn:
                return await cached.sparingly(age)

        results = await gather_all(map(answer, answers))
        took = time.monotonic() - started
        for cached in answers:
            if cached.answered_at >= started:
                # A few queues may be asked at each look.
                cached.took = took if len(answers) > _AT_ONCE else 0.0
        return results

    def forget(self) -> None:
        """Ask again at the next call."""
        self._answers.clear()

    def _cached(self, source: S) -> Cached[T | str]:
        async def ask() -> T | str:
            try:
                return await self._ask(source)
            except ServerRefused as error:
                # A queue whose keys hold something else must not hide the others.
                return str(error)

        return Cached(ask)


class Live:
    """The queues and pages that have viewers. However many view one, the server is asked once."""

    def __init__(self) -> None:
        # By login, besides all together, and those of visitors who may not act.
        self._streams: Counter[str] = Counter()
        self._depths: Answers[AnySource, QueueDepth] = Answers(lambda source: source.depth())
        self._workers: Answers[ReliableSource, list[WorkerInfo]]
        self._workers = Answers(lambda source: source.workers())
        self._delays: Answers[ReliableSource, Delay] = Answers(_explain)
        self._minutes: Answers[ReliableSource, Minutes] = Answers(partial(_minutes, WAVE_MINUTES))
        self._whole_hours: Answers[ReliableSource, Minutes] = Answers(partial(_minutes, MINUTES))
        self._hours: dict[tuple[object, ...], list[Minutes]] = {}
        self._errors: Answers[ReliableSource, list[str]] = Answers(self._last_errors)
        self._trails: dict[tuple[object, ...], Trail] = {}
        # A page may be large: it goes with its last viewer.
        self._views: WeakValueDictionary[tuple[object, ...], Cached[str]] = WeakValueDictionary()

    # Figures

    async def depths(self, sources: Sequence[AnySource]) -> list[QueueDepth | str]:
        """Return the depth of each queue, or why it is unknown; a second old, or older."""
        return await self._depths.of(sources, _FRESH)

    async def workers(self, sources: Sequence[ReliableSource]) -> list[list[WorkerInfo] | str]:
        """Return who works on each queue, or why that is unknown."""
        return await self._workers.of(sources, 0)

    async def delays(self, sources: Sequence[AnySource]) -> list[Delay | None]:
        """Return why the messages of each queue are late; None if nothing tells."""
        return await _of_reliable(self._delays, sources, _CAUSES_COUNT_FOR)

    async def minutes(self, sources: Sequence[AnySource]) -> list[Minutes | None]:
        """Return the last three minutes of each queue; None if they are unknown."""
        return await _of_reliable(self._minutes, sources, _MINUTES_COUNT_FOR)

    async def hours(
        self, sources: Sequence[AnySource], minutes: Sequence[Minutes | None]
    ) -> list[Minutes | None]:
        """Return the last hour of each queue, of which the last minutes are known; None if they
        are not.

        Minutes that have ended do not change, so only the first look at a queue reads a whole hour.
        """
        hours = [_value_of(self._hours, source, list) for source in sources]

        def is_known(hour: Sequence[Minutes], last: Minutes | None) -> bool:
            return last is None or (bool(hour) and hour[0].reaches(last))

        unknown = [
            number
            for number, (hour, last) in enumerate(zip(hours, minutes, strict=True))
            if not is_known(hour, last)
        ]
        whole = await _of_reliable(
            self._whole_hours, [sources[number] for number in unknown], _MINUTES_COUNT_FOR
        )
        for number, read in zip(unknown, whole, strict=True):
            hours[number][:] = [] if read is None else [read]
        for hour, last in zip(hours, minutes, strict=True):
            if hour and last is not None and hour[0].reaches(last):
                hour[0] = hour[0].joined(last)
        return [
            hour[0] if hour and last is not None else None
            for hour, last in zip(hours, minutes, strict=True)
        ]

    async def errors(self, sources: Sequence[AnySource]) -> list[list[str] | None]:
        """Return the last errors of some messages of each queue; None if they are unknown."""
        return await _of_reliable(self._errors, sources, _CAUSES_COUNT_FOR)

    async def _last_errors(self, source: ReliableSource) -> list[str]:
        (minutes,) = await self.minutes([source])
        of_dead = minutes is not None and sum(minutes.dead) > sum(minutes.retried)
        return await last_errors(source, of_dead=of_dead)

    def trail(self, source: AnySource) -> Trail:
        """Return the latest figures of a queue."""
        return _value_of(self._trails, source, Trail)

    def forget(self) -> None:
        """Read everything again, because a queue was changed."""
        self._depths.forget()
        self._views.clear()

    # Views

    async def view(
        self,
        key: tuple[object, ...],
        render: Render,
        owner: str | None,
        *,
        operator: bool,
        every: float = 0,
    ) -> Response:
        """Begin a live view.

        Args:
            key: Identifies the view: viewers with an equal key share its parts.
            render: Renders the live parts.
            owner: The viewer's login; None without one.
            operator: Whether the viewer may act.
            every: The time between two updates, if it is longer than a second (s).

        Raises:
            HTTPException: There are too many, or there is nothing to see.
        """
        bounds = {_ALL: _MOST_STREAMS}
        if not operator:
            bounds[_VIEWERS] = _MOST_OF_VIEWERS
        if owner is not None:
            bounds[owner] = _MOST_OF_LOGIN
        if any(self._streams[name] >= limit for name, limit in bounds.items()):
            raise HTTPException(
                503, "Too many live views are open. Close some of them and try again."
            )
        # Count the view here, and not when it begins: others may be let in before that.
        self._streams.update(bounds.keys())
        on_close = partial(self._close_view, bounds.keys())
        try:
            parts = self._views.setdefault(key, Cached(partial(_event_of, render)))
            # The view tells of a server that is away, and lasts until that is back.
            with suppress(DelayqError):
                await parts.at_most(max(_FRESH, 0.9 * every))
        except BaseException:
            on_close()
            raise
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        view = _LiveView(_events(parts, every), media_type="text/event-stream", headers=headers)
        view.on_close = on_close
        return view

    def _close_view(self, names: Iterable[str]) -> None:
        self._streams.subtract(names)
        # Drops the names that have none left.
        self._streams = +self._streams


async def _event_of(render: Render) -> str:
    return f"data: {json.dumps(await render())}\n\n"


async def _events(parts: Cached[str], every: float) -> AsyncIterator[str]:
    interval, age = max(_INTERVAL, every), max(_FRESH, 0.9 * every)
    deadline = time.monotonic() + _STREAM_SECONDS
    last = ""
    yield f"retry: {_RETRY_MS}\n\n"
    while time.monotonic() < deadline:
        event, closed = await _or_trouble(parts, age)
        # The parts of an idle queue look the same again, but they are new.
        if event is not last:
            yield event
            last = event
        if closed:
            return
        await asyncio.sleep(interval)


async def _or_trouble(parts: Cached[str], age: float) -> tuple[str, bool]:
    """Return an event, and whether it is the last one."""
    try:
        return await parts.at_most(age), False
    except HTTPException as error:
        # A queue may be forgotten while it is viewed, and come back.
        text, closed = error.detail, False
    except DelayqError as error:
        text, closed = str(error), isinstance(error, Closed)
    return f"event: trouble\ndata: {json.dumps(text)}\n\n", closed


def _value_of(values: dict[tuple[object, ...], T], source: AnySource, make: Callable[[], T]) -> T:
    """Return the value of a queue, which is another one with another number of partitions."""
    key = source.kind, source.name, source.partitions
    if key not in values:
        if len(values) >= _MOST_WATCHED:
            values.clear()
        values[key] = make()
    return values[key]


class _LiveView(StreamingResponse):
    """An endless response that reports when it has been closed, even if it never began."""

    on_close: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


async def _explain(source: ReliableSource) -> Delay:
    depth = await source.depth()
    return await explain_delay(source, depth, lambda seconds: span(seconds * SECOND))


async def _minutes(count: int, source: ReliableSource) -> Minutes:
    return Minutes.of(await source.activity("m", count))


async def _of_reliable(
    answers: Answers[ReliableSource, T], sources: Sequence[AnySource], age: float
) -> list[T | None]:
    """Return the answers of reliable queues; None for the others, and where the server refused."""
    reliable = [source for source in sources if isinstance(source, ReliableSource)]
    known = {
        source.name: None if isinstance(answer, str) else answer
        for source, answer in zip(reliable, await answers.of(reliable, age), strict=True)
    }
    return [known.get(source.name) if source.kind == "reliable" else None for source in sources]
