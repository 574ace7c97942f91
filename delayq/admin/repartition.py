"""Moves a reliable queue to another number of partitions, while no worker handles its messages.

The queue is paused, and its workers finish what they have. Then nothing can be stored any more, and
everything is put *aside*: the keys of each partition are renamed, in one script. From there, each
entry is stored in the partition to which it belongs by the new number, and only then dropped where
it was. So a move that is interrupted at any point loses nothing, and the next one continues it: to
store an entry again changes nothing. At the end, the new number is stored, and the pause ends.

Each process that begins or continues a move writes a token into the settings of the partitions.
They accept entries only with that token, and no partition is paused for a move that has ended: so a
process that was believed dead does no harm.

A message becomes visible where it is stored only when all about it is there, because the sets in
which messages wait come last.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from delayq._redis.error_reader import SettingsChanged
from delayq._reliable.bodies import group_in, parse_letter
from delayq._reliable.keys import MESSAGES, PRIORITIES, ReliableKeys, check_partitions
from delayq._reliable.placement import home_of, partition_of
from delayq._reliable.settings import ChangeOutcome
from delayq._reliable.store import GROUP_FIELD, AsideStore, ReliableStore
from delayq.errors import ConfigurationError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from delayq._reliable.settings import StoredSettings
    from delayq._reliable.store import Entry
    from delayq.client import Client

Phase = Literal["waiting", "moving", "done"]

ASIDE = (
    *MESSAGES,
    *("done", "shared_moments", "dead", "dead_messages", "schedules"),
    *("recorded", "records", "awaited", "stopping"),
)
"""The keys of a partition whose content was placed by the number of partitions."""
# Keys that the server drops when nothing in them counts any more.
_EXPIRING = ("done", "shared_moments", "recorded", "records", "awaited")
# How many entries a call reads, stores or drops; and of those that may be large.
_PAGE, _LARGE_PAGE = 400, 50
# Seconds between two looks at the messages that workers still have.
_PAUSE = 0.2
_STAMPED = re.compile(rb"(.*)\0([0-9]{16})", re.DOTALL)
_START = re.compile(rb"\0([0-9.]{19}) ([0-9]+) ([0-9]+) ([0-9]+) [0-9]+")
_MOVING = re.compile(r"(\d+) (drains|holds|moves|resumes) ([01]) (\d+) \S+")


@dataclass(frozen=True, slots=True)
class Repartition:
    """How far a move has come.

    Attributes:
        queue: The queue's name.
        partitions: The number of partitions to which it is moved.
        phase: ``"waiting"`` for workers, ``"moving"`` or ``"done"``.
        running: The number of messages that workers still have.
        moved: The number of messages that were moved so far by this process.
        messages: The number of those that had to be moved when it began.
    """

    queue: str
    partitions: int
    phase: Phase = "waiting"
    running: int = 0
    moved: int = 0
    messages: int = 0


async def repartition(
    client: Client,
    name: str,
    partitions: int,
    *,
    progress: Callable[[Repartition], None] = lambda _: None,
) -> Repartition:
    """Move a queue to another number of partitions, or continue a move that was interrupted.

    Due times, order, ids, groups and their limits, schedules, dead letters, remembered ids and
    results are kept. The queue is paused meanwhile, and offers fail after some seconds without
    having stored anything. While workers still have messages, cancelling ends the move, and nothing
    has changed; later, another call has to continue it.

    Args:
        client: A client whose user may use all keys of the queue.
        name: The queue's name.
        partitions: The new number of partitions.
        progress: Called with each step.

    Raises:
        BadInput: The number of partitions is invalid.
        ConfigurationError: The queue is being moved to another number of partitions, its limit is
            smaller than the number, or another release has written it.
        ServerUnavailable: Another process changes the number of partitions, or has taken the move
            over.
        ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
    """
    check_partitions(partitions)
    move = _Move(client, name, partitions, progress)
    try:
        return await move.run()
    except SettingsChanged:
        raise move.lost() from None


class _Move:
    def __init__(
        self, client: Client, name: str, to: int, progress: Callable[[Repartition], None]
    ) -> None:
        self._store_of = partial(_store, client, name)
        self._first = self._store_of(0)
        self._to = to
        self._token = secrets.token_hex(8)
        self._progress = progress
        self._state = Repartition(name, to)
        self._sources: Sequence[ReliableStore] = ()
        self._targets = [self._store_of(number) for number in range(to)]
        self._was_paused = False

    def lost(self) -> ServerUnavailable:
        """Return the error for a process that may not go on."""
        return ServerUnavailable(
            f"another process has taken over the move of queue {self._state.queue!r}"
        )

    async def run(self) -> Repartition:
        """Go on from wherever the move is."""
        stored = await self._begin()
        while (move := _MOVING.fullmatch(stored.fields.get("moving", ""))) is not None:
            self._was_paused = move[3] == "1"
            self._sources = [self._store_of(number) for number in range(int(move[4]))]
            phases: dict[str, Callable[[StoredSettings], Awaitable[StoredSettings]]] = {
                "drains": self._drain,
                "holds": self._set_aside,
                "moves": self._move,
                "resumes": self._resume,
            }
            stored = await phases[move[2]](stored)
        self._report(phase="done", running=0)
        return self._state

    # The phases

    async def _begin(self) -> StoredSettings:
        queue = self._state.queue
        outcome, stored = await self._first.repartition("begin", self._token, self._to)
        stored.check_layout(queue)
        if outcome is ChangeOutcome.OTHER_NUMBER:
            raise ConfigurationError(
                f"queue {queue!r} is being moved to {stored.moving_to} partitions; continue that"
                f" first, with: delayq repartition {shlex.quote(queue)} --to {stored.moving_to}"
            )
        if outcome is ChangeOutcome.TOO_SMALL:
            fields = {**stored.fields, "partitions": str(self._to)}
            type(stored)(fields).check_shares(queue)
        if outcome is ChangeOutcome.BUSY:
            raise ServerUnavailable(
                f"nothing was changed: another client changes the partitions of {queue!r}"
            )
        return stored

    async def _drain(self, stored: StoredSettings) -> StoredSettings:
        """Pause the queue, and wait until workers have finished what they have."""
        try:
            while running := await self._count_running(stored):
                self._report(running=running)
                await asyncio.sleep(_PAUSE)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up())
            raise
        return await self._step("hold")

    async def _count_running(self, stored: StoredSettings) -> int:
        """Return how many messages workers have, while they get no more."""
        # Each time, because an operator may end the pause.
        for number in range(max(len(self._sources), self._to)):
            await self._store_of(number).hold_back(stored)
        return sum([await store.count_running() for store in self._sources])

    async def _give_up(self) -> None:
        # In this order: what is interrupted here can be continued, or given up again.
        if not self._was_paused:
            await self._end_pause(max(len(self._sources), self._to))
        await self._first.repartition("give up", self._token, self._to)

    async def _set_aside(self, stored: StoredSettings) -> StoredSettings:
        """Put everything aside that was placed by the former number of partitions."""
        for number, store in enumerate(self._sources):
            # The settings of the first partition are those of the queue.
            names = (*ASIDE, "settings") if number else ASIDE
            # A lease that had ended may have been extended.
            while running := await store.set_aside(names):
                self._report(running=running)
                await asyncio.sleep(_PAUSE)
                await self._count_running(stored)
        return await self._step("move")

    async def _move(self, stored: StoredSettings) -> StoredSettings:
        """Move everything to where it belongs by the new number."""
        await self._prepare(stored)
        aside = [AsideStore(store.client, store.keys) for store in self._sources]
        counts = [await source.count() for source in aside]
        self._report(phase="moving", running=0, messages=sum(counts))
        await self._move_starts_of_queue(aside)
        for number, source in enumerate(aside):
            await _Source(source, self, is_first=number == 0).move()
        return await self._step("resume")

    async def _prepare(self, stored: StoredSettings) -> None:
        """Let the partitions accept what comes from this process, by the settings to come."""
        fields = {**stored.fields, "partitions": str(self._to)}
        for number, store in enumerate(self._targets):
            if number:
                await store.copy_settings(type(stored)(fields), number)
            await store.hold_back(stored, self._token)

    async def _resume(self, stored: StoredSettings) -> StoredSettings:
        """Give the partitions their settings, and end the pause."""
        for number, store in enumerate(self._targets):
            if number:
                await store.copy_settings(stored, number)
            await store.accept_no_more()
        for store in map(self._store_of, range(self._to, len(self._sources))):
            await store.drop_settings()
        if not self._was_paused:
            await self._end_pause(self._to)
        return await self._step("end")

    async def _end_pause(self, partitions: int) -> None:
        for number in range(partitions):
            await self._store_of(number).resume()

    async def _step(self, step: Literal["hold", "move", "resume", "end"]) -> StoredSettings:
        outcome, stored = await self._first.repartition(step, self._token, self._to)
        if outcome is ChangeOutcome.LOST:
            # If only the first answer to the last step was lost, the move has ended.
            if step == "end" and stored.moving_to is None:
                return stored
            raise self.lost()
        return stored

    # Moving

    def count(self, messages: int) -> None:
        """Report that so many more messages were moved."""
        self._report(moved=self._state.moved + messages)

    async def send(
        self,
        name: str,
        kind: Literal["scores", "fields", "stamps"],
        entries: Iterable[tuple[int | None, Entry]],
    ) -> None:
        """Store entries under the key of this name, each in a partition, or in all."""
        by_target: dict[int, list[Entry]] = defaultdict(list)
        for place, entry in entries:
            for number in range(self._to) if place is None else (place,):
                by_target[number].append(entry)
        await asyncio.gather(
            *(
                self._targets[number].receive(self._token, name, kind, some)
                for number, some in by_target.items()
            )
        )

    async def keep_for(self, name: str, remaining_ms: int) -> None:
        """Let the keys of this name live for at least so many milliseconds."""
        if remaining_ms > 0:
            for store in self._targets:
                await store.keep_for(name, remaining_ms)

    def of_id(self, name: bytes) -> int:
        """Return the partition of the message with an id, unless it has a group."""
        stamped = _STAMPED.fullmatch(name)
        return partition_of(name if stamped is None else stamped[1], self._to)

    def of_name(self, name: bytes) -> int:
        """Return the partition of a schedule or group."""
        return home_of(name, self._to)

    async def _move_starts_of_queue(self, aside: Sequence[AsideStore]) -> None:
        """Let every partition know of all starts that the queue's rate counts.

        Each has a part of the rate, and then starts nothing until fewer than that still count. So
        no window has too many, whatever the former parts were.
        """
        merged: dict[bytes, bytes] = {}
        for source in aside:
            merged |= dict.fromkeys(await source.starts(), b"0")
        count, entries = 0, []
        for start in filter(None, map(_START.fullmatch, sorted(merged))):
            more = int(start[4]) - int(start[3])
            member = b"\0%b %b %d %d 0" % (start[1], start[2], count, count + more)
            entries.append((None, (member, b"0")))
            count += more
        for at in range(0, len(entries), _PAGE):
            await self.send("starts", "scores", entries[at : at + _PAGE])
        for source in aside:
            await source.drop_starts()

    def _report(self, **changes: int | Phase) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._progress(self._state)


class _Source:
    """What was set aside in one partition."""

    def __init__(self, aside: AsideStore, move: _Move, *, is_first: bool) -> None:
        self._aside = aside
        self._move = move
        self._is_first = is_first

    async def move(self) -> None:
        """Move everything."""
        move = self._move
        await self._move_group_settings()
        for name in ("tokens", "attempts", "expiries", "errors", "priorities"):
            await self._fields(name, self._of_messages)
        await self._fields("bodies", self._of_messages, large=True)
        # They stay here as well, because they tell where the message belongs.
        await self._fields(
            "places", _by_content(lambda entry: move.of_name(_group_of(entry[1]))), drop=False
        )
        await self._members("lines", _by_content(lambda entry: move.of_name(_group_of(entry[0]))))
        await self._members("starts", _by_content(lambda entry: move.of_name(_group_of(entry[0]))))
        await self._fields("records", self._of_messages, large=True)
        await self._members("recorded", self._of_messages)
        await self._members("awaited", self._of_messages)
        # Those of groups are looked for in the partition of the group, which is not known here.
        await self._members("done", _by_content(lambda _: None))
        await self._members("shared_moments", _by_content(lambda _: None))
        await self._move_letters()
        for name in ("stopping", "expiring", "leased", "grouped", *MESSAGES[:PRIORITIES]):
            await self._members(name, self._of_messages)
        for name in ("turns", "trials"):
            await self._members(name, _by_content(lambda entry: move.of_name(entry[0])))
        await self._fields(
            "schedules", _by_content(lambda entry: move.of_name(entry[0]) if entry[0] else None)
        )
        await self._aside.drop((*ASIDE, "settings"))

    async def _of_messages(self, entries: Sequence[Entry]) -> list[int | None]:
        """Return the partitions of messages, by their ids."""
        ids = [name for name, _ in entries]
        places = await self._aside.values("places", ids)
        return [
            self._move.of_id(name) if place is None else self._move.of_name(_group_of(place))
            for name, place in zip(ids, places, strict=True)
        ]

    async def _members(
        self,
        name: str,
        places: Callable[[Sequence[Entry]], Awaitable[list[int | None]]],
    ) -> None:
        """Move a sorted set."""
        while entries := await self._aside.members(name, _PAGE):
            await self._send(name, "scores", entries, await places(entries))
            await self._aside.drop_members(name, (member for member, _ in entries))

    async def _fields(
        self,
        name: str,
        places: Callable[[Sequence[Entry]], Awaitable[list[int | None]]],
        *,
        large: bool = False,
        drop: bool = True,
    ) -> None:
        """Move a hash."""
        async for entries in self._aside.fields(name, _LARGE_PAGE if large else _PAGE):
            await self._send(name, "fields", entries, await places(entries))
            if drop:
                await self._aside.drop_fields(name, (field for field, _ in entries))
            if name == "bodies":
                self._move.count(len(entries))

    async def _move_letters(self) -> None:
        """Move the dead letters. They become visible when all about them is there."""
        while deaths := await self._aside.members("dead", _LARGE_PAGE):
            names = [name for name, _ in deaths]
            letters = await self._aside.values("dead_messages", names)
            places = [
                self._of_letter(name, letter) for name, letter in zip(names, letters, strict=True)
            ]
            bodies = [(name, letter or b"") for name, letter in zip(names, letters, strict=True)]
            stamps = [
                (place, (stamped[1] + b"\0", stamped[2]))
                for place, name in zip(places, names, strict=True)
                if (stamped := _STAMPED.fullmatch(name)) is not None
            ]
            await self._send("dead_messages", "fields", bodies, places)
            await self._move.send("dead_messages", "stamps", stamps)
            await self._send("dead", "scores", deaths, places)
            await self._aside.drop_members("dead", names)
            await self._aside.drop_fields("dead_messages", names)

    def _of_letter(self, name: bytes, letter: bytes | None) -> int:
        with suppress(ValueError):
            group = group_in(parse_letter(letter or b"")[1].lstrip(b"0123456789+e"))
            if group is not None:
                return self._move.of_name(group.encode())
        return self._move.of_id(name)

    async def _move_group_settings(self) -> None:
        """Move the settings that groups have of their own."""
        async for entries in self._aside.group_settings(first=self._is_first, limit=_PAGE):
            places = [self._move.of_name(field.removeprefix(GROUP_FIELD)) for field, _ in entries]
            await self._send("settings", "fields", entries, places)
            elsewhere = [
                field for (field, _), place in zip(entries, places, strict=True) if place > 0
            ]
            # The others are dropped with everything else.
            if self._is_first and elsewhere:
                await self._aside.drop_group_settings(elsewhere)

    async def _send(
        self,
        name: str,
        kind: Literal["scores", "fields"],
        entries: Sequence[Entry],
        places: Sequence[int | None],
    ) -> None:
        await self._move.send(name, kind, zip(places, entries, strict=True))
        if name in _EXPIRING:
            await self._move.keep_for(name, await self._aside.remaining_ms(name))


def _store(client: Client, name: str, number: int) -> ReliableStore:
    keys = ReliableKeys.of(name, client._name_mapper, number)  # noqa: SLF001 - one library
    return ReliableStore(client._open_session().server, keys)  # noqa: SLF001 - one library


def _by_content(
    place_of: Callable[[Entry], int | None],
) -> Callable[[Sequence[Entry]], Awaitable[list[int | None]]]:
    """Return a function that finds the partitions of entries by what they contain."""

    async def places(entries: Sequence[Entry]) -> list[int | None]:
        return [place_of(entry) for entry in entries]

    return places


def _group_of(place: bytes) -> bytes:
    """Return the group of a place, or of a member that begins with its name and a NUL."""
    return place.partition(b"\0")[0]
