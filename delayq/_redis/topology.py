"""The servers that have the keys: a single one, which another may replace tomorrow, or the masters
of a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.pool import ConnectionPool


class Topology(Protocol):
    """The servers of one client.

    Attributes:
        spread: Whether two keys may live on different servers. If so, no script may name keys of
            two queues.
    """

    spread: bool

    def of(self, key: str | None) -> ConnectionPool:
        """Return the connections to the server that has ``key``, or to any server if it is None.

        Raises:
            ServerUnavailable: No server is known to have it now. :meth:`find` may find one.
        """
        ...

    async def find(self, key: str | None) -> ConnectionPool:
        """Return the same as :meth:`of`, but ask which server has the key if that is uncertain.

        Raises:
            ServerUnavailable: No server has it, or none answers.
            ServerRefused: No server lets us in.
        """
        ...

    async def any(self) -> Sequence[ConnectionPool]:
        """Return the connections to every server that may answer a question that concerns no key,
        the most promising ones first.

        Raises:
            ServerUnavailable, ServerRefused: As for :meth:`find`.
        """
        ...

    async def refresh(self) -> None:
        """Ask which server has which keys. Raises as :meth:`find` does."""
        ...

    def suspect(self, connections: ConnectionPool) -> None:
        """Note that a call over these connections has failed as it does when a server dies or loses
        its keys.
        """
        ...

    def failed_lately(self, key: str) -> bool:
        """Tell whether the server that has ``key`` has failed in the last seconds, so that other
        keys may do better.
        """
        ...

    def moved(self, slot: int, place: str, told_by: ConnectionPool) -> ConnectionPool:
        """Note that ``place``, host and port, is said to have a slot now.

        Returns the connections to it.
        """
        ...

    def at(self, place: str, told_by: ConnectionPool) -> ConnectionPool:
        """Return the connections to ``place``, host and port, as ``told_by`` knows it."""
        ...

    def all(self) -> Sequence[ConnectionPool]:
        """Return the connections to every server that has keys, or none if that is uncertain: call
        :meth:`refresh` then.
        """
        ...

    @property
    def open(self) -> int:
        """The number of connections that are open now."""
        ...

    @property
    def opened(self) -> int:
        """The number of connections that were opened so far."""
        ...

    def prune(self) -> None:
        """Close idle connections as :meth:`ConnectionPool.prune` does."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class SingleServer:
    """The one server that has every key.

    Behind a name or a Sentinel, another server may take its place.
    """

    spread = False

    def __init__(self, connections: ConnectionPool) -> None:
        self._connections = connections

    def of(self, key: str | None) -> ConnectionPool:
        del key
        return self._connections

    async def find(self, key: str | None) -> ConnectionPool:
        del key
        return self._connections

    async def any(self) -> Sequence[ConnectionPool]:
        return [self._connections]

    async def refresh(self) -> None:
        """Do nothing, because there is nothing to ask."""

    def suspect(self, connections: ConnectionPool) -> None:
        """Do nothing, because there is no other server."""

    def failed_lately(self, key: str) -> bool:
        del key
        return False

    def moved(self, slot: int, place: str, told_by: ConnectionPool) -> ConnectionPool:
        del slot
        return self.at(place, told_by)

    def at(self, place: str, told_by: ConnectionPool) -> ConnectionPool:
        del told_by
        raise ServerRefused(
            f"the server belongs to a cluster and redirects to {place}: use a redis+cluster://"
            " address"
        )

    def all(self) -> Sequence[ConnectionPool]:
        return [self._connections]

    @property
    def open(self) -> int:
        return self._connections.open

    @property
    def opened(self) -> int:
        return self._connections.opened

    def prune(self) -> None:
        self._connections.prune()

    async def aclose(self) -> None:
        await self._connections.aclose()
