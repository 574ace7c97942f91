"""Finds the queues that the dashboard shows, once for all viewers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._background import gather_all
from delayq._dashboard.sources import DelayedSource, ReliableSource
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.admin.catalog import count_partitions, find_queues
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from delayq._dashboard.sources import AnySource
    from delayq._engine.session import Session
    from delayq.admin.catalog import QueueKind

    # The number of partitions of each queue, by its kind and name.
    PartitionCounts = dict[tuple[QueueKind, str], int]

T = TypeVar("T")

# How long a search counts, in seconds.
_MAX_AGE = 2.0
# The same when the queue asked for was not found, since it may be new.
_MAX_AGE_FOR_NEW = 0.1
_WAIT_FOR_NEW = 2.0
# Expensive questions may take a twentieth of the time: an answer is kept for this many times as
# long as it took.
_SHARE = 20
# Queues that have become empty stay in view, up to this number.
_MAX_REMEMBERED = 5000


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
            self._asking.add_done_callback(self._on_answer)
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

    def _on_answer(self, asking: asyncio.Task[T]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._answer, self.answered_at = asking.result(), time.monotonic()
            self.took = self.answered_at - self._asked_at


class Queues:
    """The queues that were named, or those that are found on the server."""

    def __init__(self, session: Callable[[], Session], names: Iterable[str] | None) -> None:
        self._session = session
        self._named_queues = None if names is None else _parse(names)
        self._partitions: PartitionCounts = {}
        self._search = Cached(self._find)

    async def find_all(self) -> list[tuple[QueueKind, str, int]]:
        """Return kind, name and partitions of all queues. Raises as :func:`find_queues`."""
        queues = [(*key, partitions) for key, partitions in (await self._find_cached()).items()]
        return sorted(queues, key=lambda queue: (queue[1].casefold(), queue[1], queue[0]))

    async def source(self, kind: str, name: str) -> AnySource | None:
        """Return one queue, or None if there is none of that name.

        Nothing else is read: a delayed queue's ready list might be any list of the server.
        """
        if kind not in ("delayed", "reliable"):
            return None
        key: tuple[QueueKind, str] = ("delayed" if kind == "delayed" else "reliable", name)
        queues = await self._find_cached()
        if key not in queues and self._named_queues is None:
            expires_at = self._search.answered_at + self._search.counts_for(_MAX_AGE_FOR_NEW)
            # A moment longer, since a sleep may end a moment early.
            await asyncio.sleep(min(expires_at - time.monotonic() + 0.001, _WAIT_FOR_NEW))
            queues = await self._find_cached(_MAX_AGE_FOR_NEW)
        return self.of(*key, queues[key]) if key in queues else None

    def of(self, kind: QueueKind, name: str, partitions: int) -> AnySource:
        if kind == "delayed":
            return DelayedSource(self._session(), name)
        return ReliableSource(self._session(), name, partitions)

    def search_again(self) -> None:
        """Search at the next call, because a queue has another number of partitions."""
        self._search.forget()

    async def _find_cached(self, max_age: float = _MAX_AGE) -> PartitionCounts:
        return await self._search.sparingly(max_age)

    async def _find(self) -> PartitionCounts:
        if self._named_queues is not None:
            return await self._count(dict.fromkeys(self._named_queues, 1))
        queues = await find_queues(self._session().server)
        if len(self._partitions) > _MAX_REMEMBERED:
            self._partitions = {}
        self._partitions |= await self._count(
            {queue: max(partitions) + 1 for queue, partitions in queues.items()}
        )
        return self._partitions

    async def _count(self, queues: PartitionCounts) -> PartitionCounts:
        server = self._session().server
        calls = (count_partitions(server, *queue, number) for queue, number in queues.items())
        return dict(zip(queues, await gather_all(calls), strict=True))


def _parse(names: Iterable[str]) -> list[tuple[QueueKind, str]]:
    if isinstance(names, str):
        raise BadInput("queues must be a list of names, not a str")
    queues: list[tuple[QueueKind, str]] = []
    for argument in names:
        kind, colon, name = argument.partition(":")
        if colon and kind == "delayed":
            DelayedKeys.of(name)
            queues.append(("delayed", name))
        elif colon and kind == "reliable":
            ReliableKeys.of(name)
            queues.append(("reliable", name))
        else:
            raise BadInput(f'a queue must be "reliable:NAME" or "delayed:NAME", not {argument!r}')
    return queues
