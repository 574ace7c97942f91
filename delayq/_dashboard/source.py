"""Reads and changes one queue for the dashboard, without opening it: opening a queue means taking part in it."""

from __future__ import annotations

import asyncio
import heapq
import json
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import DelayedStore, score_of
from delayq._reliable.bodies import parse, parse_letter
from delayq._reliable.dead_letters import DeadLetters
from delayq._reliable.error_text import unpack_error
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import CANCEL, GET, RESCHEDULE, RESUME
from delayq._reliable.views import count, page
from delayq.codecs import StringCodec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._delayed.store import PendingRecord
    from delayq._redis.client import RedisClient
    from delayq.admin.catalog import QueueKind

R = TypeVar("R")

SECOND = 1_000_000
"""One second in microseconds, the unit of all moments here."""
MOST_PARTITIONS = 1024
# Ends of the bars of a histogram. There is another bar beyond the last one.
HORIZONS = (60 * SECOND, 3600 * SECOND, 86400 * SECOND)
# With more leases than this, they are not examined one by one. As in stats.lua.
_LEASES_LOOKED_AT = 1000


@dataclass(frozen=True)
class Counts:
    """The number of messages in each state.

    Attributes:
        late_us: How long the oldest message that is due and not taken has been due, in microseconds; 0 if there is none, None
            if unknown: Redisson's ready list has no times.
    """

    delayed: int
    ready: int
    leased: int
    dead: int
    late_us: int | None
    paused: bool


@dataclass(frozen=True)
class Place:
    """Where to find one message again.

    Attributes:
        id: The message's id.
        partition: The partition that holds the message, if the queue has any.
        due: In a delayed queue, the message's score, as the server writes it.
    """

    id: bytes
    partition: int | None = None
    due: str = ""


@dataclass(frozen=True)
class Row:
    """A message, as it is shown. Moments are in microseconds; unknown ones are None."""

    place: Place | None
    state: str
    payload: bytes | None
    due_us: int | None = None
    lease_us: int | None = None
    died_us: int | None = None
    enqueued_us: int | None = None
    expires_us: int | None = None
    priority: int = 0
    attempt: int = 0
    error: str = ""
    error_line: str = ""
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Source(Protocol):
    """A queue of either kind."""

    kind: QueueKind
    name: str
    states: tuple[str, ...]

    @property
    def partitions(self) -> int | None:
        """The number of partitions that are known."""
        ...

    async def counts(self) -> Counts:
        """Return the number of messages in each state."""
        ...

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages are due by each of :data:`HORIZONS`, and how many later."""
        ...

    async def due_between(self, start: int, end: int) -> int:
        """Return how many messages come due between two moments."""
        ...

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        """Return some of the messages in one state."""
        ...

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        """Return one message."""
        ...

    async def cancel(self, place: Place) -> bool:
        """Cancel a message."""
        ...

    async def reschedule(self, place: Place, delay_us: int) -> Place | None:
        """Give a message another delay. Returns where it is then."""
        ...


class DelayedSource:
    """A delayed queue, in Redisson's format."""

    kind: QueueKind = "delayed"
    states = ("delayed", "ready", "leased", "unreadable")
    partitions = None

    def __init__(self, server: RedisClient, name: str) -> None:
        self._server = server
        self._store = DelayedStore(server, DelayedKeys.of(name))
        self.name = name

    async def counts(self) -> Counts:
        depth, bad, now = await asyncio.gather(
            self._store.depth(), self._store.count_quarantined(), self._server.time_us(self._store.keys.timeout)
        )
        late = int(depth.overdue_us(now)) or (None if depth.ready else 0)
        return Counts(depth.delayed, depth.ready, depth.leased, bad, late, paused=False)

    async def histogram(self, now: int) -> list[int]:
        return await _bars(now, lambda start, end: self.due_between(int(start), None if end == "+inf" else int(end)))

    async def due_between(self, start: int, end: int | None) -> int:
        return await self._store.count_due(start, end)

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "delayed":
            return [_record(found) for found in await self._store.pending_page(offset, limit)]
        if state == "leased":
            leased = await self._store.leased_page(offset, limit)
            return [Row(None, state, payload, lease_us=ends_us) for payload, ends_us in leased]
        read = self._store.ready_page if state == "ready" else self._store.quarantined_page
        return [Row(None, state, payload) for payload in await read(offset, limit)]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        found = None if dead else await self._store.find_at(place.due, place.id)
        return None if found is None else _record(found)

    async def cancel(self, place: Place) -> bool:
        found = await self._store.find_at(place.due, place.id)
        return found is not None and await self._store.cancel([found.record]) > 0

    async def reschedule(self, place: Place, delay_us: int) -> Place | None:
        found = await self._store.find_at(place.due, place.id)
        due_us = None if found is None else await self._store.reschedule(found.record, delay_us)
        return None if due_us is None else Place(place.id, None, score_of(due_us))


