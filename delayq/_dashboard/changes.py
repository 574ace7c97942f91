"""Cancels and reschedules messages in ways that can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._dashboard.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._dashboard.board import Board
    from delayq._dashboard.queues import AnySource
    from delayq._dashboard.rows import Place, Row

MOST = 10_000
"""The most messages that one action changes."""
# The memory of a message beyond its payload, in bytes.
_OVERHEAD = 1000


async def places_in(source: AnySource, state: str) -> list[Place]:
    """Return the places of the first messages in one state."""
    places: list[Place] = []
    for shelf in await source.shelves([state]):
        at = 0
        while at < shelf.count and len(places) < MOST and (rows := await shelf.page(at, 200)):
            places += [row.place for row in rows if row is not None and row.place is not None]
            at += len(rows)
    # What moves while it is read comes twice.
    return [*dict.fromkeys(places)][:MOST]


async def cancel(
    board: Board, source: AnySource, places: Sequence[Place], *, running: bool = False
) -> tuple[int, str]:
    """Remove messages. Returns how many, and a token to undo it; empty if that cannot be."""
    rows = await source.look_at([*dict.fromkeys(places)])
    removed = await source.cancel([_place_of(row) for row in rows], running=running)
    gone = [row for row, done in zip(rows, removed, strict=True) if done]
    kept = [row for row in gone if row.is_restorable]
    if not kept:
        return len(gone), ""

    async def undo() -> int:
        return await source.restore(kept, await board.now())

    size = sum(len(row.payload or b"") + _OVERHEAD for row in kept)
    return len(gone), board.undos.keep(Undo(undo, len(gone), size))


async def reschedule(
    board: Board, source: AnySource, places: Sequence[Place], delay_us: int
) -> tuple[list[Place], str]:
    """Give messages another delay, in microseconds.

    Returns the places of those that are there, and a token to undo it.
    """
    rows = await source.look_at([*dict.fromkeys(places)])
    moved = await source.reschedule([_place_of(row) for row in rows], delay_us)
    changed = [(new, row) for new, row in zip(moved, rows, strict=True) if new is not None]
    if not changed:
        return [], ""

    async def undo() -> int:
        now = await board.now()
        moves = [(new, max(0, (row.due_us or 0) - now)) for new, row in changed]
        return sum(place is not None for place in await source.reschedule_each(moves))

    token = board.undos.keep(Undo(undo, len(changed), len(changed) * _OVERHEAD))
    return [new for new, _ in changed], token


def _place_of(row: Row) -> Place:
    assert row.place is not None
    return row.place
