"""The ready side of a delayed queue: messages that are due and have not been taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._delayed.scripts import PURGE

if TYPE_CHECKING:
    from delayq._delayed.keys import DelayedKeys
    from delayq._redis.client import RedisClient
    from delayq.codecs import Codec

T = TypeVar("T")

_PAGE = 1000


class Ready(Generic[T]):
    """The list of messages that are due. Every method may raise the errors of :class:`~delayq.errors.ServerError`."""

    def __init__(self, keys: DelayedKeys, server: RedisClient, codec: Codec[T]) -> None:
        self._keys = keys
        self._server = server
        self._codec = codec

    async def size(self) -> int:
        """Return the number of ready messages."""
        return int(await self._server.command("LLEN", self._keys.ready))

    async def leased(self) -> int:
        """Return the number of messages leased by :meth:`DelayedQueue.deliveries`. They do not count in :meth:`size`."""
        return int(await self._server.command("ZCARD", self._keys.leases))

    async def read_all(self) -> list[T]:
        """Return every ready message without removing any, starting with the one that is taken next.

        The list is read in pages of 1,000, so that the server is not held up: while consumers take messages, the result of a
        longer list may have gaps.

        Raises:
            DecodeError: The codec cannot decode one of them.
        """
        values: list[T] = []
        while True:
            page = await self._server.command("LRANGE", self._keys.ready, len(values), len(values) + _PAGE - 1)
            values += map(self._codec.decode, page)
            if len(page) < _PAGE:
                return values

    async def clear(self) -> bool:
        """Drop every ready message, and return whether there were any. Pending messages stay."""
        return bool(await self._server.run(PURGE, (self._keys.timeout, self._keys.ordered, self._keys.ready), ("ready",)))
