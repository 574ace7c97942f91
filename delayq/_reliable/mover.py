"""Moves a queue to another number of partitions, while no worker handles its messages.

The queue is paused, and its workers finish what they have. Then nothing can be stored any more, and
everything is put *aside*: the keys of each partition are renamed, in one script. From there, each
entry is stored in the partition to which it belongs by the new number, and only then dropped where
it was. So a move that is interrupted at any point loses nothing, and the next one continues it: to
store an entry again changes nothing. At the end, the new number is stored, and the pause ends.

Each process that begins or continues a move gives the settings a higher epoch, first in every
partition. A partition accepts each step only with the epoch that it has, and one that is no longer
used keeps its epoch. So a process that was believed dead changes nothing.

A message becomes visible where it is stored only when all about it is there, because the sets in
which messages wait come last.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from delayq._redis.error_reader import SettingsChanged
from delayq._reliable.bodies import group_in, parse, parse_letter
from delayq._reliable.ids import home_of, partition_of
from delayq._reliable.keys import MESSAGES, PRIORITIES
from delayq._reliable.moved_partition import GROUP_FIELD, MovedPartition
from delayq._reliable.settings import ChangeOutcome
from delayq.errors import ConfigurationError, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from delayq._reliable.moved_partition import Entry, Kind, Letter
    from delayq._reliable.settings import StoredSettings
    from delayq._reliable.store import ReliableStore

T = TypeVar("T")
Phase = Literal["waiting", "moving", "done"]

SAME_ID = "the id was taken in another partition"
"""Why a message dies that is moved to a partition where another one has its id."""

_FACTS = ("tokens", "attempts", "expiries", "errors", "priorities")

# How many entries a call reads, stores or drops; and of those that may be large.
_PAGE, _LARGE_PAGE = 400, 50
# How many partitions are moved side by side, so that a process does not have too many messages
# in memory.
_SOURCES = 8
# Seconds between two looks at the messages that workers still have.
_PAUSE = 0.2
_STAMPED = re.compile(rb"(.*)\0([0-9]{16})", re.DOTALL)
_START = re.compile(rb"\0([0-9.]{19}) ([0-9]+) ([0-9]+) ([0-9]+) [0-9]+")
_MOVING = re.compile(r"(\d+) (drains|closes|moves|resumes) ([01]) (\d+) \S+")


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


class Mover:
    """Moves one queue to another number of partitions, or continues a move."""

    def __init__(
        self,
        name: str,
        store_of: Callable[[int], ReliableStore],
        to: int,
        progress: Callable[[Repartition], object] = lambda _: None,
    ) -> None:
        """Args:
        name: The queue's name.
        store_of: Returns the data of the partition with that number.
        to: The new number of partitions.
        progress: Called with each step.
        """
        self._store_of = store_of
        self._first = store_of(0)
        self._to = to
        self._token = secrets.token_hex(8)
        self._progress = progress
        self._state = Repartition(name, to)
        # As many as there were, or as there will be, whichever is more.
        self._partitions: Sequence[MovedPartition] = ()
        self._former = 0
        self._was_paused = False
        # Whether offers are refused: then the move can no longer be given up.
        self._is_closed = False

    async def run(self) -> Repartition:
        """Go on from wherever the move is.

        Raises:
            ConfigurationError: The queue is being moved to another number of partitions, its limit
                is smaller than the number, another release has written it, or it has batches that
                have not ended, or of which dead letters would lie in other partitions.
            ServerUnavailable: Another process changes the number of partitions, or has taken the
                move over.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        phases: dict[str, Callable[[StoredSettings], Awaitable[StoredSettings]]] = {
            "drains": self._drain,
            "closes": self._set_aside,
            "moves": self._move,
            "resumes": self._resume,
        }
        # A beginning that is cancelled may still be carried out, and has to be given up then.
        beginning = asyncio.ensure_future(self._begin())
        try:
            stored = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(beginning))
            raise
        try:
            while (move := self._read(stored)) is not None:
                stored = await phases[move[2]](stored)
        except SettingsChanged:
            raise self._taken_over() from None
        except (asyncio.CancelledError, ConfigurationError):
            await asyncio.shield(self._give_up(beginning))
            raise
        except ServerError as error:
            given_up = False
            with suppress(ServerError):
                given_up = await self._give_up(beginning)
            if given_up:
                raise
            raise type(error)(self._how_to_go_on(error)) from error
        self._report(phase="done", running=0)
        return self._state

    def _read(self, stored: StoredSettings) -> re.Match[str] | None:
        """Return how far the move is, if there is one."""
        move = _MOVING.fullmatch(stored.fields.get("moving", ""))
        self._is_closed = self._is_closed or (move is not None and move[2] != "drains")
        if move is not None and not self._partitions:
            self._was_paused, self._former = move[3] == "1", int(move[4])
            self._partitions = [
                MovedPartition(self._store_of(number), number)
                for number in range(max(self._former, self._to))
            ]
        return move

    @property
    def _sources(self) -> Sequence[MovedPartition]:
        return self._partitions[: self._former]

    # The phases

    async def _begin(self) -> StoredSettings:
        queue = self._state.queue
        outcome, stored = await self._first.repartition("begin", self._token, self._to)
        stored.check_layout(queue)
        if outcome is ChangeOutcome.OTHER_NUMBER:
            move = _MOVING.fullmatch(stored.fields["moving"])
            if move is not None and move[2] == "drains" and int(move[4]) == self._to:
                await Mover(queue, self._store_of, int(move[1])).give_up()
                return await self._begin()
            raise ConfigurationError(
                f"queue {queue!r} is being moved to {stored.moving_to} partitions; continue that"
                f" first, with: {_command(queue, stored.moving_to)}"
            )
        if outcome is ChangeOutcome.TOO_SMALL:
            fields = {**stored.fields, "partitions": str(self._to)}
            type(stored)(fields).check_shares(queue)
        if outcome is ChangeOutcome.BUSY:
            raise ServerUnavailable(
                f"nothing was changed: another client changes the partitions of {queue!r}"
            )
        return stored

    async def _take(self, stored: StoredSettings, partitions: Sequence[MovedPartition]) -> None:
        """Let partitions refuse whoever has moved the queue before."""
        await _gather(partition.take(stored) for partition in partitions)

    async def _drain(self, stored: StoredSettings) -> StoredSettings:
        """Pause the queue, and wait until workers have finished what they have."""
        await self._take(stored, self._sources)
        # Before the queue is paused, because there may be many.
        await self._check_letters()
        while running := await self._count_running():
            await self._check_batches()
            self._report(running=running)
            await asyncio.sleep(_PAUSE)
        await self._check_batches()
        # The last attempts may have failed.
        await self._check_letters()
        self._is_closed = True
        return await self._step("close")

    async def _check_batches(self) -> None:
        """Check that no batch has messages that are still to come, while none can begin.

        The states of its messages lie in its partition. Moved by their ids, the messages would not.
        """
        messages = await _gather(source.message_of_batch() for source in self._sources)
        if message := next(filter(None, messages), None):
            queue = shlex.quote(self._state.queue)
            raise ConfigurationError(
                f"queue {self._state.queue!r} has batches that have not ended, and cannot be moved"
                f" before: message {message[0]!r} of batch {message[1]!r}, or that follows from it,"
                " still waits or runs; wait for them, or cancel them; list them with: delayq batch"
                f" {queue}"
            )

    async def _check_letters(self) -> None:
        """Check that no batch has dead letters that would be parted from it: those without a group
        go with their batch, but the others with their groups.
        """
        letters = await _gather(source.letter_to_part(self._to) for source in self._sources)
        if letter := next(filter(None, letters), None):
            queue = shlex.quote(self._state.queue)
            raise ConfigurationError(
                f"queue {self._state.queue!r} has dead letters of groups that belong to batches,"
                f" such as {letter[0]!r} of batch {letter[1]!r}, and cannot be moved to"
                f" {self._to} partitions before: their groups would lie in others than the batches,"
                " which a redrive would not reach; redrive or purge them first: delayq dead redrive"
                f" {queue} {shlex.quote(letter[0])}"
            )

    async def _count_running(self) -> int:
        """Return how many messages workers have, while they get no more."""
        # Each time, because an operator may end the pause.
        await _gather(source.pause() for source in self._sources)
        return sum(await _gather(source.count_running() for source in self._sources))

    async def _give_up(self, beginning: Awaitable[StoredSettings]) -> bool:
        """End a move that has not got beyond the first phase, and return whether there is none."""
        try:
            stored = await beginning
            if self._read(stored) is None:
                return True
            if self._is_closed:
                return False
            await self._take(await self._step("undo"), self._sources)
            # In this order: what is interrupted here can be continued, or given up again.
            step: Literal["stay", "resume"] = "stay" if self._was_paused else "resume"
            await _gather(source.end_pause(step) for source in self._sources)
            await self._first.repartition("give up", self._token, self._to)
        except (SettingsChanged, ConfigurationError):
            # Another process has continued the move, or moves the queue to another number.
            return True
        return True

    async def give_up(self) -> None:
        """End a move that was interrupted before anything was moved."""
        await self._give_up(self._begin())

    async def _set_aside(self, stored: StoredSettings) -> StoredSettings:
        """Put everything aside that was placed by the former number of partitions."""
        await self._take(stored, self._sources)
        number = stored.fields["partitions"]
        # A lease that had ended may have been extended.
        while running := sum(await _gather(source.set_aside(number) for source in self._sources)):
            self._report(running=running)
            await asyncio.sleep(_PAUSE)
            await self._count_running()
        return await self._step("move")

    async def _move(self, stored: StoredSettings) -> StoredSettings:
        """Move everything to where it belongs by the new number."""
        await self._take(stored, self._partitions)
        await _gather(partition.pause() for partition in self._partitions)
        if not await self._is_aside():
            return await self._step("close")
        counts = await _gather(source.count() for source in self._sources)
        self._report(phase="moving", running=0, messages=sum(counts))
        await self._move_starts_of_queue()
        at_once = asyncio.Semaphore(_SOURCES)
        await _gather(_Source(source, self).move(at_once) for source in self._sources)
        for source in self._sources[self._to :]:
            if await source.is_in_use():
                await source.drop_everything()
        return await self._step("resume" if await self._is_aside() else "close")

    async def _is_aside(self) -> bool:
        """Return whether no server has lost that its partition was put aside."""
        return all(await _gather(source.is_aside() for source in self._sources))

    async def _resume(self, stored: StoredSettings) -> StoredSettings:
        """Give the partitions their settings, and end the pause."""
        await self._take(stored, self._partitions)
        await _gather(source.drop_everything() for source in self._sources)
        step: Literal["stay", "resume"] = "stay" if self._was_paused else "resume"
        await _gather(
            partition.end_pause("retire" if partition.number >= self._to else step)
            for partition in self._partitions
        )
        return await self._step("end")

    async def _step(
        self, step: Literal["close", "move", "resume", "end", "undo"]
    ) -> StoredSettings:
        outcome, stored = await self._first.repartition(step, self._token, self._to)
        if outcome is ChangeOutcome.LOST:
            # If only the first reply to the last step was lost, the move has ended.
            if step == "end" and stored.moving_to is None:
                return stored
            raise SettingsChanged("another process has taken the move over, or it has ended")
        return stored

    def _taken_over(self) -> ServerUnavailable:
        """Return the error for a process that may not go on."""
        return ServerUnavailable(
            f"another process has taken over the move of queue {self._state.queue!r}"
        )

    def _how_to_go_on(self, error: ServerError) -> str:
        """Return what to do after an error, in one line."""
        queue = self._state.queue
        text = (
            f"the move of queue {queue!r} to {self._to} partitions was interrupted, and the queue"
            f" stays paused; continue with: {_command(queue, self._to)}"
        )
        if not self._is_closed:
            text += f"; or give it up with: {_command(queue, self._former)}"
        return f"{text}; the error was: {error}"

    # Moving

    def count(self, messages: int) -> None:
        """Report that so many more messages were moved."""
        self._report(moved=self._state.moved + messages)

    async def send(
        self,
        name: str,
        kind: Kind,
        entries: Iterable[tuple[int | None, Entry]],
        lives_ms: int = 0,
    ) -> set[bytes]:
        """Store entries under the key of this name, each in a partition, or in all.

        Returns:
            The fields that were not stored, because they have other values.
        """
        by_target: dict[int, list[Entry]] = defaultdict(list)
        for place, entry in entries:
            for number in range(self._to) if place is None else (place,):
                by_target[number].append(entry)
        refused_fields = await _gather(
            self._partitions[number].receive(name, kind, part, lives_ms)
            for number, part in by_target.items()
        )
        return {*chain.from_iterable(refused_fields)}

    async def send_letters(self, letters: Iterable[tuple[int, Letter]]) -> None:
        """Store dead letters, each in a partition."""
        by_target: dict[int, list[Letter]] = defaultdict(list)
        for place, letter in letters:
            by_target[place].append(letter)
        await _gather(
            self._partitions[number].receive_letters(part) for number, part in by_target.items()
        )

    def of_id(self, name: bytes) -> int:
        """Return the partition of the message with an id, unless it has a group."""
        stamped = _STAMPED.fullmatch(name)
        return partition_of(name if stamped is None else stamped[1], self._to)

    def of_name(self, name: bytes) -> int:
        """Return the partition of a schedule or group."""
        return home_of(name, self._to)

    async def _move_starts_of_queue(self) -> None:
        """Let every partition know of all starts that the queue's rate counts.

        Each has a part of the rate, and then starts nothing until fewer than that still count. So
        no window has too many, whatever the former parts were. They are not dropped before
        everything is moved: whoever continues the move has to number them in the same way.
        """
        merged = set().union(*await _gather(source.starts() for source in self._sources))
        lives_ms = max(await _gather(source.lives_ms("rate_log") for source in self._sources))
        count, entries = 0, []
        for start in filter(None, map(_START.fullmatch, sorted(merged))):
            size = int(start[4]) - int(start[3])
            member = b"\0%b %b %d %d 0" % (start[1], start[2], count, count + size)
            entries.append((None, (member, b"0")))
            count += size
        for at in range(0, len(entries), _PAGE):
            await self.send("rate_log", "scores", entries[at : at + _PAGE], lives_ms)

    def _report(self, **changes: int | Phase) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._progress(self._state)


