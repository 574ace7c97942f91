"""The ready side of a delayed queue: messages that are due and have not been taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from delayq._generics import T

if TYPE_CHECKING:
    from delayq._redisson.store import DelayedStore
    from delayq.codecs import Codec


_PAGE = 1000


class Ready(Generic[T]):
    """The list of messages that are due.

    Every method may raise the errors of :class:`~delayq.errors.ServerError`.
    """

    def __init__(self, store: DelayedStore, codec: Codec[T]) -> None:
        self._store = store
        self._codec = codec

    async def size(self) -> int:
        """Return the number of ready messages."""
        return await self._store.count_ready()

    async def leased(self) -> int:
        """Return how many messages are leased by :meth:`DelayedQueue.deliveries`, besides these."""
        return await self._store.count_leased()

    async def read_all(self) -> list[T]:
        """Return every ready message, beginning with the next one to be taken; none is removed.

        The list is read in pages of 1,000, so that the server is not held up: while consumers take
        messages, the result of a longer list may have gaps.

        Raises:
            DecodeError: The codec cannot decode one of them.
        """
        values: list[T] = []
        while True:
            page = await self._store.ready_page(len(values), _PAGE)
            values += map(self._codec.decode, page)
            if len(page) < _PAGE:
                return values

    async def clear(self) -> bool:
        """Drop every ready message, and return whether there were any. Pending messages stay."""
        return await self._store.purge("ready") > 0
