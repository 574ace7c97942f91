"""A Redis or Valkey Cluster: which server has which keys (Redis Cluster specification)."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from delayq._redis.connection import ReplyError, own_copy
from delayq._redis.first_of import first_of
from delayq._redis.pool import ConnectionPool
from delayq._redis.retry import is_not_now
from delayq._redis.slots import SLOTS, slot_of
from delayq._redis.topology import Topology
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


def read_slots(answer: Any, asked: HostPort) -> dict[HostPort, list[range]]:
    """Return the slots of each master, according to the reply to ``CLUSTER SLOTS``.

    The address of one without a name is in the same reply, or is that of the server ``asked``.
    """
    found: dict[HostPort, list[range]] = {}
    for first, last, (name, port, *more), *_ in answer:
        host = name.decode() if name not in _NO_HOST else _address_in(more) or asked[0]
        found.setdefault((host, int(port)), []).append(range(int(first), int(last) + 1))
    return found


def _address_in(more: list[Any]) -> str:
    """Return the address from the extra facts: an id, then pairs of a word and its meaning."""
    facts = more[1] if len(more) > 1 and isinstance(more[1], list) else []
    address: bytes = dict(zip(facts[::2], facts[1::2], strict=False)).get(b"ip") or b""
    return address.decode()


def read_place(place: str, asked: HostPort) -> HostPort | None:
    """Return host and port of a redirection by the server ``asked``; None if it is unknown."""
    host, _, port = place.rpartition(":")
    return None if host.encode() == _UNKNOWN else (host or asked[0], int(port))


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

    def of(self, key: str | None) -> ConnectionPool:
        if self._closed:
            raise Closed("the client is closed")
        if key is None:
            masters = [master for master in self._masters if master not in self._suspected]
            found = random.choice(masters) if masters else None
        else:
            found = self._owners[slot_of(key)]
        if found is None or found in self._suspected:
            raise ServerUnavailable(
                f"{self._address.label}: no server is currently known to hold {key or 'anything'!r}"
            )
        return found

    async def find(self, key: str | None) -> ConnectionPool:
        try:
            return self.of(key)
        except ServerUnavailable:
            await self.refresh()
            return self.of(key)

    async def any(self) -> Sequence[ConnectionPool]:
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
            self._refreshing.add_done_callback(self._forget)
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

    def moved(self, slot: int, place: str, told_by: ConnectionPool) -> ConnectionPool:
        # It has lost one slot, so it may have lost more.
        self._suspected.add(told_by)
        now = self._owners[slot] = self.at(place, told_by)
        return now

    def at(self, place: str, told_by: ConnectionPool) -> ConnectionPool:
        found = read_place(place, self._place_of(told_by))
        if found is None:
            # The reply to CLUSTER SLOTS has more than the name.
            self._suspected.add(told_by)
            raise ServerUnavailable(
                f"{told_by.label} redirected to {place}, which is not a valid address"
            )
        return self._pool(found)

    def all(self) -> Sequence[ConnectionPool]:
        return [] if self._suspected.intersection(self._masters) else [*self._masters]

    @property
    def opened(self) -> int:
        return self._opened_before + super().opened

    async def aclose(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        await super().aclose()

    def _pool(self, place: HostPort) -> ConnectionPool:
        if place not in self._pools:
            self._pools[place] = ConnectionPool(
                self._address.seeds[0].at(*place),
                self._limit,
                # By one of the servers, whose users and certificates are those of all.
                was_let_in=bool(self._masters),
            )
        return self._pools[place]

    def _place_of(self, pool: ConnectionPool) -> HostPort:
        return next((place for place, known in self._pools.items() if known is pool), ("", 0))

    def _forget(self, done: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not done.cancelled():
            done.exception()

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
        shuffled = random.sample(known := list(pools), len(known))
        return sorted(shuffled, key=lambda pool: pool in self._suspected)

    async def _ask(self, pool: ConnectionPool) -> dict[HostPort, list[range]]:
        wire = pool.acquire_nowait()
        own = wire is None
        if wire is None:
            # Not one of the limited connections: calls that hang may hold them all.
            wire = await pool.open_own()
        try:
            answer = await wire.ask("CLUSTER", "SLOTS")
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
            (pool.close if own else pool.abandon)(wire)
        if not answer:
            raise ServerUnavailable(f"{pool.label} reports no slots")
        return read_slots(answer, self._place_of(pool))

    def _install(self, found: dict[HostPort, list[range]]) -> None:
        owners: list[ConnectionPool | None] = [None] * SLOTS
        for place, ranges in found.items():
            pool = self._pool(place)
            for slots in ranges:
                owners[slots.start : slots.stop] = [pool] * len(slots)
        self._owners = owners
        self._masters = [self._pools[place] for place in found]
        missing = {pool for place, pool in self._pools.items() if place not in found}
        # One reply may be older than our knowledge, and calls are in flight. Two replies, or a
        # failure as well, are proof.
        gone = missing & (self._doubted | self._suspected)
        gone |= {pool for pool in missing if not pool.open}
        for pool in gone:
            # A call to it would wait in vain, or for an answer that no longer counts.
            pool.retire(ServerUnavailable(f"{pool.label} no longer serves any slots"))
            self._opened_before += pool.opened
            del self._pools[self._place_of(pool)]
        self._doubted = missing - gone
        self._suspected.clear()
