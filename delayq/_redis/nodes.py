"""Where keys live: on one server, which may be another one tomorrow, or spread over the masters of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.connections import Connections


class Nodes(Protocol):
    """The servers of one client.

    Attributes:
        spread: Whether two keys may live on different servers: then no script may name keys of two queues.
    """

    spread: bool

    def of(self, key: str | None) -> Connections:
        """The connections to the server that has ``key``; to any server for None.

        Raises:
            ServerUnavailable: Nobody is known to have it now: :meth:`find` may find somebody.
        """
        ...

    async def find(self, key: str | None) -> Connections:
        """As :meth:`of`, but asks who has it, if that is not sure.

        Raises:
            ServerUnavailable: Nobody has it, or nobody answers.
            ServerRefused: Nobody lets us in.
        """
        ...

    async def any(self) -> Sequence[Connections]:
        """The connections to every server that may answer a question about no key, the most promising ones first.

        Raises:
            ServerUnavailable, ServerRefused: As :meth:`find`.
        """
        ...

    async def refresh(self) -> None:
        """Ask who has what. Raises as :meth:`find`."""
        ...

    def suspect(self, connections: Connections) -> None:
        """A call over these connections has failed as it does when a server dies or loses its keys."""
        ...

    def failed_lately(self, key: str) -> bool:
        """Tell whether the server that has ``key`` has failed in the last seconds, and other keys may do better."""
        ...

    def moved(self, slot: int, place: str, told_by: Connections) -> Connections:
        """Somebody says that ``place``, host and port, has a slot now. Returns the connections to that one."""
        ...

    def at(self, place: str, told_by: Connections) -> Connections:
        """The connections to ``place``, host and port, as ``told_by`` knows it."""
        ...

    def all(self) -> Sequence[Connections]:
        """The connections to every server that has keys; none where that is not sure: :meth:`refresh` asks."""
        ...

    @property
    def open(self) -> int:
        """How many connections are open now."""
        ...

    @property
    def opened(self) -> int:
        """How many were opened so far."""
        ...

    def prune(self) -> None:
        """As :meth:`Connections.prune`."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class OneServer:
    """Every key lives in one place. Behind a name or a Sentinel that may become another server."""

    spread = False

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def of(self, key: str | None) -> Connections:
        del key
        return self._connections

    async def find(self, key: str | None) -> Connections:
        del key
        return self._connections

    async def any(self) -> Sequence[Connections]:
        return [self._connections]

    async def refresh(self) -> None:
        """There is nothing to ask."""

    def suspect(self, connections: Connections) -> None:
        """There is nobody else."""

    def failed_lately(self, key: str) -> bool:
        del key
        return False

    def moved(self, slot: int, place: str, told_by: Connections) -> Connections:
        del slot
        return self.at(place, told_by)

    def at(self, place: str, told_by: Connections) -> Connections:
        del told_by
        raise ServerRefused(f"the server is one of a cluster, and sends us to {place}: name it as redis+cluster://")

    def all(self) -> Sequence[Connections]:
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
