"""Finds the queues that the dashboard shows, once for all viewers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._dashboard.delayed_source import DelayedSource
from delayq._dashboard.reliable_source import ReliableSource
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.store import ReliableStore
from delayq.admin.catalog import find_queues
from delayq.errors import BadInput, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from delayq._engine.session import Session
    from delayq._redis.client import RedisClient
    from delayq.admin.catalog import QueueKind

    # The number of partitions of each queue.
    Known = dict[tuple[QueueKind, str], int]

T = TypeVar("T")

AnySource = DelayedSource | ReliableSource

# How long a search counts, in seconds.
_FRESH = 2.0
# The same when the queue asked for was not found, since it may be new.
_FRESH_FOR_NEW = 0.1
_WAIT_FOR_NEW = 2.0
# Expensive questions may take a twentieth of the time: an answer is kept for this many times as
# long as it took.
_SHARE = 20
# Queues that have become empty stay in view, up to this number.
_REMEMBERED = 5000


class Cached(Generic[T]):
    """The latest answer to a question, shared by all callers that want it.

    Callers that ask while the question is in flight get the same answer, or the same error. A
    server that is slow, or unavailable, is therefore not asked by one caller after the other.

    Attributes:
        answered_at: When the answer came, in seconds of the monotonic clock.
        took: How long asking took, in seconds.
    """

    def __init__(self, ask: Callable[[], Coroutine[None, None, T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._answer: T | None = None
        self._asked_at = 0.0
        self.answered_at = float("-inf")
        self.took = 0.0

    async def at_most(self, age: float) -> T:
        """Return the answer, or a new one if it is older than ``age`` seconds. Raises as asking."""
        if self._asking is None:
            if self._answer is not None and time.monotonic() < self.answered_at + age:
                return self._answer
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        # A caller that goes away leaves the others their answer.
        return await asyncio.shield(self._asking)

    async def sparingly(self, age: float) -> T:
        """Return the answer, which may be older if asking took long. Raises as asking."""
        return await self.at_most(self.counts_for(age))

    def counts_for(self, age: float) -> float:
        """Return how long an answer counts if asking may take a twentieth of the time (s)."""
        return max(age, _SHARE * self.took)

    def forget(self) -> None:
        """Ask again at the next call."""
        self._answer = None

    def _answered(self, asking: asyncio.Task[T]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._answer, self.answered_at = asking.result(), time.monotonic()
            self.took = self.answered_at - self._asked_at


class Queues:
    """The queues that were named, or those that are found on the server."""

    def __init__(self, session: Callable[[], Session], named: Iterable[str] | None) -> None:
        self._session = session
        self._named = None if named is None else _named(named)
        self._known: Known = {}
        self._search = Cached(self._find)

    async def known(self) -> list[tuple[QueueKind, str, int]]:
        """Return kind, name and partitions of all queues. Raises as :func:`find_queues`."""
        found = [(*key, partitions) for key, partitions in (await self._all()).items()]
        return sorted(found, key=lambda each: (each[1].casefold(), each[1], each[0]))

    async def source(self, kind: str, name: str) -> AnySource | None:
        """Return one queue, or None if there is none of that name.

        Nothing else is read: a delayed queue's ready list might be any list of the server.
        """
        if kind not in ("delayed", "reliable"):
            return None
        key: tuple[QueueKind, str] = ("delayed" if kind == "delayed" else "reliable", name)
        known = await self._all()
        if key not in known and self._named is None:
            until = self._search.answered_at + self._search.counts_for(_FRESH_FOR_NEW)
            # A moment longer, since a sleep may end a moment early.
            await asyncio.sleep(min(until - time.monotonic() + 0.001, _WAIT_FOR_NEW))
            known = await self._all(_FRESH_FOR_NEW)
        return self.of(*key, known[key]) if key in known else None

    def of(self, kind: QueueKind, name: str, partitions: int) -> AnySource:
        if kind == "delayed":
            return DelayedSource(self._session(), name)
        return ReliableSource(self._session(), name, partitions)

    def search_again(self) -> None:
        """Search at the next call, because a queue has another number of partitions."""
        self._search.forget()

    async def _all(self, fresh: float = _FRESH) -> Known:
        return await self._search.sparingly(fresh)

    async def _find(self) -> Known:
        server = self._session().server
        if self._named is not None:
            return await _known(server, dict.fromkeys(self._named, 1))
        found = await find_queues(server)
        if len(self._known) > _REMEMBERED:
            self._known = {}
        self._known |= await _known(server, {key: max(seen) + 1 for key, seen in found.items()})
        return self._known


async def _known(server: RedisClient, seen: Known) -> Known:
    calls = (_partitions(server, *key, least) for key, least in seen.items())
    numbers = await asyncio.gather(*calls)
    return dict(zip(seen, numbers, strict=True))


async def _partitions(server: RedisClient, kind: QueueKind, name: str, seen: int) -> int:
    """Return the number of a queue's partitions, of which ``seen`` are known."""
    if kind == "delayed":
        return 1
    try:
        stored = await ReliableStore(server, ReliableKeys.of(name)).settings()
    except ServerRefused:
        return seen
    return max(seen, stored.partitions)


def _named(names: Iterable[str]) -> list[tuple[QueueKind, str]]:
    if isinstance(names, str):
        raise BadInput("queues must be a list of names, not a str")
    known: list[tuple[QueueKind, str]] = []
    for each in names:
        kind, colon, name = each.partition(":")
        if colon and kind == "delayed":
            DelayedKeys.of(name)
            known.append(("delayed", name))
        elif colon and kind == "reliable":
            ReliableKeys.of(name)
            known.append(("reliable", name))
        else:
            raise BadInput(f'a queue must be "reliable:NAME" or "delayed:NAME", not {each!r}')
    return known
