"""A dedicated connection, for uses that do not fit question and answer: blocking commands and
subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from delayq._redis.connection import ReplyError
from delayq._redis.first_of import first_of
from delayq._redis.not_now import is_not_now
from delayq._redis.retry import retry_delay
from delayq.errors import Closed, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType
    from typing import Self

    from delayq._redis.connection import Connection
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.topology import Topology

_log = logging.getLogger("delayq")

# Clients that have lost the same server first reconnect within this time, seconds.
_SPREAD = 0.1


class DedicatedConnection:
    """A connection that sends and reads separately, without deadlines.

    It closes when its ``async with`` block is left.

    Attributes:
        answered: Whether anything has been read.
    """

    def __init__(self, nodes: Topology, key: str | None) -> None:
        """Args:
        key: The link leads to the server that has this key, or to any server if it is None.
        """
        self._nodes = nodes
        self._key = key
        self._connections: ConnectionPool | None = None
        self._wire: Connection | None = None
        self.answered: bool = False

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ServerUnavailable: No server answers.
            ServerRefused: The server does not let us in.
        """
        if self._key is None and self._nodes.spread:
            attempts = [
                (server.label, partial(self._open, server)) for server in await self._nodes.any()
            ]
            opened = await first_of("no server accepts the connection", attempts, _close)
        else:
            opened = await self._open(await self._nodes.find(self._key))
        self._connections, self._wire = opened
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()

    async def send(self, *command: str | bytes | int) -> None:
        """Send a command. Raises :class:`ServerUnavailable` if the link is broken."""
        assert self._wire is not None, "used outside its async with block"
        try:
            self._wire.write(*command)
            await self._wire.drain()
        except OSError as error:
            raise ServerUnavailable(f"the connection broke: {error}") from error

    async def subscribe(self, channels: Iterable[str]) -> None:
        """Subscribe to channels, as :meth:`send` does."""
        await self.send("SUBSCRIBE", *channels)

    async def unsubscribe(self, channels: Iterable[str]) -> None:
        """Unsubscribe from channels, as :meth:`send` does."""
        await self.send("UNSUBSCRIBE", *channels)

    def ping(self) -> None:
        """Send a PING.

        Its answer arrives in :meth:`read`; without one, the link breaks. Raises as :meth:`send`
        does.
        """
        assert self._wire is not None, "used outside its async with block"
        try:
            self._wire.ping()
        except OSError as error:
            raise ServerUnavailable(f"the connection broke: {error}") from error

    async def read(self) -> Any:
        """Read the next answer, however long it takes.

        Raises:
            ServerUnavailable: The link is broken.
            ServerRefused: The answer is an error.
        """
        assert self._wire is not None, "used outside its async with block"
        try:
            answer = await self._wire.read()
        except ReplyError as error:
            # In a cluster, the error may mean that the key has moved.
            self._suspect()
            raise (ServerUnavailable if is_not_now(str(error)) else ServerRefused)(
                str(error)
            ) from error
        except OSError as error:
            self._suspect()
            raise ServerUnavailable(f"the connection broke: {error}") from error
        self.answered = True
        return answer

    def cut(self) -> None:
        """Close the connection.

        A :meth:`read` that is waiting in another task ends with :class:`ServerUnavailable`.
        """
        if self._wire is not None and self._connections is not None:
            self._connections.close(self._wire)

    async def _open(self, server: ConnectionPool) -> tuple[ConnectionPool, Connection]:
        try:
            return server, await server.open_own()
        except ServerUnavailable:
            self._nodes.suspect(server)
            raise

    def _suspect(self) -> None:
        if self._connections is not None:
            self._nodes.suspect(self._connections)


def _close(opened: tuple[ConnectionPool, Connection]) -> None:
    connections, wire = opened
    connections.close(wire)


async def keep_linked(
    nodes: Topology,
    key: str | None,
    use: Callable[[DedicatedConnection], Awaitable[None]],
    interrupted: Callable[[Exception], None],
    retry_most: float,
) -> None:
    """Run ``use`` with a link, and again with a new one whenever it breaks.

    Returns when the client is closed.

    Args:
        nodes: The servers that links lead to.
        key: Links lead to the server that has this key, or to any server if it is None.
        use: The function to run with each link.
        interrupted: Called for the first of several failures in a row.
        retry_most: The longest time between two tries, seconds.
    """
    now = asyncio.get_running_loop().time
    failures = 0
    while True:
        link, began = DedicatedConnection(nodes, key), now()
        try:
            async with link:
                await use(link)
        except Closed:
            return
        except Exception as error:  # noqa: BLE001 - nothing may end the task that wakes up queues
            # A link that breaks again and again, as soon as it has been answered, must not be
            # retried ever faster.
            failures = 1 if link.answered and now() - began >= retry_most else failures + 1
            if failures == 1:
                interrupted(error)
            if not isinstance(error, ServerError):
                _log.error("a connection failed unexpectedly", exc_info=error)
            # All clients of a server lose it together, so each reconnects at a moment of its own.
            await asyncio.sleep(retry_delay(failures, base=_SPREAD, most=retry_most, least=0.0))
