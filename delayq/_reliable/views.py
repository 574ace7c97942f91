"""Views of a reliable queue, read in pages: no script looks at more than a page of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._reliable.scripts import GET, LEASED, LIST, STATS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._redis.client import RedisClient
    from delayq._reliable.keys import ReliableKeys

PAGE = 200
"""How many messages one script looks at or drops: a script blocks the whole server while it runs."""


class Counts(NamedTuple):
    """The number of messages in each state, as ``stats.lua`` returns it."""

    delayed: int
    ready: int
    leased: int
    dead: int
    oldest_us: int
    paused: int


async def count(server: RedisClient, keys: ReliableKeys) -> Counts:
    """Count the messages of a queue by state."""
    *counts, exact = await server.run(STATS, (*keys.messages, keys.dead, keys.paused))
    known = Counts(*counts)
    if exact:
        return known
    # There are too many leases for one script, and perhaps too many that have ended.
    lasting = 0
    async for ends in _lease_ends(server, keys):
        lasting += len(ends)
    leased = min(lasting, known.delayed + known.leased)
    return known._replace(leased=leased, delayed=known.delayed + known.leased - leased)


async def page(server: RedisClient, keys: ReliableKeys, state: str, offset: int, limit: int) -> list[tuple[bytes, Sequence[Any]]]:
    """List messages in one state: for each, its id and what ``get.lua`` returns for it."""
    if state == "leased":
        return await _leased(server, keys, offset, limit)
    found: list[tuple[bytes, Sequence[Any]]] = []
    for at in range(0, limit, PAGE):
        asked = min(PAGE, limit - at)
        looked_at, *some = await server.run(LIST, keys.messages, (state, offset + at, asked))
        found += zip(some[::2], some[1::2], strict=True)
        if looked_at < asked:
            break
    return found


async def _leased(server: RedisClient, keys: ReliableKeys, offset: int, limit: int) -> list[tuple[bytes, Sequence[Any]]]:
    """List leased messages by the end of their lease."""
    ends: dict[bytes, float] = {}
    async for some in _lease_ends(server, keys):
        ends |= some
    ids = sorted(ends, key=lambda each: (ends[each], each))[offset : offset + limit]
    found: list[tuple[bytes, Sequence[Any]]] = []
    for at in range(0, len(ids), PAGE):
        some_ids = ids[at : at + PAGE]
        facts = await server.run(GET, keys.messages, some_ids)
        # Leave out the messages that were settled meanwhile.
        found += [(id, each) for id, each in zip(some_ids, facts, strict=True) if each and each[0] == b"leased"]  # noqa: A001
    return found


async def _lease_ends(server: RedisClient, keys: ReliableKeys) -> AsyncIterator[dict[bytes, float]]:
    """Read the ends of all current leases, some at a time."""
    cursor: Any = b"0"
    while True:
        cursor, found = await server.command("HSCAN", keys.leases, cursor, "COUNT", PAGE)
        ids = list(dict.fromkeys(found[::2]))
        for at in range(0, len(ids), PAGE):
            some = ids[at : at + PAGE]
            ends = await server.run(LEASED, keys.messages, some)
            yield {id: float(end) for id, end in zip(some, ends, strict=True) if end is not None}  # noqa: A001
        if cursor in (b"0", "0", 0):
            return
