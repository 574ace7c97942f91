"""Brings the records of a delayed queue into the form that Redisson 3.21.1 and later reads.

delayq reads every form, so it needs no migration. A newer Redisson does: it fails on the first older record that comes due,
and delivers what stands before it again and again. ``delayq migrate`` is this from the command line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from delayq._redis.keys import DelayedKeys
from delayq._redis.records import payload_of
from delayq._redis.scripts import MIGRATE
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

    from delayq._redis.server import Server
    from delayq.client import Client

T = TypeVar("T")

FORMS = ("current, 8-byte length", "current, 4-byte length", "old, 8-byte length", "old, 4-byte length", "malformed")
"""What a record may look like. Old is what Redisson wrote before 3.21.1; lengths have 4 bytes on 32-bit and Windows servers."""

MAX_BATCH = 1000
"""Records that one step may look at."""

# By the bytes before the payload, as in the script.
_FORM_OF_HEADER: dict[int, str] = dict(zip((17, 13, 16, 12), FORMS, strict=False))
_MALFORMED = FORMS[4]

# Further passes are for what was offered meanwhile. Somebody who still writes outdated records would keep us for ever.
_MAX_PASSES = 5
# Steps grow while they block the server for less than the first, and shrink beyond the second, seconds.
_QUICK, _SLOW = 0.0007, 0.0011
_FIRST_BATCH = 10
_PAGE = 500
# Past the end of any list.
_END = 2**53
# So much of outdated records found in the sorted set is held before they are dealt with, bytes.
_HELD = 32 * 1024 * 1024


@dataclass(frozen=True)
class Migration:
    """How far a migration has come. Counts are of records, and exact as long as nobody else changes the queue.

    Attributes:
        queue: The queue's name.
        dry_run: Nothing is changed.
        length_bytes: How wide lengths are on this server: what is current, but of the other width, is outdated too.
        found: How many records of each of :data:`FORMS` were found. One that stands in both of the queue's structures
            counts once.
        rewritten: How many were brought up to date.
        merged: How many were there in their current form as well, and gave way to it.
        phase: What is being gone through; empty before the start.
        done: How much of the phase is done, entries.
        total: Of how many, about.
        passes: How often the whole queue was gone through, this time included.
        longest_step: The longest call so far, seconds, its way to the server and back included.
        complete: A whole pass found nothing outdated. Always false in a dry run that found something.
        finished: This is the last word.
    """

    queue: str
    dry_run: bool
    length_bytes: int
    found: Mapping[str, int]
    rewritten: int = 0
    merged: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    passes: int = 1
    longest_step: float = 0.0
    complete: bool = False
    finished: bool = False

    @property
    def looked_at(self) -> int:
        """How many records were found."""
        return sum(self.found.values())

    @property
    def current(self) -> int:
        """How many were up to date already."""
        return self.found.get(_up_to_date(self.length_bytes), 0)

    @property
    def malformed(self) -> int:
        """How many are of no form at all. They stay as they are."""
        return self.found.get(_MALFORMED, 0)

    @property
    def outdated(self) -> Mapping[str, int]:
        """How many were found of each other form."""
        kept = (_up_to_date(self.length_bytes), _MALFORMED)
        return {form: count for form, count in self.found.items() if form not in kept and count}


async def migrate(client: Client, name: str, *, dry_run: bool = False, batch: int = 100) -> AsyncIterator[Migration]:
    """Rewrite the outdated records of a delayed queue, in place, while everybody goes on using it.

    Each keeps its id, payload, due time and place in offer order. The work is done in small steps, each of them atomic;
    leaving the loop, or a crash, leaves a queue in which every message is still there once, and a next run goes on. What is
    ready is not touched: ready lists have no records. The queue is not opened: nothing is delivered.

    A Redisson before 3.21.1 cannot read what is rewritten. Stop or upgrade it first.

    Args:
        client: An open client.
        name: The queue's name.
        dry_run: Only look.
        batch: Records per step at most, 1 to 1,000. Steps become smaller by themselves where they would hold the server up.

    Yields:
        How far it is: first before anything is changed, then after each step. Only the last one is ``finished``; if it is not
        ``complete``, outdated records kept coming in.

    Raises:
        BadName: As for :meth:`delayq.Client.delayed_queue`.
        BadInput: ``batch`` is out of range.
        ServerUnavailable, OutcomeUnknown, ServerRefused: As everywhere. What was rewritten so far stays; run it again.
    """
    if not 1 <= batch <= MAX_BATCH:
        raise BadInput(f"batch must be 1 to {MAX_BATCH}")
    session = client._open_session()  # noqa: SLF001 - a part of the client that has a module of its own
    session.check_loop()
    keys = DelayedKeys.of(name, client._name_mapper)  # noqa: SLF001
    async for progress in _Run(keys, session.server, batch, dry_run=dry_run).run():
        yield progress


class _Run:
    """One migration.

    The ordered list is walked from its tail to its head, by indexes from the head. Offers append at the tail; whatever is
    removed moves what stands behind it nearer to the head. So what the walk has not reached stays before it, and a walk sees
    every entry that was there when it began, and still is.

    A record enters the list and the sorted set in one step of the server. So an outdated record that was seen in the sorted
    set, and is still there after a whole walk of the list, is not in the list.
    """

    def __init__(self, keys: DelayedKeys, server: Server, batch: int, *, dry_run: bool) -> None:
        self._keys = keys
        self._server = server
        self._pace = _Pace(batch)
        self._rewrite = not dry_run
        self._found: Counter[str] = Counter()
        self._now = Migration(keys.name, dry_run, 8, self._found)
        # What the first pass found: entries of the list that stand in the sorted set too, and the sorted set.
        self._in_both: Counter[str] = Counter()
        self._in_set: Counter[str] = Counter()
        # How many were rewritten that stood in the sorted set alone.
        self._alone: int = 0

    async def run(self) -> AsyncIterator[Migration]:
        for _ in range(3):
            # The server learns the script, and we learn how long the way there and back is.
            await self._step(0, 0)
        yield self._progress()
        complete = False
        for number in range(1, _MAX_PASSES + 1):
            self._now = replace(self._now, passes=number)
            before = self._count_outdated()
            async for progress in self._pass(first=number == 1):
                yield progress
            complete = self._count_outdated() == before
            if complete or not self._rewrite:
                break
        yield replace(self._progress(), complete=complete, finished=True)

    async def _pass(self, *, first: bool) -> AsyncIterator[Migration]:
        async for progress in self._walk(first=first):
            yield progress
        await self._begin_scan()
        outdated: list[bytes] = []
        held = 0
        cursor = b"0"
        while True:
            cursor, page = await self._pace.timed(self._server.command("ZSCAN", self._keys.timeout, cursor, "COUNT", _PAGE))
            for record in page[::2]:
                form = form_of(record)
                if first:
                    self._in_set[form] += 1
                if self._rewrite and self._is_outdated(form):
                    outdated.append(record)
                    held += len(record)
            self._advance(len(page) // 2)
            yield self._progress()
            last = int(cursor) == 0
            if outdated and (last or held > _HELD):
                async for progress in self._rewrite_alone(outdated):
                    yield progress
                outdated, held = [], 0
                await self._begin_scan()
            if last:
                break
        if first:
            await self._count_what_stands_alone()

    async def _walk(self, *, first: bool) -> AsyncIterator[Migration]:
        """Look at the whole ordered list, and rewrite what is outdated, there and in the sorted set at once."""
        before = _END
        while before > 0:
            length, reached, listed, in_both, _ = await self._step(before, self._pace.size)
            if before == _END:
                self._begin("ordered list", length)
            self._advance(min(before, length) - reached)
            before = reached
            for form, count in listed.items():
                # Later passes see again what the first has counted.
                if first or self._is_outdated(form):
                    self._found[form] += count
            if first:
                self._in_both += in_both
            yield self._progress()

    async def _rewrite_alone(self, records: list[bytes]) -> AsyncIterator[Migration]:
        """Rewrite those of the records, seen in the sorted set, that do not stand in the list."""
        async for progress in self._walk(first=False):
            yield progress
        self._begin("sorted set", len(records))
        at = 0
        while at < len(records):
            some = records[at : at + self._pace.size]
            *_, alone = await self._step(0, 0, some)
            self._found += alone
            self._alone += alone.total()
            at += len(some)
            self._advance(len(some))
            yield self._progress()

    async def _step(
        self, before: int, limit: int, records: Sequence[bytes] = ()
    ) -> tuple[int, int, Counter[str], Counter[str], Counter[str]]:
        """The list's length, the index reached, and counts by form: in the list, of these in the set, in the set alone."""
        keys = (self._keys.timeout, self._keys.ordered)
        call = self._server.run(MIGRATE, keys, (int(self._rewrite), before, limit, *records))
        if limit or records:
            reply = await self._pace.timed(call, adapt=True)
        else:
            reply = await self._pace.empty(call)
        width, length, reached, merged, *counts = reply
        self._now = replace(self._now, length_bytes=width, merged=self._now.merged + merged)
        return length, reached, _by_form(counts[0::3]), _by_form(counts[1::3]), _by_form(counts[2::3])

    def _is_outdated(self, form: str) -> bool:
        return form not in (_up_to_date(self._now.length_bytes), _MALFORMED)

    def _count_outdated(self) -> int:
        return sum(count for form, count in self._found.items() if self._is_outdated(form))

    async def _count_what_stands_alone(self) -> None:
        """Count what is up to date or malformed, and stands in the sorted set alone."""
        alone = self._in_set - self._in_both
        if self._rewrite:
            # What was rewritten may have been seen again while the set was read, so its size has to tell.
            size = int(await self._server.command("ZCARD", self._keys.timeout))
            listed = self._in_both.total() - self._in_both[_MALFORMED]
            known = listed + self._alone - self._now.merged + self._in_set[_MALFORMED]
            alone = +Counter({_up_to_date(self._now.length_bytes): size - known, _MALFORMED: alone[_MALFORMED]})
        self._found += alone

    def _begin(self, phase: str, total: int) -> None:
        again = ", again" if self._now.passes > 1 else ""
        self._now = replace(self._now, phase=phase + again, done=0, total=total)

    async def _begin_scan(self) -> None:
        self._begin("sorted set", int(await self._server.command("ZCARD", self._keys.timeout)))

    def _advance(self, count: int) -> None:
        done = self._now.done + count
        # Others may add to what we go through.
        self._now = replace(self._now, done=done, total=max(done, self._now.total))

    def _progress(self) -> Migration:
        rewritten = self._count_outdated() if self._rewrite else 0
        return replace(self._now, found=dict(+self._found), rewritten=rewritten, longest_step=self._pace.longest)


