"""Counts that take longer than a page may: each request goes on with them for a moment."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from delayq._dashboard.queues import Cached
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Key = tuple[object, ...]

# How long a page goes on with all of its counts, in seconds: it opens within 300 ms. An update of a
# page that is open may take longer.
_SECONDS = 0.15
_SECONDS_OF_UPDATE = 0.5
# Requests that come sooner after one another share what the first one has counted, in seconds.
_FRESH = 0.9
# A complete count is repeated after this many times as long as all counts of its page took.
_SHARE = 20
# Maximum number of counts that are kept, or twice those of the largest page: each may be large. One
# that no page has asked for is dropped after this many seconds.
_MOST_KEPT = 50
_KEPT_FOR = 60.0


class Count(Protocol):
    """A count that is made step by step, as by :class:`delayq.admin.letters.LetterCount`."""

    total: int

    @property
    def examined(self) -> int: ...

    @property
    def is_complete(self) -> bool: ...

    async def go_on(self, deadline: float = ...) -> None: ...


C = TypeVar("C", bound=Count)


class _Repeated(Generic[C]):
    """A count that begins again after it was completed.

    Attributes:
        begin: Begins the count, as the last page has asked for it.
        took: How long the last complete count took, or the current one has taken so far (s).
        used_at: When a page asked for it last, in seconds of the monotonic clock.
        neighbors: How many counts that page asked for.
        ended_at: When the last complete count ended, in seconds of the monotonic clock.
        latest: The last complete count, or the first one as long as it is not complete; why the
            server refused it; None before it has begun.
    """

    def __init__(self, begin: Callable[[], Awaitable[C]]) -> None:
        self.begin = begin
        self._current: C | None = None
        self._deadline = self._repeat_at = 0.0
        self.took = 0.0
        self.ended_at = self.used_at = float("-inf")
        self.neighbors = 1
        self._step: Cached[C | str] = Cached(self._go_on)
        self.latest: C | str | None = None

    async def go_on(self, deadline: float, pause: float) -> C | str:
        """Go on until ``deadline``, a moment of the monotonic clock, unless others just did.

        A complete count begins again after ``pause`` seconds.
        """
        self._deadline, self._repeat_at = deadline, self.ended_at + pause
        return await self._step.at_most(_FRESH)

    async def _go_on(self) -> C | str:
        began_at = time.monotonic()
        if self._current is None and self.latest is not None and began_at < self._repeat_at:
            return self.latest
        result: C | str
        try:
            if self._current is None:
                self.took = 0.0
                self._current = await self.begin()
            result = self._current
            await result.go_on(self._deadline)
        except ServerRefused as error:
            # A queue whose keys hold something else must not hide the others.
            result = str(error)
        finally:
            self.took += time.monotonic() - began_at
        if has_ended := isinstance(result, str) or result.is_complete:
            self._current, self.ended_at = None, time.monotonic()
        if has_ended or self.latest is None or isinstance(self.latest, str):
            self.latest = result
        return self.latest


class Counts:
    """The counts that pages show, shared by all viewers."""

    def __init__(self) -> None:
        self._counts: dict[Key, _Repeated[Any]] = {}

    async def go_on(
        self, begins: Sequence[tuple[Key, Callable[[], Awaitable[C]]]], *, is_live: bool
    ) -> list[C | str | None]:
        """Go on with the counts of a page for a moment, and return them; None for each that has not
        begun, and for each that the server refused, why.

        Args:
            begins: The key of each count, which begins with the name of its queue, and a function
                that begins it.
            is_live: Whether this is for an update of a page that is open.
        """
        now = time.monotonic()
        counts: list[_Repeated[C]] = []
        for key, begin in begins:
            # At the end: they are in the order of their last use.
            self._counts[key] = count = self._counts.pop(key, None) or _Repeated(begin)
            count.begin, count.used_at, count.neighbors = begin, now, len(begins)
            counts.append(count)
        if counts:
            self._forget_unused(now)
        deadline = now + (_SECONDS_OF_UPDATE if is_live else _SECONDS)
        pause = _SHARE * sum(count.took for count in counts)
        # Those that were never complete first, in order; otherwise, many counts would not end.
        for number, count in enumerate(sorted(counts, key=lambda count: count.ended_at)):
            if number and time.monotonic() >= deadline:
                break
            await count.go_on(deadline, pause)
        return [count.latest for count in counts]

    def _forget_unused(self, now: float) -> None:
        used = {
            key: count for key, count in self._counts.items() if now - count.used_at < _KEPT_FOR
        }
        most = max(_MOST_KEPT, 2 * max(count.neighbors for count in used.values()))
        self._counts = dict(islice(used.items(), max(0, len(used) - most), None))

    def forget(self, queue: str) -> None:
        """Begin the counts of a queue again, because it was changed."""
        self._counts = {key: count for key, count in self._counts.items() if key[0] != queue}
