"""The servers that have the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.pool import ConnectionPool


class Topology:
    """The one server that has every key; :class:`~delayq._redis.cluster.Cluster` has several.

    Behind a name or a Sentinel, another server may take its place.

    Attributes:
        spread: Whether two keys may live on different servers. If so, no script may name keys of
            two queues.
    """

    spread: bool = False

    def __init__(self, *pools: ConnectionPool) -> None:
        self._single = pools

    @property
    def pools(self) -> Iterable[ConnectionPool]:
        """The connections to every server that is known."""
        return self._single

    def of(self, key: str | None) -> ConnectionPool:
        """Return the connections for ``key``, or to any server, or raise ServerUnavailable."""
        del key
        return self._single[0]

    async def find(self, key: str | None) -> ConnectionPool:
        """Return the same as :meth:`of`, but ask if it is uncertain. Raises ServerError."""
        return self.of(key)

    async def any(self) -> Sequence[ConnectionPool]:
        """Return the servers for a question without a key, the most promising ones first."""
        return self._single

    async def refresh(self) -> None:
        """Ask which server has which keys. Raises as :meth:`find` does."""

    def suspect(self, connections: ConnectionPool) -> None:
        """Note that a call has failed as it does when a server dies or loses its keys."""

    def failed_lately(self, key: str) -> bool:
        """Tell whether the server that has ``key`` failed in the last seconds."""
        del key
        return False

    def moved(self, slot: int, place: str, told_by: ConnectionPool) -> ConnectionPool:
        """Note that ``place``, host and port, has a slot now, and return the connections to it."""
        del slot
        return self.at(place, told_by)

    def at(self, place: str, told_by: ConnectionPool) -> ConnectionPool:
        """Return the connections to ``place``, host and port, as ``told_by`` knows it."""
        del told_by
        raise ServerRefused(
            f"the server belongs to a cluster and redirects to {place}: use a redis+cluster://"
            " address"
        )

    def all(self) -> Sequence[ConnectionPool]:
        """Return all servers that have keys, or none if :meth:`refresh` has to be called first."""
        return self._single

    @property
    def open(self) -> int:
        """The number of connections that are open now."""
        return sum(pool.open for pool in self.pools)

    @property
    def opened(self) -> int:
        """The number of connections that were opened so far."""
        return sum(pool.opened for pool in self.pools)

    def prune(self) -> None:
        """Close idle connections as :meth:`ConnectionPool.prune` does."""
        for pool in self.pools:
            pool.prune()

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in [*self.pools]:
            await pool.aclose()
