"""A Redis or Valkey Cluster: which server has which keys, and how that is found out (Redis Cluster specification)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from delayq._redis.connections import Connections
from delayq._redis.group_commit import own_copy
from delayq._redis.keys import SLOTS, slot_of
from delayq._redis.wire import ReplyError
from delayq.errors import Closed, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.address import ClusterAddress

# A server that hangs keeps us from asking the next one for so long; and nobody is asked more often than that; seconds.
_ASK_WITHIN = 1.0
_ASK_EVERY = 0.05

Place = tuple[str, int]


def read_slots(answer: Any, asked: Place) -> dict[Place, list[range]]:
    """Which slots each master has, by what ``CLUSTER SLOTS`` answers. One who does not know its own name is ``asked``."""
    found: dict[Place, list[range]] = {}
    for first, last, master, *_ in answer:
        place = (master[0].decode() if master[0] else asked[0]), int(master[1])
        found.setdefault(place, []).append(range(int(first), int(last) + 1))
    return found


def read_place(place: str, asked: Place) -> Place:
    """Host and port of a redirection; without a host it is the one that was ``asked``."""
    host, _, port = place.rpartition(":")
    return host or asked[0], int(port)


class Cluster:
    """The masters of a cluster, each with connections of its own.

    Whoever has failed is suspected: the next call for one of its keys asks anybody who has them now. Calls for the keys of others
    go on meanwhile.
    """

    spread = True

    def __init__(self, address: ClusterAddress, limit: int) -> None:
        """Args:
        limit: Connections to each server.
        """
        self._address = address
        self._limit = limit
        self._pools: dict[Place, Connections] = {}
        self._places: dict[Connections, Place] = {}
        self._owners: list[Connections | None] = [None] * SLOTS
        self._masters: list[Connections] = []
        self._suspected: set[Connections] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self._opened_before = 0
        self._closed = False

    def of(self, key: str | None) -> Connections:
        if self._closed:
            raise Closed("the client is closed")
        if key is None:
            masters = [master for master in self._masters if master not in self._suspected]
            found = random.choice(masters) if masters else None
        else:
            found = self._owners[slot_of(key)]
        if found is None or found in self._suspected:
            raise ServerUnavailable(f"{self._address.label}: nobody is known to have {key or 'anything'!r} now")
        return found

    async def find(self, key: str | None) -> Connections:
        try:
            return self.of(key)
        except ServerUnavailable:
            await self.refresh()
            return self.of(key)

    async def refresh(self) -> None:
        # One asks for all.
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh(), name="delayq cluster")
            self._refreshing.add_done_callback(self._forget)
        refreshing = self._refreshing
        # Who waits is neither cancelled with it, nor cancels it.
        await asyncio.wait({refreshing})
        if refreshing.cancelled():
            raise Closed("the client is closed")
        if (error := refreshing.exception()) is not None:
            raise own_copy(error) if isinstance(error, DelayqError) else error

    def suspect(self, connections: Connections) -> None:
        self._suspected.add(connections)

    def moved(self, slot: int, place: str, told_by: Connections) -> Connections:
        now = self._owners[slot] = self.at(place, told_by)
        # It has lost one, so perhaps more.
        self._suspected.add(told_by)
        return now

    def at(self, place: str, told_by: Connections) -> Connections:
        return self._pool(read_place(place, self._places.get(told_by, ("", 0))))

    def all(self) -> Sequence[Connections]:
        return [] if self._suspected.intersection(self._masters) else [*self._masters]

    @property
    def open(self) -> int:
        return sum(pool.open for pool in self._pools.values())

    @property
    def opened(self) -> int:
        return self._opened_before + sum(pool.opened for pool in self._pools.values())

    def prune(self) -> None:
        for pool in self._pools.values():
            pool.prune()

    async def aclose(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        for pool in list(self._pools.values()):
            await pool.aclose()

    def _pool(self, place: Place) -> Connections:
        pool = self._pools.get(place)
        if pool is None:
            pool = self._pools[place] = Connections(self._address.seeds[0].at(*place), self._limit)
            self._places[pool] = place
        return pool

    def _forget(self, done: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not done.cancelled():
            done.exception()

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._refreshed_at + _ASK_EVERY - loop.time())
        reasons: dict[str, DelayqError] = {}
        try:
            for pool in self._to_ask():
                try:
                    async with asyncio.timeout(_ASK_WITHIN):
                        answer = await self._ask(pool)
                except TimeoutError:
                    error: DelayqError = ServerUnavailable(f"{self._label(pool)} does not answer within {_ASK_WITHIN:g} s")
                    reasons[str(error)] = error
                except DelayqError as known:
                    reasons[str(known)] = known
                else:
                    if answer:
                        self._install(read_slots(answer, self._places[pool]))
                        return
                    reasons[f"{self._label(pool)} knows of no slots"] = ServerUnavailable("")
        finally:
            self._refreshed_at = loop.time()
        # Where nobody is down, being refused is the reason to tell.
        refused = next((error for error in reasons.values() if isinstance(error, ServerRefused)), None)
        raise type(refused or ServerUnavailable(""))(f"{self._address.label}: nobody tells who has what: {'; '.join(reasons)}")

    def _to_ask(self) -> Iterable[Connections]:
        """Everybody we know of, the most promising ones first."""
        known = random.sample(list(self._pools.values()), len(self._pools))
        known.sort(key=lambda pool: pool in self._suspected)
        seeds = [self._pool((seed.options["host"], seed.options["port"])) for seed in self._address.seeds]
        return dict.fromkeys([*known, *seeds])

    async def _ask(self, pool: Connections) -> Any:
        wire = pool.acquire_nowait()
        own = wire is None
        if wire is None:
            # Not from the limited ones: calls that hang may have them all.
            wire = await pool.open_own()
        answered = False
        try:
            answer = await wire.ask("CLUSTER", "SLOTS")
            answered = True
        except ReplyError as error:
            answered = True
            raise ServerRefused(f"{self._label(pool)}: {error}; without a cluster it is redis://host:port") from error
        except OSError as error:
            raise ServerUnavailable(f"{self._label(pool)} does not answer: {error}") from error
        finally:
            if own:
                pool.close(wire)
            elif answered:
                pool.release(wire)
            else:
                pool.drop(wire)
        return answer

    def _install(self, found: dict[Place, list[range]]) -> None:
        owners: list[Connections | None] = [None] * SLOTS
        for place, ranges in found.items():
            pool = self._pool(place)
            for slots in ranges:
                owners[slots.start : slots.stop] = [pool] * len(slots)
        self._owners = owners
        self._masters = [self._pools[place] for place in found]
        self._suspected.clear()
        for place, pool in list(self._pools.items()):
            if place not in found:
                # Who waits for its answer would wait in vain, or for one that counts no more.
                pool.retire(ServerUnavailable(f"{self._label(pool)} has no slots any more"))
                self._opened_before += pool.opened
                del self._pools[place], self._places[pool]

    def _label(self, pool: Connections) -> str:
        host, port = self._places.get(pool, ("", 0))
        return f"{host}:{port}"
