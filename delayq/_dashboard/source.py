"""Reads and changes one queue for the dashboard without opening it: that means taking part."""

from __future__ import annotations

import asyncio
import heapq
import json
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import DelayedStore, due_us_of_stored, id_of_stored, score_of
from delayq._durations import moment_us
from delayq._redis.error_reader import SettingsChanged
from delayq._reliable.bodies import Body, parse, parse_letter
from delayq._reliable.dead_letters import half_way, purge_letters, read_dead_letter, redrive_letters
from delayq._reliable.error_text import unpack_error
from delayq._reliable.groups import Groups
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.known_settings import KnownSettings
from delayq._reliable.offering import Offer
from delayq._reliable.outcomes import history_of
from delayq._reliable.placement import home_of
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.replies import MessageTimes
from delayq._reliable.settings import Settings
from delayq._reliable.store import ReliableStore
from delayq.admin.search import Shelf
from delayq.codecs import BytesCodec
from delayq.errors import DuplicateMessage, PayloadTooLarge, QueueFull, ServerError
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._delayed.store import PendingRecord
    from delayq._engine.session import Session
    from delayq._reliable.dead_letters import DeadLetter
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.replies import StoredLetter, StoredMessage
    from delayq._reliable.settings import Declared, QueueSettings, StoredSettings
    from delayq._reliable.tallies import Unit
    from delayq.admin.catalog import QueueKind
    from delayq.admin.inspect import PurgeState
    from delayq.stats import Activity, WorkerInfo

R = TypeVar("R")
T = TypeVar("T")

SECOND = 1_000_000
"""One second in microseconds, the unit of all moments here."""
# The most messages in a call, and the most calls at once.
_AT_A_TIME = 100
_AT_ONCE = 20
# Ends of the bars of a histogram. There is another bar beyond the last one. The first is the time
# between two looks: it tells how many messages come due in between.
HORIZONS = (SECOND, 60 * SECOND, 3600 * SECOND, 86400 * SECOND)


@dataclass(frozen=True)
class Place:
    """Where to find one message again.

    Attributes:
        id: The message's id.
        partition: The partition that holds the message.
        due: In a delayed queue, the message's score, as the server writes it.
    """

    id: bytes
    partition: int = 0
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
    group: str = ""
    max_attempts: int | None = None
    timeout_us: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_restorable(self) -> bool:
        """Whether it can be offered again: a message whose id or body is no text cannot."""
        if self.place is None or self.payload is None or self.state == "unreadable":
            return False
        if self.place.due:
            return True
        try:
            self.place.id.decode()
        except UnicodeDecodeError:
            return False
        return self.enqueued_us is not None

    @property
    def moment_us(self) -> int | None:
        """When it died, its lease ends, or it is due."""
        return self.died_us or self.lease_us or self.due_us


