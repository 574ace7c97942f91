"""Cancels, reschedules and buries messages in ways that can be undone."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from delayq._dashboard.listings import AT_A_TIME
from delayq._dashboard.sources import ReliableSource
from delayq._dashboard.undo import MOST_BYTES, PerhapsUndone, Undo, Undone
from delayq.admin.catalog import FoundQueue
from delayq.admin.retries import BURIED
from delayq.errors import OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from delayq._dashboard.board import Board
    from delayq._dashboard.rows import MessageRef, Row
    from delayq._dashboard.sources import AnySource
    from delayq._durations import DueTime

MAX_MESSAGES = 10_000
"""The most messages that one action changes."""
# The memory of a message beyond its texts, in bytes.
_OVERHEAD = 1000


async def refs_in(source: AnySource, state: str) -> list[MessageRef]:
    """Return references to the first messages in one state."""
    refs: list[MessageRef] = []
    for pages in await source.search_pages([state]):
        at = 0
        while at < pages.count and len(refs) < MAX_MESSAGES and (rows := await pages.page(at, 100)):
            refs += [row.ref for row in rows if row is not None and row.ref is not None]
            at += len(rows)
    # A message that moves during the reading is listed twice.
    return [*dict.fromkeys(refs)][:MAX_MESSAGES]


class Changed(NamedTuple):
    """The effect of an action.

    Attributes:
        refs: The messages that were changed, where they are now, or were.
        undo: A token to undo it; empty if that cannot be.
        is_whole: Whether all steps were carried out. If not, the server failed in between.
        is_full: Whether it ended early because an undo of more messages would not fit.
    """

    refs: list[MessageRef]
    undo: str
    is_whole: bool = True
    is_full: bool = False


async def cancel(
    board: Board, source: AnySource, refs: Sequence[MessageRef], *, running: bool = False
) -> Changed:
    """Remove messages, step by step, as many as an undo can bring back."""
    done: list[MessageRef] = []
    restorable: list[Row] = []
    count = size = 0
    is_whole, is_full = True, False
    for batch in _steps(refs):
        rows: list[Row] = []
        try:
            live_rows = await source.find_live(batch)
            rows = _fitting(live_rows, MOST_BYTES - size)
            is_full = len(rows) < len(live_rows)
            removed = await source.cancel([_ref_of(row) for row in rows], running=running)
            removed_rows = [row for row, is_gone in zip(rows, removed, strict=True) if is_gone]
            done += [_ref_of(row) for row in removed_rows]
        except ServerError as error:
            unknown = isinstance(error, OutcomeUnknown) or not await _are_there(source, rows)
            if not done and not (rows and unknown):
                raise
            # Some may be gone as well. An undo brings back those that are.
            removed_rows, is_whole = rows, False
        count += len(removed_rows)
        restorable += (row for row in removed_rows if row.is_restorable)
        size += sum(map(_size_of, removed_rows))
        if is_full or not is_whole:
            break
    if not restorable:
        return Changed(done, "", is_whole, is_full)
    undo = Undo(_restorer_of(board, source, restorable), count, size, _queue_of(source))
    return Changed(done, board.undos.keep(undo), is_whole, is_full)


def _fitting(rows: list[Row], room: int) -> list[Row]:
    """Return the first rows that fit into ``room`` bytes."""
    sizes = accumulate(map(_size_of, rows))
    return [row for row, size in zip(rows, sizes, strict=True) if size <= room]


def _restorer_of(
    board: Board, source: AnySource, rows: list[Row]
) -> Callable[[], Awaitable[Undone]]:
    """Return a function that offers cancelled messages again, step by step."""
    restored: list[int] = []
    unsure: list[int] = []

    async def restore() -> Undone:
        while rows:
            batch = rows[:AT_A_TIME]
            try:
                restored.append(await source.restore(batch, await board.now()))
            except PerhapsUndone:
                unsure.append(len(batch))
                del rows[:AT_A_TIME]
                raise
            del rows[:AT_A_TIME]
        return Undone(sum(restored), sum(unsure), isinstance(source, ReliableSource))

    return restore


class _Moved(NamedTuple):
    """A message that has another delay, where it is now. Moments are in microseconds.

    Attributes:
        ref: Its new reference.
        due_us: When it was due before.
        enqueued_us: When it was offered; None in a delayed queue, where references are not reused.
    """

    ref: MessageRef
    due_us: int
    enqueued_us: int | None


async def reschedule(
    board: Board, source: AnySource, refs: Sequence[MessageRef], when: DueTime
) -> Changed:
    """Give messages another due time, step by step."""
    rescheduled: list[_Moved] = []
    is_whole = True
    for batch in _steps(refs):
        try:
            rows = await source.find_live(batch)
            new_refs = await source.reschedule([_ref_of(row) for row in rows], when)
        except ServerError:
            if not rescheduled:
                raise
            is_whole = False
            break
        pairs = zip(new_refs, rows, strict=True)
        rescheduled += [
            _Moved(new, row.due_us or 0, row.enqueued_us) for new, row in pairs if new is not None
        ]
    if not rescheduled:
        return Changed([], "", is_whole)
    done, size = [message.ref for message in rescheduled], len(rescheduled) * _OVERHEAD
    restored: list[int] = []

    async def undo() -> Undone:
        while rescheduled:
            batch, now = rescheduled[:AT_A_TIME], await board.now()
            current_rows = await source.find_live([message.ref for message in batch])
            # A message that was offered meanwhile may have the id of one that is gone.
            offered = {row.ref: row.enqueued_us for row in current_rows}
            unchanged = [
                message for message in batch if offered.get(message.ref) == message.enqueued_us
            ]
            moves = [(message.ref, max(0, message.due_us - now)) for message in unchanged]
            back = await source.reschedule_each(moves)
            restored.append(sum(ref is not None for ref in back))
            del rescheduled[:AT_A_TIME]
        return Undone(sum(restored))

    return Changed(done, board.undos.keep(Undo(undo, len(done), size, _queue_of(source))), is_whole)


async def bury(board: Board, source: ReliableSource, refs: Sequence[MessageRef]) -> Changed:
    """Make messages that no worker has dead letters, step by step."""
    letters: list[MessageRef] = []
    is_whole = True
    for batch in _steps(refs):
        try:
            letters += [ref for ref in await source.bury(batch, BURIED) if ref is not None]
        except ServerError:
            if not letters:
                raise
            is_whole = False
            break
    if not letters:
        return Changed([], "", is_whole)
    done, size = [*letters], len(letters) * _OVERHEAD
    restored: list[int] = []

    async def undo() -> Undone:
        while letters:
            restored.append(await source.unbury(letters[:AT_A_TIME]))
            del letters[:AT_A_TIME]
        return Undone(sum(restored), with_all_attempts=True)

    return Changed(done, board.undos.keep(Undo(undo, len(done), size, _queue_of(source))), is_whole)


def _steps(refs: Sequence[MessageRef]) -> Iterator[Sequence[MessageRef]]:
    """Yield the references without repeats, each time some of one partition: one call changes them,
    so that a step is not carried out by half.
    """
    parts: dict[int, list[MessageRef]] = {}
    for ref in dict.fromkeys(refs):
        parts.setdefault(ref.partition, []).append(ref)
    for part in parts.values():
        yield from (part[at : at + AT_A_TIME] for at in range(0, len(part), AT_A_TIME))


async def _are_there(source: AnySource, rows: Sequence[Row]) -> bool:
    try:
        return len(await source.find_live([_ref_of(row) for row in rows])) == len(rows)
    except ServerError:
        return False


def _size_of(row: Row) -> int:
    """Return the memory that a message takes, in bytes; roughly."""
    headers = sum(len(name) + len(text) for name, text in row.headers.items())
    return len(row.payload or b"") + len(row.error) + headers + _OVERHEAD


def _queue_of(source: AnySource) -> FoundQueue:
    return FoundQueue(source.kind, source.name, source.partitions)


def _ref_of(row: Row) -> MessageRef:
    assert row.ref is not None
    return row.ref
