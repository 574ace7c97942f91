"""The servers that have the keys: a single one, or a cluster (Redis Cluster specification)."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from delayq._redis.connection import ReplyError, own_copy
from delayq._redis.pool import ConnectionPool
from delayq._redis.retry import first_of, is_not_now
from delayq._redis.slots import SLOTS, slot_of
from delayq.errors import Closed, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.url import ClusterAddress

# The minimum time between two requests for the slots, seconds.
_ASK_EVERY = 0.05
# How long offers that may go anywhere avoid a server that has failed, seconds.
_LATELY = 10.0

HostPort = tuple[str, int]

# A server sends this in place of a host name that it was not given, where names are preferred.
_UNKNOWN = b"?"
_NO_HOST = (b"", None, _UNKNOWN)


class Topology:
    """The one server that has every key; :class:`Cluster` has several.

    Behind a name or a Sentinel, another server may take its place.

    Attributes:
        spread: Whether two keys may live on different servers. If so, no script may name keys of
            two queues.
        only_pool: The connections to the one server that has every key, if there is only one.
    """

    spread: bool = False

    def __init__(self, pool: ConnectionPool | None = None) -> None:
        self.only_pool: ConnectionPool | None = pool

    @property
    def pools(self) -> Iterable[ConnectionPool]:
        """The connections to every server that is known."""
        return () if self.only_pool is None else (self.only_pool,)

    def pool_of(self, key: str | None) -> ConnectionPool:
        """Return the connections for ``key``, or to any server, or raise ServerUnavailable."""
        del key
        assert self.only_pool is not None
        return self.only_pool

    async def find_pool(self, key: str | None) -> ConnectionPool:
        """Return the same as :meth:`pool_of`, but ask if it is uncertain. Raises ServerError."""
        return self.pool_of(key)

    async def candidates(self) -> Sequence[ConnectionPool]:
        """Return the servers for a question without a key, the most promising ones first."""
        return [*self.pools]

    async def refresh(self) -> None:
        """Ask which server has which keys. Raises as :meth:`find_pool` does."""

    def suspect(self, connections: ConnectionPool) -> None:
        """Note that a call has failed as it does when a server dies or loses its keys."""

    def failed_lately(self, key: str) -> bool:
        """Tell whether the server that has ``key`` failed in the last seconds."""
        del key
        return False

    def note_move(self, slot: int, host_port: str, source: ConnectionPool) -> ConnectionPool:
        """Note that another server has a slot now, and return the connections to it."""
        del slot
        return self.pool_at(host_port, source)

    def pool_at(self, host_port: str, source: ConnectionPool) -> ConnectionPool:
        """Return the connections to the server that the server ``source`` redirects to."""
        del source
        raise ServerRefused(
            f"the server belongs to a cluster and redirects to {host_port}: use a redis+cluster://"
            " address"
        )

    def masters(self) -> Sequence[ConnectionPool]:
        """Return all servers that have keys, or none if :meth:`refresh` has to be called first."""
        return [*self.pools]

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


class Cluster(Topology):
    """The masters of a cluster, each with its own connections.

    A server that has failed is suspected: the next call for one of its keys asks another server
    which one has them now. In the meantime, calls for the keys of other servers continue.
    """

    spread = True

    def __init__(self, address: ClusterAddress, limit: int) -> None:
        super().__init__()
        self._address = address
        # The maximum number of connections to each server.
        self._limit = limit
        self._pools: dict[HostPort, ConnectionPool] = {}
        self._owners: list[ConnectionPool | None] = [None] * SLOTS
        self._masters: list[ConnectionPool] = []
        self._suspected: set[ConnectionPool] = set()
        # Pools that the last reply did not name: the reply may be older than our knowledge.
        self._doubted: set[ConnectionPool] = set()
        self._failed_at: WeakKeyDictionary[ConnectionPool, float] = WeakKeyDictionary()
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self._opened_before = 0
        self._closed = False

    @property
    def pools(self) -> Iterable[ConnectionPool]:
        return self._pools.values()

    def pool_of(self, key: str | None) -> ConnectionPool:
        if self._closed:
            raise Closed("the client is closed")
        if key is None:
            masters = [master for master in self._masters if master not in self._suspected]
            pool = random.choice(masters) if masters else None
        else:
            pool = self._owners[slot_of(key)]
        if pool is None or pool in self._suspected:
            raise ServerUnavailable(
                f"{self._address.label}: no server is currently known to hold {key or 'anything'!r}"
            )
        return pool

    async def find_pool(self, key: str | None) -> ConnectionPool:
        try:
            return self.pool_of(key)
        except ServerUnavailable:
            await self.refresh()
            return self.pool_of(key)

    async def candidates(self) -> Sequence[ConnectionPool]:
        if self._closed:
            raise Closed("the client is closed")
        if self._suspected.issuperset(self._masters):
            await self.refresh()
        return self._in_order(self._masters)

    async def refresh(self) -> None:
        # One request serves all callers.
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(
                self._refresh(), name="delayq cluster"
            )
            self._refreshing.add_done_callback(self._on_refreshed)
        refreshing = self._refreshing
        # A waiting caller is not cancelled with the task, and does not cancel it.
        await asyncio.wait({refreshing})
        if refreshing.cancelled():
            raise Closed("the client is closed")
        if (error := refreshing.exception()) is not None:
            raise own_copy(error) if isinstance(error, DelayqError) else error

    def suspect(self, connections: ConnectionPool) -> None:
        self._suspected.add(connections)
        self._failed_at[connections] = asyncio.get_running_loop().time()

    def failed_lately(self, key: str) -> bool:
        if not self._failed_at:
            return False
        owner = self._owners[slot_of(key)]
        if owner is None or owner not in self._failed_at:
            return False
        return asyncio.get_running_loop().time() - self._failed_at[owner] < _LATELY

    def note_move(self, slot: int, host_port: str, source: ConnectionPool) -> ConnectionPool:
        # It has lost one slot, so it may have lost more.
        self._suspected.add(source)
        owner = self._owners[slot] = self.pool_at(host_port, source)
        return owner

    def pool_at(self, host_port: str, source: ConnectionPool) -> ConnectionPool:
        server = read_host_port(host_port, self._host_port_of(source))
        if server is None:
            # The reply to CLUSTER SLOTS has more than the name.
            self._suspected.add(source)
            raise ServerUnavailable(
                f"{source.label} redirected to {host_port}, which is not a valid address"
            )
        return self._pool(server)

    def masters(self) -> Sequence[ConnectionPool]:
        return [] if self._suspected.intersection(self._masters) else [*self._masters]

    @property
    def opened(self) -> int:
        return self._opened_before + super().opened

    async def aclose(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        await super().aclose()

    def _pool(self, server: HostPort) -> ConnectionPool:
        if server not in self._pools:
            self._pools[server] = ConnectionPool(
                self._address.seeds[0].at(*server),
                self._limit,
                # By one of the servers, whose users and certificates are those of all.
                was_let_in=bool(self._masters),
            )
        return self._pools[server]

    def _host_port_of(self, pool: ConnectionPool) -> HostPort:
        return next(
            (server for server, its_pool in self._pools.items() if its_pool is pool), ("", 0)
        )

    def _on_refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._refreshed_at + _ASK_EVERY - loop.time())
        attempts = [(pool.label, partial(self._ask, pool)) for pool in self._to_ask()]
        try:
            self._install(
                await first_of(
                    f"{self._address.label}: no server reports where the keys are", attempts
                )
            )
        finally:
            self._refreshed_at = loop.time()

    def _to_ask(self) -> Iterable[ConnectionPool]:
        """Return every known server, the most promising ones first."""
        seeds = [
            self._pool((seed.options["host"], seed.options["port"])) for seed in self._address.seeds
        ]
        return dict.fromkeys([*self._in_order(self._pools.values()), *seeds])

    def _in_order(self, pools: Iterable[ConnectionPool]) -> Sequence[ConnectionPool]:
        """Return the pools in random order, those that have failed at the end."""
        pools = list(pools)
        shuffled = random.sample(pools, len(pools))
        return sorted(shuffled, key=lambda pool: pool in self._suspected)

    async def _ask(self, pool: ConnectionPool) -> dict[HostPort, list[range]]:
        wire = pool.acquire_nowait()
        is_dedicated = wire is None
        if wire is None:
            # Not one of the limited connections: calls that hang may hold them all.
            wire = await pool.open_own()
        try:
            reply = await wire.ask("CLUSTER", "SLOTS")
        except ReplyError as error:
            if is_not_now(text := str(error)):
                raise ServerUnavailable(
                    f"{pool.label} is temporarily unavailable: {text}"
                ) from error
            hint = "; for a server outside a cluster, use redis://host:port"
            raise ServerRefused(f"{pool.label}: {text}{hint * ('cluster' in text)}") from error
        except OSError as error:
            raise ServerUnavailable(f"{pool.label} does not answer: {error}") from error
        finally:
            (pool.close if is_dedicated else pool.abandon)(wire)
        if not reply:
            raise ServerUnavailable(f"{pool.label} reports no slots")
        return read_slots(reply, self._host_port_of(pool))

    def _install(self, slots: dict[HostPort, list[range]]) -> None:
        owners: list[ConnectionPool | None] = [None] * SLOTS
        for server, ranges in slots.items():
            pool = self._pool(server)
            for span in ranges:
                owners[span.start : span.stop] = [pool] * len(span)
        self._owners = owners
        self._masters = [self._pools[server] for server in slots]
        missing = {pool for server, pool in self._pools.items() if server not in slots}
        # One reply may be older than our knowledge, and calls are in flight. Two replies, or a
        # failure as well, are proof.
        retired = missing & (self._doubted | self._suspected)
        retired |= {pool for pool in missing if not pool.open}
        for pool in retired:
            # A call to it would wait in vain, or for a reply that no longer counts.
            pool.retire(ServerUnavailable(f"{pool.label} no longer serves any slots"))
            self._opened_before += pool.opened
            del self._pools[self._host_port_of(pool)]
        self._doubted = missing - retired
        self._suspected.clear()


def read_slots(reply: Any, source: HostPort) -> dict[HostPort, list[range]]:
    """Return the slots of each master, according to the reply to ``CLUSTER SLOTS``.

    The address of a master without a name is in the same reply, or is that of the server
    ``source``, which sent it.
    """
    slots: dict[HostPort, list[range]] = {}
    for start, end, (name, port, *details), *_ in reply:
        host = name.decode() if name not in _NO_HOST else _address_in(details) or source[0]
        slots.setdefault((host, int(port)), []).append(range(int(start), int(end) + 1))
    return slots


def _address_in(details: list[Any]) -> str:
    """Return the address from the extra facts: an id, then pairs of a word and its meaning."""
    facts = details[1] if len(details) > 1 and isinstance(details[1], list) else []
    address: bytes = dict(zip(facts[::2], facts[1::2], strict=False)).get(b"ip") or b""
    return address.decode()


def read_host_port(redirection: str, source: HostPort) -> HostPort | None:
    """Return host and port of a redirection by the server ``source``; None if it is unknown."""
    host, _, port = redirection.rpartition(":")
    return None if host.encode() == _UNKNOWN else (host or source[0], int(port))