class ReliableSource:
    """A reliable queue, or all partitions of one."""

    kind: QueueKind = "reliable"
    states = ("delayed", "ready", "leased")

    def __init__(self, server: RedisClient, name: str, partitions: Iterable[int | None]) -> None:
        self._server = server
        self.name = name
        self._parts: dict[int | None, ReliableKeys] = {
            number: ReliableKeys.of(name, partition=number) for number in sorted(partitions, key=lambda each: each or 0)
        }

    @property
    def partitions(self) -> int | None:
        numbers = [number for number in self._parts if number is not None]
        return max(numbers) + 1 if numbers else None

    def has(self, partition: int | None) -> bool:
        """Return whether there is such a partition. Pass None for a queue without partitions."""
        return partition in self._parts

    async def counts(self) -> Counts:
        parts = await self._each(lambda keys: count(self._server, keys))
        delayed, ready, leased, dead, late, paused = zip(*parts, strict=True)
        return Counts(sum(delayed), sum(ready), sum(leased), sum(dead), max(late), any(paused))

    async def histogram(self, now: int) -> list[int]:
        parts = await self._each(lambda keys: self._bars_of(keys, now))
        return [sum(bars) for bars in zip(*parts, strict=True)]

    async def due_between(self, start: int, end: int) -> int:
        return sum(await self._each(lambda keys: self._between(keys, str(start), str(end))))

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "dead":
            return await self._dead(offset, limit)
        if len(self._parts) == 1:
            return (await self._each(lambda keys: self._page(keys, state, offset, limit)))[0]
        # Each partition may have all the messages that come first.
        parts = await self._each(lambda keys: self._page(keys, state, 0, offset + limit))
        order = heapq.merge(*parts, key=lambda row: (-row.priority if state == "ready" else 0, row.due_us or row.lease_us or 0))
        return [*islice(order, offset, offset + limit)]

    async def _dead(self, offset: int, limit: int) -> list[Row]:
        single = len(self._parts) == 1
        start, count = (offset, limit) if single else (0, offset + limit)
        parts = await self._each(lambda keys: self._dead_page(keys, start, count))
        order = heapq.merge(*parts, key=lambda row: row.died_us or 0)
        return [*order] if single else [*islice(order, offset, offset + limit)]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        keys = self._parts.get(place.partition)
        if keys is None:
            return None
        ask = self._server.command
        if dead:
            score = await ask("ZSCORE", keys.dead, place.id)
            letter = await ask("HGET", keys.dead_messages, place.id)
            return None if score is None or letter is None else _letter(place, letter, score)
        (found,) = await self._server.run(GET, keys.messages, (place.id,))
        if found is None:
            return None
        lease = await ask("HGET", keys.leases, place.id)
        expires = await ask("HGET", keys.messages[13], place.id)
        return _live(place, found, lease, expires)

    async def cancel(self, place: Place) -> bool:
        keys = self._parts[place.partition]
        return bool((await self._server.run(CANCEL, keys.messages, (place.id,)))[0])

    async def reschedule(self, place: Place, delay_us: int) -> Place | None:
        keys = self._parts[place.partition]
        return place if await self._server.run(RESCHEDULE, (*keys.messages, keys.wake), (place.id, delay_us)) else None

    async def redrive(self, places: Sequence[Place] | None) -> int:
        """Redrive dead letters; all of them if None."""
        return sum([await letters.redrive_letters(names) for letters, names in self._letters(places)])

    async def purge_dead(self, places: Sequence[Place] | None) -> int:
        """Drop dead letters; all of them if None."""
        return sum([await letters.purge_letters(names) for letters, names in self._letters(places)])

    async def pause(self, partitions: int | None) -> None:
        """Stop all claims. Partitions that have never been seen are paused too, if ``partitions`` says that they exist."""
        for keys in self._all(partitions):
            await self._server.command("SET", keys.paused, "1")

    async def resume(self, partitions: int | None) -> None:
        """End a pause."""
        for keys in self._all(partitions):
            await self._server.run(RESUME, (keys.paused, keys.wake))

    # Internals

    async def _each(self, of: Callable[[ReliableKeys], Awaitable[R]]) -> list[R]:
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(*(of(keys) for keys in self._parts.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _all(self, partitions: int | None) -> list[ReliableKeys]:
        if self.partitions is None:
            return [*self._parts.values()]
        count = min(MOST_PARTITIONS, max(partitions or 0, self.partitions))
        return [ReliableKeys.of(self.name, partition=number) for number in range(count)]

    def _letters(self, places: Sequence[Place] | None) -> list[tuple[DeadLetters[str], list[bytes] | None]]:
        chosen: dict[int | None, list[bytes]] = {}
        for place in places or ():
            # By name: ids written by other programs may not be text, and several letters may have the same id.
            chosen.setdefault(place.partition, []).append(place.id)
        return [
            (DeadLetters(keys, self._server, StringCodec()), None if places is None else chosen[number])
            for number, keys in self._parts.items()
            if places is None or number in chosen
        ]

    def _number(self, keys: ReliableKeys) -> int | None:
        return next(number for number, each in self._parts.items() if each is keys)

    async def _page(self, keys: ReliableKeys, state: str, offset: int, limit: int) -> list[Row]:
        number = self._number(keys)
        return [_live(Place(id, number), facts) for id, facts in await page(self._server, keys, state, offset, limit)]  # noqa: A001

    async def _dead_page(self, keys: ReliableKeys, offset: int, limit: int) -> list[Row]:
        found = await self._server.command("ZRANGE", keys.dead, offset, offset + limit - 1, "WITHSCORES")
        if not found:
            return []
        letters = await self._server.command("HMGET", keys.dead_messages, *found[::2])
        number = self._number(keys)
        rows = zip(found[::2], letters, found[1::2], strict=True)
        return [_letter(Place(id, number), letter, at) for id, letter, at in rows if letter is not None]  # noqa: A001

    async def _bars_of(self, keys: ReliableKeys, now: int) -> list[int]:
        bars = await _bars(now, lambda start, end: self._between(keys, start, end))
        ends = await self._lease_ends(keys)
        for end in ends:
            # The end of a lease is stored among the due times of other messages, but is not one.
            if end > now:
                bars[sum(end > now + horizon for horizon in HORIZONS)] -= 1
        return [max(0, bar) for bar in bars]

    async def _lease_ends(self, keys: ReliableKeys) -> list[float]:
        if await self._server.command("HLEN", keys.leases) > _LEASES_LOOKED_AT:
            return []
        ids = await self._server.command("HKEYS", keys.leases)
        if not ids:
            return []
        scores = await asyncio.gather(*(self._server.command("ZMSCORE", key, *ids) for key in await self._live(keys)))
        return [float(score) for some in scores for score in some if score is not None]

    async def _live(self, keys: ReliableKeys) -> tuple[str, ...]:
        return keys.live if await self._server.command("EXISTS", *keys.live[1:]) else keys.live[:1]

    async def _between(self, keys: ReliableKeys, start: str, end: str) -> int:
        low = start if start == "-inf" else f"({start}"
        counts = await asyncio.gather(*(self._server.command("ZCOUNT", key, low, end) for key in await self._live(keys)))
        return sum(counts)


async def _bars(now: int, between: Callable[[str, str], Awaitable[int]]) -> list[int]:
    edges = [str(now), *(str(now + horizon) for horizon in HORIZONS), "+inf"]
    return list(await asyncio.gather(*(between(start, end) for start, end in pairwise(edges))))


def _whole(moment: float) -> int:
    # Another program may have left an infinity.
    return int(min(max(moment, 0.0), 2.0**62)) if moment == moment else 0  # noqa: PLR0124 - NaN


def _record(found: PendingRecord) -> Row:
    place = Place(found.start, None, found.score.decode(errors="replace"))
    payload = found.payload
    state = "unreadable" if payload is None else "delayed"
    return Row(place, state, found.record if payload is None else payload, found.due_us)


def _live(place: Place, facts: Sequence[Any], lease: bytes | None = None, expires: bytes | None = None) -> Row:
    state, priority, moment, attempt, body, error = facts
    at = _whole(float(moment or 0))
    enqueued, headers, payload = _body(body)
    leased = state == b"leased"
    due: int | None = at
    if leased:
        parts = (lease or b"").split(b":", 2)
        due = _whole(float(parts[1])) if len(parts) == 3 else None
    return Row(
        place,
        state.decode(),
        payload,
        due_us=due,
        lease_us=at if leased else None,
        enqueued_us=enqueued,
        expires_us=None if expires is None else _whole(float(expires)),
        priority=int(priority),
        attempt=int(attempt),
        error="" if error is None else unpack_error(error.decode(errors="replace"))[1],
        headers=headers,
    )


def _letter(place: Place, letter: bytes, died: bytes) -> Row:
    try:
        why, body = parse_letter(letter)
    except ValueError:
        # A letter that cannot be read must not hide the others.
        return Row(place, "dead", letter, died_us=_whole(float(died)), reason="unreadable")
    enqueued, headers, payload = _body(body)
    line, error = unpack_error(str(why.get("error") or ""))
    return Row(
        place,
        "dead",
        payload,
        died_us=_whole(float(died)),
        enqueued_us=enqueued,
        priority=_number(why.get("priority")),
        attempt=_number(why.get("attempt")),
        error=error,
        error_line=line,
        reason=str(why.get("reason") or ""),
        headers=headers,
    )


def _body(body: bytes) -> tuple[int | None, dict[str, str], bytes]:
    try:
        enqueued, headers, payload = parse(body)
    except ValueError:
        return None, {}, body
    return (
        enqueued,
        {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in headers.items()},
        payload,
    )


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
