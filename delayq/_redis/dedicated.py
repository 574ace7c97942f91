"""Dedicated connections, for subscriptions and blocking commands."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from delayq._redis.connection import ReplyError
from delayq._redis.retry import first_of, is_not_now, retry_delay
from delayq.errors import Closed, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from delayq._redis.connection import Connection
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.topology import Topology

_log = logging.getLogger("delayq")

# Clients that have lost the same server first reconnect within this time, seconds.
_RECONNECT_SPREAD = 0.1


class DedicatedConnection:
    """A connection that sends and reads separately, without deadlines."""

    def __init__(self, nodes: Topology, pool: ConnectionPool, wire: Connection) -> None:
        self._nodes = nodes
        self._pool = pool
        self._wire = wire
        # Whether anything has been read.
        self.answered: bool = False

    @classmethod
    async def open(cls, nodes: Topology, key: str | None) -> DedicatedConnection:
        """Connect to the server that has ``key``, or to any server if it is None."""

        async def open_at(pool: ConnectionPool) -> DedicatedConnection:
            try:
                return cls(nodes, pool, await pool.open_own())
            except ServerUnavailable:
                nodes.suspect(pool)
                raise

        if key is None and nodes.spread:
            attempts = [(pool.label, partial(open_at, pool)) for pool in await nodes.candidates()]
            return await first_of("no server accepts the connection", attempts, cls.cut)
        return await open_at(await nodes.find_pool(key))

    async def send(self, *command: str | bytes | int) -> None:
        """Send a command. Raises :class:`ServerUnavailable` if the connection is broken."""
        try:
            self._wire.write(*command)
            await self._wire.drain()
        except OSError as error:
            raise _broken(error) from error

    async def subscribe(self, channels: Iterable[str]) -> None:
        """Subscribe to channels, as :meth:`send` does."""
        await self.send("SUBSCRIBE", *channels)

    async def unsubscribe(self, channels: Iterable[str]) -> None:
        """Unsubscribe from channels, as :meth:`send` does."""
        await self.send("UNSUBSCRIBE", *channels)

    def ping(self) -> None:
        """Send a PING, which :meth:`read` has to answer soon. Raises as :meth:`send` does."""
        try:
            self._wire.ping()
        except OSError as error:
            raise _broken(error) from error

    async def read(self) -> Any:
        """Read the next reply, however long it takes; ServerRefused if it is an error."""
        try:
            reply = await self._wire.read()
        except (ReplyError, OSError) as error:
            # In a cluster, an error may mean that the key has moved.
            self._nodes.suspect(self._pool)
            if isinstance(error, OSError):
                raise _broken(error) from error
            kind = ServerUnavailable if is_not_now(str(error)) else ServerRefused
            raise kind(str(error)) from error
        self.answered = True
        return reply

    def cut(self) -> None:
        """Close the connection; a waiting :meth:`read` ends with :class:`ServerUnavailable`."""
        self._pool.close(self._wire)


def _broken(error: OSError) -> ServerUnavailable:
    return ServerUnavailable(f"the connection broke: {error}")


async def keep_linked(
    nodes: Topology,
    key: str | None,
    use: Callable[[DedicatedConnection], Awaitable[None]],
    interrupted: Callable[[Exception], None],
    longest_pause: float,
) -> None:
    """Run ``use`` with a link, and with a new one whenever it breaks, until the client closes.

    Links lead to the server that has ``key``, or to any. ``interrupted`` is called for the first of
    several failures in a row; ``longest_pause`` is that between two tries, seconds.
    """
    now = asyncio.get_running_loop().time
    failures = 0
    while True:
        link, began = None, now()
        try:
            link = await DedicatedConnection.open(nodes, key)
            try:
                await use(link)
            finally:
                link.cut()
        except Closed:
            return
        except Exception as error:  # noqa: BLE001 - nothing may end the task that wakes up queues
            # A link that breaks as soon as it is answered must not be retried ever faster.
            steady = link is not None and link.answered and now() - began >= longest_pause
            failures = 1 if steady else failures + 1
            if failures == 1:
                interrupted(error)
            if not isinstance(error, ServerError):
                _log.error("a connection failed unexpectedly", exc_info=error)
            # All clients of a server lose it together, so each reconnects at a moment of its own.
            await asyncio.sleep(
                retry_delay(
                    failures, base=_RECONNECT_SPREAD, longest=longest_pause, lowest_share=0.0
                )
            )