class DelayedSource:
    """A delayed queue, in Redisson's format."""

    kind: QueueKind = "delayed"
    states = ("delayed", "ready", "leased", "unreadable")
    partitions = 1

    def __init__(self, session: Session, name: str) -> None:
        self._server = session.server
        self._store = DelayedStore(session.server, DelayedKeys.of(name))
        self.name = name

    def has(self, place: Place) -> bool:
        """Return whether a message of this queue can have that place."""
        return bool(place.due)

    async def depth(self) -> QueueDepth:
        depth, bad, now = await asyncio.gather(
            self._store.depth(),
            self._store.count_quarantined(),
            self._server.time_us(self._store.keys.timeout),
        )
        return depth.of_queue(now, bad)

    async def settings(self) -> None:
        """Return None: a delayed queue has no settings on the server."""

    async def histogram(self, now: int) -> list[int]:
        """Return how many messages come due by each of :data:`HORIZONS`, and how many later."""
        return await self._store.due_counts(_edges(now))

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        if state == "delayed":
            return [_record(found) for found in await self._store.pending_page(offset, limit)]
        if state == "leased":
            leased = await self._store.leased_page(offset, limit)
            return [Row(None, state, payload, lease_us=ends_us) for payload, ends_us in leased]
        read = self._store.ready_page if state == "ready" else self._store.quarantined_page
        return [Row(None, state, payload) for payload in await read(offset, limit)]

    async def shelves(self, states: Sequence[str]) -> list[Shelf[Row]]:
        """Return the messages in these states, to be searched."""
        depth = await self.depth()
        return [
            Shelf(count_in(depth, state), partial(self.page, state))
            for state in states
            if state in self.states
        ]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        found = None if dead else await self._store.find_at(place.due, place.id)
        return None if found is None else _record(found)

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are there."""
        found = await in_steps(places, self._record_at)
        return [_record(each) for each in found if each is not None]

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove pending messages, and return which were there."""
        if running:
            # A worker's payloads have left the queue.
            return [False] * len(places)

        async def remove(place: Place) -> bool:
            found = await self._record_at(place)
            return found is not None and await self._store.cancel([found.record]) > 0

        return await in_steps(places, remove)

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their new places; None for those that are gone."""
        return await self.reschedule_each([(place, delay_us) for place in places])

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(one: tuple[Place, int]) -> Place | None:
            place, delay_us = one
            found = await self._record_at(place)
            due_us = None if found is None else await self._store.reschedule(found.record, delay_us)
            return None if due_us is None else Place(place.id, 0, score_of(due_us))

        return await in_steps(moves, move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer messages again, with new ids, and return how many."""
        for at in range(0, len(rows), _AT_A_TIME):
            some = rows[at : at + _AT_A_TIME]
            await self.offer([(_left(row.due_us, now), row.payload or b"") for row in some])
        return len(rows)

    async def offer(self, offers: Sequence[tuple[int, bytes]]) -> list[Place]:
        """Store messages, each with its delay in microseconds, and return their places."""
        reply = await self._store.send(self._store.offer_request(offers))
        _, stored = self._store.parse_offered(offers, reply)
        # A record begins with the length of its id.
        return [
            Place(b"\x08" + id_of_stored(each), 0, score_of(due_us_of_stored(each)))
            for each in stored
        ]

    async def purge(self, state: str) -> int:
        """Drop the messages in one state, or in all."""
        return await self._store.purge(cast("PurgeState", state))

    async def _record_at(self, place: Place) -> PendingRecord | None:
        return await self._store.find_at(place.due, place.id)