class _Source:
    """The data of one partition that was set aside."""

    def __init__(self, partition: MovedPartition, move: Mover) -> None:
        self._partition = partition
        self._move = move

    async def move(self, at_once: asyncio.Semaphore) -> None:
        """Move everything, as soon as ``at_once`` allows it."""
        async with at_once:
            await self._move_all()

    async def _move_all(self) -> None:
        move = self._move
        await self._move_group_settings()
        if not await self._partition.has_anything():
            return
        # First, because a message whose id is taken is not moved any further.
        await self._move_bodies()
        # Nothing of this makes a message visible, and all of it is there before anything that does.
        await _gather(
            (
                *(self._fields(name, self._of_messages) for name in _FACTS),
                self._fields("records", self._of_messages, large=True),
                self._fields("checkpoints", self._of_messages, large=True),
                # They stay here as well, because they tell where the message belongs.
                self._fields(
                    "positions",
                    _by_content(lambda entry: move.of_name(_group_of(entry[1]))),
                    drop=False,
                ),
                self._members("group_members", self._of_groups),
                self._members("rate_log", self._of_groups, self._partition.starts_of_groups),
                self._members("record_times", self._of_messages),
                self._members("awaited", self._of_messages),
                self._fields("batches", self._of_batches, large=True),
                self._members("batch_members", self._of_batches),
                # Those of groups are looked for in the partition of the group, which is not known
                # here.
                self._members("remembered", _by_content(lambda _: None)),
                self._members("shared_moments", _by_content(lambda _: None)),
                self._move_letters(),
            )
        )
        await _gather(
            self._members(name, self._of_messages)
            for name in (
                "kept_slots",
                "expiry_index",
                "leased",
                "group_waiting",
                *MESSAGES[:PRIORITIES],
            )
        )
        await _gather(
            (
                *(
                    self._members(name, self._of_groups)
                    for name in ("group_turns", "suspect_turns")
                ),
                self._fields(
                    "schedules",
                    _by_content(lambda entry: move.of_name(entry[0]) if entry[0] else None),
                ),
            )
        )

    async def _of_batches(self, entries: Sequence[Entry]) -> list[int | None]:
        """Return the partitions of batches that have ended, by what begins with their ids, or has
        them behind a moment.
        """
        names = [name.split(b"\0") for name, _ in entries]
        return [self._move.of_name(parts[0] or parts[-1]) for parts in names]

    async def _of_groups(self, entries: Sequence[Entry]) -> list[int | None]:
        """Return the partitions of groups, by members that are, or begin with, their names."""
        return [self._move.of_name(_group_of(name)) for name, _ in entries]

    async def _of_messages(self, entries: Sequence[Entry]) -> list[int | None]:
        """Return the partitions of messages, by their ids."""
        ids = [name for name, _ in entries]
        places = await self._partition.values("positions", ids)
        return [
            self._move.of_id(name) if place is None else self._move.of_name(_group_of(place))
            for name, place in zip(ids, places, strict=True)
        ]

    async def _members(
        self,
        name: str,
        places: Callable[[Sequence[Entry]], Awaitable[list[int | None]]],
        read: Callable[[int], Awaitable[list[Entry]]] | None = None,
    ) -> None:
        """Move a sorted set, or the part of it that ``read`` returns."""
        read = read or partial(self._partition.members, name)
        while entries := await read(_PAGE):
            await self._send(name, "scores", entries, await places(entries))
            await self._partition.drop_members(name, (member for member, _ in entries))

    async def _fields(
        self,
        name: str,
        places: Callable[[Sequence[Entry]], Awaitable[list[int | None]]],
        *,
        large: bool = False,
        drop: bool = True,
    ) -> None:
        """Move a hash."""
        async for entries in self._partition.fields(name, _LARGE_PAGE if large else _PAGE):
            await self._send(name, "fields", entries, await places(entries))
            if drop:
                await self._partition.drop_fields(name, (field for field, _ in entries))

    async def _move_bodies(self) -> None:
        async for entries in self._partition.fields("bodies", _LARGE_PAGE):
            bodies = [(self._of_body(name, body), (name, body)) for name, body in entries]
            if taken_ids := await self._move.send("bodies", "new fields", bodies):
                await self._bury([body for body in bodies if body[1][0] in taken_ids])
            await self._partition.drop_fields("bodies", (name for name, _ in entries))
            self._move.count(len(entries))

    async def _bury(self, bodies: Sequence[tuple[int, Entry]]) -> None:
        """Make messages dead letters, because others of the same ids were in other partitions."""
        partition, ids = self._partition, [name for _, (name, _) in bodies]
        facts = ("attempts", "priorities", "errors", "checkpoints", "positions")
        values = [await partition.values(name, ids) for name in facts]
        died = b"%d" % await partition.time_us()
        letters = []
        facts_of = zip(bodies, *values[:4], strict=True)
        for (place, (name, body)), attempt, priority, error, checkpoint in facts_of:
            reason: dict[str, str | int] = {
                "reason": SAME_ID,
                "attempt": _number(attempt),
                "priority": _number(priority),
                "error": (error or b"").decode(errors="replace"),
            }
            if checkpoint:
                reason["checkpoint"] = len(checkpoint)
            line = json.dumps(reason, separators=(",", ":")).encode()
            letters.append((place, (name, died, line + b"\n" + (checkpoint or b"") + body)))
        await self._move.send_letters(letters)
        lines = [place + name for place, name in zip(values[4], ids, strict=True) if place]
        if lines:
            await partition.drop_members("group_members", lines)
        sets = ("expiry_index", "leased", "group_waiting", *MESSAGES[:PRIORITIES])
        await _gather(partition.drop_members(name, ids) for name in sets)
        await _gather(
            partition.drop_fields(name, ids) for name in (*_FACTS, "checkpoints", "positions")
        )

    async def _move_letters(self) -> None:
        while deaths := await self._partition.members("dead", _LARGE_PAGE):
            names = [name for name, _ in deaths]
            letters = await self._partition.values("dead_messages", names)
            await self._move.send_letters(
                (self._of_letter(name, letter), (name, died, letter or b""))
                for (name, died), letter in zip(deaths, letters, strict=True)
            )
            await self._partition.drop_members("dead", names)
            await self._partition.drop_fields("dead_messages", names)

    def _of_body(self, name: bytes, body: bytes) -> int:
        group = group_in(body.lstrip(b"0123456789+e"))
        return self._move.of_id(name) if group is None else self._move.of_name(group.encode())

    def _of_letter(self, name: bytes, letter: bytes | None) -> int:
        with suppress(ValueError):
            body = parse_letter(letter or b"")[1]
            parts = parse(body)
            # Its batch counts it again if it is redriven.
            if parts.group is None and parts.batch is not None:
                return self._move.of_name(parts.batch.encode())
            return self._of_body(name, body)
        return self._move.of_id(name)

    async def _move_group_settings(self) -> None:
        """Move the settings that groups have of their own."""
        async for entries in self._partition.group_settings(_PAGE):
            elsewhere = [
                (place, entry)
                for entry in entries
                if (place := self._move.of_name(entry[0].removeprefix(GROUP_FIELD)))
                != self._partition.number
            ]
            if elsewhere:
                await self._move.send("settings", "fields", elsewhere)
                await self._partition.drop_group_settings(field for _, (field, _) in elsewhere)

    async def _send(
        self,
        name: str,
        kind: Literal["scores", "fields"],
        entries: Sequence[Entry],
        places: Sequence[int | None],
    ) -> None:
        lives_ms = await self._partition.lives_ms(name)
        await self._move.send(name, kind, zip(places, entries, strict=True), lives_ms)


async def _gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Make calls side by side and return their results. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _number(text: bytes | None) -> int:
    """Return the number with which a fact begins; 0 if there is none."""
    digits = re.match(rb"[0-9]{1,9}", text or b"")
    return int(digits[0]) if digits else 0


def _command(queue: str, partitions: int | None) -> str:
    return f"delayq repartition {shlex.quote(queue)} --to {partitions}"


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