class _Pace:
    """How many records a step takes, from how long the last ones took.

    The farther an entry is from both ends of the list, the longer the server walks to it: 0.5 microseconds or 200.
    """

    def __init__(self, most: int) -> None:
        self.size: int = min(most, _FIRST_BATCH)
        self.longest: float = 0.0
        self._most = most
        self._way = float("inf")

    async def empty(self, call: Awaitable[T]) -> T:
        """Wait for a call that does nothing: it takes as long as the way there and back."""
        started = perf_counter()
        reply = await call
        self._way = min(self._way, perf_counter() - started)
        return reply

    async def timed(self, call: Awaitable[T], *, adapt: bool = False) -> T:
        """Wait for a call, and adapt the size of the next one to how long it took."""
        started = perf_counter()
        reply = await call
        took = perf_counter() - started
        self.longest = max(self.longest, took)
        if adapt and took - self._way > _SLOW:
            self.size = max(1, self.size // 2)
        elif adapt and took - self._way < _QUICK:
            self.size = min(self._most, self.size + self.size // 4 + 1)
        return reply


def _by_form(counts: list[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    found.update(dict(zip(FORMS, counts, strict=True)))
    return found


def form_of(record: bytes) -> str:
    """Which of :data:`FORMS` a record has."""
    payload = payload_of(record)
    return _MALFORMED if payload is None else _FORM_OF_HEADER[len(record) - len(payload)]


def _up_to_date(length_bytes: int) -> str:
    return FORMS[0] if length_bytes == 8 else FORMS[1]
