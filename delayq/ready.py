"""The ready side of a delayed queue: what is due and not taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._redis.scripts import PURGE

if TYPE_CHECKING:
    from delayq._redis.keys import DelayedKeys
    from delayq._redis.server import Server
    from delayq.codecs import Codec

T = TypeVar("T")

_PAGE = 1000


class Ready(Generic[T]):
    """The list of messages that are due. Every method may raise the errors of :class:`~delayq.errors.ServerError`."""

    def __init__(self, keys: DelayedKeys, server: Server, codec: Codec[T]) -> None:
        self._keys = keys
        self._server = server
        self._codec = codec

    async def size(self) -> int:
        """How many messages are ready."""
        return int(await self._server.command("LLEN", self._keys.ready))

    async def leased(self) -> int:
        """How many messages are out under a lease, of :meth:`DelayedQueue.deliveries`. They are not in :meth:`size`."""
        return int(await self._server.command("ZCARD", self._keys.leases))

    async def read_all(self) -> list[T]:
        """Every ready message, first the one that is taken next. They stay.

        Read in pages of 1,000, so that the server is not held up: while others take, a longer list may show gaps.

        Raises:
            DecodeError: The codec cannot read one of them.
        """
        values: list[T] = []
        while True:
            page = await self._server.command("LRANGE", self._keys.ready, len(values), len(values) + _PAGE - 1)
            values += map(self._codec.decode, page)
            if len(page) < _PAGE:
                return values

    async def clear(self) -> bool:
        """Drop every ready message, and say whether there were any. What is pending stays."""
        return bool(await self._server.run(PURGE, (self._keys.timeout, self._keys.ordered, self._keys.ready), ("ready",)))