class ReliableSource:
    """A reliable queue, with all its partitions."""

    kind: QueueKind = "reliable"
    states = ("delayed", "ready", "leased")

    def __init__(self, session: Session, name: str, partitions: int) -> None:
        self._session = session
        self.name = name
        self._parts = [self._partition(number) for number in range(partitions)]

    def _partition(self, number: int) -> ReliableStore:
        return ReliableStore(self._session.server, ReliableKeys.of(self.name, partition=number))

    @property
    def partitions(self) -> int:
        return len(self._parts)

    def has(self, place: Place) -> bool:
        return place.partition < len(self._parts)

    async def depth(self) -> QueueDepth:
        return QueueDepth.total(await self._each(lambda _, store: store.depth()))

    async def settings(self) -> QueueSettings:
        return (await self._parts[0].settings()).public()

    async def configure(self, changes: Declared) -> None:
        """Change settings. Raises as :meth:`delayq.ReliableQueue.configure`."""
        await self._known_settings().configure(changes)
        if changes.keys() & {"limit", "group_limit"}:
            await self._everywhere(ReliableStore.regroup)

    @property
    def groups(self) -> Groups:
        """The groups of the queue's messages."""
        return Groups(self._home_of_group, self._set_group, self.every_store)

    async def _home_of_group(self, group: str) -> ReliableStore:
        stored = await self._learn()
        return self._parts[home_of(group, stored.partitions_of_groups)]

    async def _set_group(self, group: str, what: str, limit: str) -> bool:
        """Change a group where it lies by now."""
        known = self._known_settings()
        while True:
            stored = await known.read()
            number = home_of(group, stored.partitions_of_groups)
            try:
                return await self._partition(number).set_group(stored.epoch, group, what, limit)
            except SettingsChanged:
                await known.after_refusal(number, stored.epoch)

    def _known_settings(self) -> KnownSettings:
        return KnownSettings(self.name, self._partition, self._session.background, lambda _: None)

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        return await self._parts[0].activity(unit, span)

    async def workers(self) -> list[WorkerInfo]:
        return await self._parts[0].workers()

    async def histogram(self, now: int) -> list[int]:
        parts = await self._each(lambda _, store: store.due_counts(_edges(now)))
        return [sum(bars) for bars in zip(*parts, strict=True)]

    async def page(self, state: str, offset: int, limit: int) -> list[Row]:
        # Each partition may have all the messages that come first.
        single = len(self._parts) == 1
        first, count = (offset, limit) if single else (0, offset + limit)

        def order(row: Row) -> tuple[int, int]:
            priority = row.priority if state == "ready" else 0
            return -priority, row.died_us or row.due_us or row.lease_us or 0

        parts = await self._each(lambda number, _: self._rows(number, state, first, count))
        merged = heapq.merge(*parts, key=order)
        return parts[0] if single else [*islice(merged, offset, offset + limit)]

    async def shelves(self, states: Sequence[str]) -> list[Shelf[Row]]:
        """Return the messages in these states, to be searched: one partition after the other."""
        depths = await self._each(lambda _, store: store.depth())
        return [
            Shelf(count_in(depth, state), partial(self._rows, number, state))
            for state in states
            if state in (*self.states, "dead")
            for number, depth in enumerate(depths)
        ]

    async def look_up(self, id: str) -> list[Row]:  # noqa: A002
        """Return the live message and the oldest dead letter with this id."""

        async def there(number: int, store: ReliableStore) -> list[Row]:
            found = await store.get(id)
            rows = [] if found is None else [_live(Place(found.id, number), found)]
            letter = await store.dead_letter(id.encode())
            if letter is not None:
                rows.append(_letter(Place(letter.name, number), letter))
            return rows

        return [row for rows in await self._each(there) for row in rows]

    async def _rows(self, number: int, state: str, offset: int, limit: int) -> list[Row]:
        """Return messages of one partition."""
        store = self._parts[number]
        if state == "dead":
            letters = await store.dead_page(offset, limit)
            return [_letter(Place(letter.name, number), letter) for letter in letters]
        messages = await store.page(state, offset, limit)
        return [_live(Place(found.id, number), found) for found in messages]

    async def find(self, place: Place, *, dead: bool) -> Row | None:
        if not self.has(place):
            return None
        store = self._parts[place.partition]
        if dead:
            letter = await store.dead_letter(place.id)
            return None if letter is None else _letter(place, letter)
        found = await store.get(place.id)
        return None if found is None else _live(place, found, await store.times(found))

    async def look_at(self, places: Sequence[Place]) -> list[Row]:
        """Return those of some messages that are alive."""
        rows: list[Row] = []
        for number, some in self._by_partition(places):
            store, ids = self._parts[number], [place.id for place in some]
            found, ends = await asyncio.gather(store.get_many(ids), store.expiries(ids))
            for place, message, expires_us in zip(some, found, ends, strict=True):
                if message is not None:
                    rows.append(_live(place, message, MessageTimes(None, expires_us)))
        return rows

    async def history(self, row: Row) -> MessageHistory | None:
        """Return what is recorded of a message; None if that is nothing, or its id is no text."""
        assert row.place is not None
        store, name = self._parts[row.place.partition], row.place.id
        if row.state == "dead" and (letter := await store.dead_letter(name)) is not None:
            message = read_dead_letter(letter, BytesCodec()).id
        else:
            message = name.decode(errors="replace")
        live = None if row.state == "dead" else await store.get(name)
        found = history_of(message, await store.outcome(message), live, BytesCodec())
        # The record may be that of another message with the same id.
        is_its_own = (
            found is not None
            and found.offered_at is not None
            and (row.enqueued_us is None or found.offered_at == moment_us(row.enqueued_us))
        )
        return found if is_its_own else None

    async def cancel(self, places: Sequence[Place], *, running: bool = False) -> list[bool]:
        """Remove messages, also those that workers have if ``running``; return which were there."""
        done: dict[Place, bool] = {}
        for number, some in self._by_partition(places):
            ids = [place.id for place in some]
            removed = await self._parts[number].cancel(ids, leased=running)
            done |= zip(some, removed, strict=True)
        return [done[place] for place in places]

    async def reschedule(self, places: Sequence[Place], delay_us: int) -> list[Place | None]:
        """Give messages another delay. Return their places; None for those that are gone."""
        done: dict[Place, Place | None] = {}
        for number, some in self._by_partition(places):
            moved = await self._parts[number].reschedule([place.id for place in some], delay_us)
            done |= {
                place: place if is_there else None
                for place, is_there in zip(some, moved, strict=True)
            }
        return [done[place] for place in places]

    async def reschedule_each(self, moves: Sequence[tuple[Place, int]]) -> list[Place | None]:
        """Give each message a delay of its own, as :meth:`reschedule` does."""

        async def move(one: tuple[Place, int]) -> Place | None:
            place, delay_us = one
            (moved,) = await self._parts[place.partition].reschedule([place.id], delay_us)
            return place if moved else None

        return await in_steps(moves, move)

    async def restore(self, rows: Sequence[Row], now: int) -> int:
        """Offer messages again, with all their attempts, and return how many.

        A message stays away if its id is taken by now, the queue is full, or its payload is larger
        than offers on this client may be.
        """
        queue = self.open()

        async def refused(some: Sequence[Offer[bytes]]) -> int:
            try:
                await queue.offer_many(some)
            except (DuplicateMessage, QueueFull) as error:
                return len(error.ids)
            except PayloadTooLarge:
                return 1 if len(some) == 1 else sum([await refused([each]) for each in some])
            return 0

        offers = [_offer(row, now) for row in rows]
        steps = (offers[at : at + _AT_A_TIME] for at in range(0, len(offers), _AT_A_TIME))
        return len(rows) - sum([await refused(some) for some in steps])

    async def purge(self, state: str) -> int:
        """Drop the messages in one state, or in all, step by step.

        Raises:
            OutcomeUnknown: Some were dropped, or may have been. With any other error, none was.
        """
        dropped = 0
        try:
            for store in await self.every_store():
                is_last = False
                while not is_last:
                    step, is_last = await store.purge(state)
                    dropped += step
        except ServerError as error:
            raise half_way(error, dropped) from error.__cause__
        return dropped

    def open(self) -> ReliableQueue[bytes]:
        """Open the queue, under its name on the server. It stays open as long as the client."""
        queue: ReliableQueue[bytes] = ReliableQueue(
            self.name,
            lambda number: ReliableKeys.of(self.name, partition=number),
            BytesCodec(),
            # A visitor does not wait for a slot.
            Settings(when_full="raise"),
            self._session,
        )
        # The application may have this client, and open the queue with a codec of its own.
        queue.keep_codec()
        return queue

    def _by_partition(self, places: Sequence[Place]) -> list[tuple[int, list[Place]]]:
        """Return places by partition, in steps of the size that a script may have."""
        parts: dict[int, list[Place]] = {}
        for place in places:
            parts.setdefault(place.partition, []).append(place)
        return [
            (number, some[at : at + _AT_A_TIME])
            for number, some in parts.items()
            for at in range(0, len(some), _AT_A_TIME)
        ]

    async def letters(self) -> list[Shelf[tuple[Row, DeadLetter[bytes]]]]:
        """Return the dead letters, to be searched: one partition after the other."""

        async def page(number: int, offset: int, limit: int) -> list[tuple[Row, DeadLetter[bytes]]]:
            stored = await self._parts[number].dead_page(offset, limit)
            return [
                (_letter(Place(each.name, number), each), read_dead_letter(each, BytesCodec()))
                for each in stored
            ]

        counts = await self._each(lambda _, store: store.count_dead())
        return [Shelf(count, partial(page, number)) for number, count in enumerate(counts)]

    async def every_store(self) -> Sequence[ReliableStore]:
        """Return the data of all partitions, also of those that were not found yet."""
        await self._learn()
        return self._parts

    async def redrive(self, places: Sequence[Place] | None) -> int:
        """Redrive dead letters; all of them if None."""
        await self._learn()
        return sum([await redrive_letters(*letters) for letters in self._letters(places)])

    async def purge_dead(self, places: Sequence[Place] | None) -> int:
        """Drop dead letters; all of them if None."""
        await self._learn()
        return sum([await purge_letters(*letters) for letters in self._letters(places)])

    async def pause(self) -> None:
        """Stop all claims."""
        await self._everywhere(ReliableStore.pause)

    async def resume(self) -> None:
        """End a pause."""
        await self._everywhere(ReliableStore.resume)

    # Internals

    async def _learn(self) -> StoredSettings:
        """Add the partitions that were not found yet, and return the settings."""
        stored = await self._parts[0].settings()
        number = max(stored.partitions, *stored.former, 0)
        self._parts += map(self._partition, range(len(self._parts), number))
        return stored

    async def _everywhere(self, act: Callable[[ReliableStore], Awaitable[object]]) -> None:
        """Act on every partition, the first one first: see :mod:`delayq._reliable.settings_writer`.

        Act on all of them again if the queue has got others meanwhile.
        """
        epoch = ""
        while epoch != (epoch := (await self._learn()).epoch):
            if len(self._parts) > 1:
                await act(self._parts[0])
            await self._each(lambda _, store: act(store))

    async def _each(self, of: Callable[[int, ReliableStore], Awaitable[R]]) -> list[R]:
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(
            *(of(*part) for part in enumerate(self._parts)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _letters(
        self, places: Sequence[Place] | None
    ) -> list[tuple[ReliableStore, list[bytes] | None]]:
        if places is None:
            return [(store, None) for store in self._parts]
        chosen: dict[int, list[bytes]] = {}
        for place in places:
            # By name: ids of other programs may not be text, and letters may share an id.
            chosen.setdefault(place.partition, []).append(place.id)
        return [(self._parts[number], names) for number, names in chosen.items()]


AnySource = DelayedSource | ReliableSource


def _edges(now: int) -> list[int]:
    return [now, *(now + horizon for horizon in HORIZONS)]


def _left(moment_us: int | None, now: int) -> int:
    """Return the time until a moment, microseconds; 0 if it has passed."""
    return max(0, (moment_us or 0) - now)


def _offer(row: Row, now: int) -> Offer[bytes]:
    """Return the offer of a message as it was when it was read."""
    assert row.place is not None
    delay_us = _left(row.due_us, now)
    ttl_us = None if row.expires_us is None else max(row.expires_us - now, delay_us + 1)
    return Offer(
        row.payload or b"",
        delay=timedelta(microseconds=delay_us),
        id=row.place.id.decode(),
        headers=row.headers or None,
        priority=row.priority,
        ttl=None if ttl_us is None else timedelta(microseconds=ttl_us),
        max_attempts=row.max_attempts,
        timeout=None if row.timeout_us is None else timedelta(microseconds=row.timeout_us),
        group=row.group or None,
    )


async def in_steps(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Act on all items, on some of them at a time."""
    results: list[R] = []
    for at in range(0, len(items), _AT_ONCE):
        some = [act(item) for item in items[at : at + _AT_ONCE]]
        # Wait for all calls, so that none continues behind the page.
        outcomes = await asyncio.gather(*some, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
    return results


def late_us(depth: QueueDepth, kind: QueueKind) -> int | None:
    """Return how long the oldest due message has been due, in microseconds; 0 if there is none.

    None if that is unknown: Redisson's ready list has no times.
    """
    late = round(depth.oldest_due_age * SECOND)
    return None if kind == "delayed" and depth.ready and not late else late


def count_in(depth: QueueDepth, state: str) -> int:
    """Return the number of messages in one state."""
    count: int = undeliverable(depth) if state == "unreadable" else getattr(depth, state)
    return count


def undeliverable(depth: QueueDepth) -> int:
    """Return the number of dead letters, or of a delayed queue's unreadable records."""
    return depth.dead + (depth.quarantined or 0)


def _record(found: PendingRecord) -> Row:
    place = Place(found.start, 0, found.score.decode(errors="replace"))
    payload = found.payload
    state = "unreadable" if payload is None else "delayed"
    return Row(place, state, found.record if payload is None else payload, found.due_us)


def _live(place: Place, found: StoredMessage, times: MessageTimes | None = None) -> Row:
    parts = _body(found.body)
    leased = found.state == "leased"
    due_us = found.moment_us if not leased else None if times is None else times.due_us
    line, error = unpack_error(found.error or "")
    return Row(
        place,
        found.state,
        parts.payload,
        due_us=due_us,
        lease_us=found.moment_us if leased else None,
        enqueued_us=parts.enqueued_us or None,
        expires_us=None if times is None else times.expires_us,
        priority=found.priority,
        attempt=found.attempt,
        error=error,
        error_line=line,
        group=parts.group or "",
        max_attempts=parts.max_attempts,
        timeout_us=parts.timeout_us,
        headers=_texts(parts.headers),
    )


def _letter(place: Place, stored: StoredLetter) -> Row:
    try:
        why, body = parse_letter(stored.letter)
    except ValueError:
        # A letter that cannot be read must not hide the others.
        return Row(place, "dead", stored.letter, died_us=stored.died_us, reason="unreadable")
    parts = _body(body)
    line, error = unpack_error(str(why.get("error") or ""))
    return Row(
        place,
        "dead",
        parts.payload,
        died_us=stored.died_us,
        enqueued_us=parts.enqueued_us or None,
        priority=_number(why.get("priority")),
        attempt=_number(why.get("attempt")),
        error=error,
        error_line=line,
        reason=str(why.get("reason") or ""),
        group=parts.group or "",
        max_attempts=parts.max_attempts,
        timeout_us=parts.timeout_us,
        headers=_texts(parts.headers),
    )


def _body(body: bytes) -> Body:
    """Return the parts of a body; of one that cannot be read, all of it as the payload."""
    try:
        return parse(body)
    except ValueError:
        return Body(0, {}, body, None, None)


def _texts(headers: dict[str, Any]) -> dict[str, str]:
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in headers.items()
    }


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
