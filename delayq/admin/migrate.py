"""Converts the records of a delayed queue to the form that Redisson 3.21.1 and later reads.

delayq reads every form, so it needs no migration. A newer Redisson does: it fails on the first
older record that comes due, and delivers the records before it again and again. ``delayq migrate``
does this from the command line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from delayq._redisson.records import payload_of
from delayq.admin.delayed import DelayedInspector
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

    from delayq._redisson.store import DelayedStore, MigrationStep
    from delayq.client import Client

T = TypeVar("T")

FORMS = (
    "current, 8-byte length",
    "current, 4-byte length",
    "old, 8-byte length",
    "old, 4-byte length",
    "malformed",
)
"""The forms a record may have.

Old forms come from Redisson before 3.21.1; lengths have 4 bytes on 32-bit and Windows servers.
"""

MAX_BATCH = 1000
"""The largest number of records that one step may examine."""

# By the number of bytes before the payload, as in the script.
_FORM_OF_HEADER: dict[int, str] = dict(zip((17, 13, 16, 12), FORMS, strict=False))
_MALFORMED = FORMS[4]

# Further passes are for later offers. A client that writes old records would keep us forever.
_MAX_PASSES = 5
# Steps grow while they block the server below the first, and shrink above the second, seconds.
_QUICK, _SLOW = 0.0007, 0.0011
_FIRST_BATCH = 10
_PAGE = 500
# Past the end of any list.
_END = 2**53
# Outdated records from the sorted set are rewritten when they take more memory than this, bytes.
_MAX_BUFFER = 32 * 1024 * 1024


@dataclass(frozen=True)
class Migration:
    """The progress of a migration.

    Counts are of records, and exact as long as no other client changes the queue.

    Attributes:
        queue: The queue's name.
        dry_run: Whether nothing is changed.
        length_bytes: The width of lengths on this server, bytes. Other widths are outdated.
        records: The number of records in each of :data:`FORMS`. A record that is in both of the
            queue's structures counts once.
        rewritten: The number of records brought up to date.
        merged: The number of outdated records removed because their current form was already there.
        phase: The current phase; empty before the start.
        done: How much of the phase is done, entries.
        total: The approximate number of entries in the phase.
        passes: The number of passes over the whole queue, including this one.
        longest_step: The longest call so far, including its round trip, seconds.
        complete: Whether the last pass found nothing outdated, also in a dry run.
        finished: Whether this is the last report.
    """

    queue: str
    dry_run: bool
    length_bytes: int
    records: Mapping[str, int]
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
    def examined(self) -> int:
        """The number of records found."""
        return sum(self.records.values())

    @property
    def current(self) -> int:
        """The number of records that were already up to date."""
        return self.records.get(_up_to_date(self.length_bytes), 0)

    @property
    def malformed(self) -> int:
        """The number of records in no known form. They are left as they are."""
        return self.records.get(_MALFORMED, 0)

    @property
    def outdated(self) -> Mapping[str, int]:
        """The number of records found in each other form."""
        unchanged = (_up_to_date(self.length_bytes), _MALFORMED)
        return {
            form: count for form, count in self.records.items() if form not in unchanged and count
        }


async def migrate(
    client: Client, name: str, *, dry_run: bool = False, batch: int = 100
) -> AsyncIterator[Migration]:
    """Rewrite the outdated records of a delayed queue in place, while other clients go on using it.

    Each record keeps its id, payload, due time and place in offer order. The work is done in small
    steps, each of them atomic: if you leave the loop, or the process crashes, every message is
    still in the queue exactly once, and the next run continues. Ready messages are not touched,
    because the ready list has no records. The queue is not opened, so nothing is delivered.

    A Redisson before 3.21.1 cannot read the rewritten records. Stop or upgrade it first.

    Args:
        client: An open client.
        name: The queue's name.
        dry_run: Only examine the records.
        batch: The largest number of records per step, 1 to 1,000. Steps shrink by themselves if
            they would hold the server up.

    Yields:
        The progress: first before anything is changed, then after each step. Only the last one is
        ``finished``; if it is not ``complete``, outdated records kept coming in.

    Raises:
        BadName: As for :meth:`delayq.Client.delayed_queue`.
        BadInput: ``batch`` is out of range.
        ServerUnavailable, OutcomeUnknown, ServerRefused: As for every call. Records rewritten so
            far stay rewritten; run it again.
    """
    if not 1 <= batch <= MAX_BATCH:
        raise BadInput(f"batch must be from 1 to {MAX_BATCH}")
    store = DelayedInspector.of(client, name).store
    async for progress in _Run(store, batch, dry_run=dry_run).run():
        yield progress


class _Run:
    """One migration.

    The ordered list is walked from its tail to its head, by indexes from the head. Offers append at
    the tail; a removal moves the entries behind it nearer to the head. So the entries that the walk
    has not reached stay before its position, and a walk sees every entry that was there throughout.

    A record enters the list and the sorted set in one atomic step. So an outdated record that was
    seen in the sorted set, and is still there after a whole walk of the list, is not in the list.
    """

    def __init__(self, store: DelayedStore, batch: int, *, dry_run: bool) -> None:
        self._store = store
        self._pace = _Pace(batch)
        self._rewrite = not dry_run
        self._records: Counter[str] = Counter()
        self._now = Migration(store.keys.name, dry_run, 8, self._records)
        # Results of the first pass: the forms in both list and set, and in the set.
        self._in_both: Counter[str] = Counter()
        self._in_set: Counter[str] = Counter()
        # The number of rewritten records that were in the sorted set only.
        self._unlisted: int = 0

    async def run(self) -> AsyncIterator[Migration]:
        for _ in range(3):
            # The server learns the script, and we measure the round trip.
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
        buffer_size = 0
        cursor = b"0"
        while True:
            cursor, page = await self._pace.timed(self._store.scan_pending(cursor, _PAGE))
            for record in page:
                form = form_of(record)
                if first:
                    self._in_set[form] += 1
                if self._rewrite and self._is_outdated(form):
                    outdated.append(record)
                    buffer_size += len(record)
            self._advance(len(page))
            yield self._progress()
            last = cursor == b"0"
            if outdated and (last or buffer_size > _MAX_BUFFER):
                async for progress in self._rewrite_unlisted(outdated):
                    yield progress
                outdated, buffer_size = [], 0
                await self._begin_scan()
            if last:
                break
        if first:
            await self._count_unlisted()

    async def _walk(self, *, first: bool) -> AsyncIterator[Migration]:
        """Walk the whole ordered list, and rewrite outdated records in it and in the sorted set."""
        before = _END
        while before > 0:
            step = await self._step(before, self._pace.size)
            if before == _END:
                self._begin("ordered list", step.length)
            self._advance(min(before, step.length) - step.reached)
            before = step.reached
            for form, count in _by_form(step.listed).items():
                # Later passes see the records that the first one has counted again.
                if first or self._is_outdated(form):
                    self._records[form] += count
            if first:
                self._in_both += _by_form(step.in_both)
            yield self._progress()

    async def _rewrite_unlisted(self, records: list[bytes]) -> AsyncIterator[Migration]:
        """Rewrite those of the records, seen in the sorted set, that are not in the list."""
        async for progress in self._walk(first=False):
            yield progress
        self._begin("sorted set", len(records))
        at = 0
        while at < len(records):
            batch = records[at : at + self._pace.size]
            unlisted = _by_form((await self._step(0, 0, batch)).alone)
            self._records += unlisted
            self._unlisted += unlisted.total()
            at += len(batch)
            self._advance(len(batch))
            yield self._progress()

    async def _step(self, before: int, limit: int, records: Sequence[bytes] = ()) -> MigrationStep:
        call = self._store.migrate_step(before, limit, records, rewrite=self._rewrite)
        step = await (
            self._pace.timed(call, adapt=True) if limit or records else self._pace.empty(call)
        )
        self._now = replace(
            self._now, length_bytes=step.length_bytes, merged=self._now.merged + step.merged
        )
        return step

    def _is_outdated(self, form: str) -> bool:
        return form not in (_up_to_date(self._now.length_bytes), _MALFORMED)

    def _count_outdated(self) -> int:
        return sum(count for form, count in self._records.items() if self._is_outdated(form))

    async def _count_unlisted(self) -> None:
        """Count the up-to-date or malformed records that are in the sorted set only."""
        unlisted = self._in_set - self._in_both
        if self._rewrite:
            # Rewritten records may have been seen twice in the set, so count by its size.
            size = await self._store.count_scored()
            listed = self._in_both.total() - self._in_both[_MALFORMED]
            accounted = listed + self._unlisted - self._now.merged + self._in_set[_MALFORMED]
            unlisted = +Counter(
                {
                    _up_to_date(self._now.length_bytes): size - accounted,
                    _MALFORMED: unlisted[_MALFORMED],
                }
            )
        self._records += unlisted

    def _begin(self, phase: str, total: int) -> None:
        again = ", again" if self._now.passes > 1 else ""
        self._now = replace(self._now, phase=phase + again, done=0, total=total)

    async def _begin_scan(self) -> None:
        self._begin("sorted set", await self._store.count_scored())

    def _advance(self, count: int) -> None:
        done = self._now.done + count
        # Other clients may add entries to the structure that is being walked.
        self._now = replace(self._now, done=done, total=max(done, self._now.total))

    def _progress(self) -> Migration:
        rewritten = self._count_outdated() if self._rewrite else 0
        return replace(
            self._now,
            records=dict(+self._records),
            rewritten=rewritten,
            longest_step=self._pace.longest,
        )


class _Pace:
    """Decides how many records a step takes, from how long the last steps took.

    The farther an entry is from both ends, the longer it takes: 0.5 to 200 microseconds.
    """

    def __init__(self, max_size: int) -> None:
        self.size: int = min(max_size, _FIRST_BATCH)
        self.longest: float = 0.0
        self._max_size = max_size
        self._round_trip = float("inf")

    async def empty(self, call: Awaitable[T]) -> T:
        """Wait for a call that does nothing: it takes as long as a round trip."""
        started = perf_counter()
        reply = await call
        self._round_trip = min(self._round_trip, perf_counter() - started)
        return reply

    async def timed(self, call: Awaitable[T], *, adapt: bool = False) -> T:
        """Wait for a call, and adapt the size of the next step to how long it took."""
        started = perf_counter()
        reply = await call
        took = perf_counter() - started
        self.longest = max(self.longest, took)
        if adapt and took - self._round_trip > _SLOW:
            self.size = max(1, self.size // 2)
        elif adapt and took - self._round_trip < _QUICK:
            self.size = min(self._max_size, self.size + self.size // 4 + 1)
        return reply


def _by_form(counts: list[int]) -> Counter[str]:
    return Counter(dict(zip(FORMS, counts, strict=True)))


def form_of(record: bytes) -> str:
    """Return the form of a record, one of :data:`FORMS`."""
    payload = payload_of(record)
    return _MALFORMED if payload is None else _FORM_OF_HEADER[len(record) - len(payload)]


def _up_to_date(length_bytes: int) -> str:
    return FORMS[0] if length_bytes == 8 else FORMS[1]
