"""A connection of one's own, for what does not fit question and answer: blocking commands and subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from delayq._redis.connections import LINK_ERRORS
from delayq.errors import ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from redis.asyncio.connection import AbstractConnection

    from delayq._redis.connections import Connections


class Link:
    """Sends and reads separately, without deadlines. Closed when its ``async with`` block is left."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: AbstractConnection | None = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ServerUnavailable: Nobody answers.
            ServerRefused: The server does not let us in.
        """
        self._connection = await self._connections.open_own()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.cut()

    async def send(self, *command: str | bytes | int) -> None:
        """Send a command. Raises :class:`ServerUnavailable` when the link is broken."""
        assert self._connection is not None, "used outside of its block"
        try:
            await self._connection.send_command(*command)
        except (*LINK_ERRORS, RedisError) as error:
            raise ServerUnavailable(f"the connection broke: {error}") from error

    async def read(self) -> Any:
        """Read the next answer, however long it takes.

        Raises:
            ServerUnavailable: The link is broken.
            ServerRefused: The answer is an error.
        """
        assert self._connection is not None, "used outside of its block"
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            raise ServerRefused(str(error)) from error
        except (*LINK_ERRORS, RedisError) as error:
            raise ServerUnavailable(f"the connection broke: {error}") from error

    async def cut(self) -> None:
        """Close the connection. A :meth:`read` that waits in another task ends with :class:`ServerUnavailable`."""
        if self._connection is not None:
            await self._connections.close(self._connection)
