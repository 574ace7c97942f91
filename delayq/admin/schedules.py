"""The schedules of a reliable queue from the outside: their next runs, and a run brought forward.

Functions take the data of a queue's partitions, and may raise the errors of
:class:`~delayq.errors.ServerError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayq._durations import moment_us
from delayq._reliable.recurrence import Unreadable, read
from delayq._reliable.schedules import to_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayq._reliable.schedules import Schedule
    from delayq._reliable.store import ReliableStore

_SHOWN = 5


@dataclass(frozen=True)
class ListedSchedule:
    """A schedule, and when its messages are due.

    Attributes:
        name: Its name.
        schedule: The schedule; None if its record cannot be read.
        runs: When the next five occurrences are due, as far as they are known (UTC).
    """

    name: str
    schedule: Schedule | None
    runs: tuple[datetime, ...] = ()


async def list_schedules(stores: Sequence[ReliableStore]) -> list[ListedSchedule]:
    """Return all schedules, by name."""
    found = []
    for store in stores:
        records, shift_us = await store.schedules()
        found += [_listed(name, record, shift_us) for name, record in records.items()]
    return sorted(found, key=lambda each: each.name)


async def run_now(stores: Sequence[ReliableStore], name: str) -> tuple[ReliableStore, str] | None:
    """Make the next occurrence of a schedule due now. The one after it keeps its time.

    Returns:
        Where the occurrence is, and its id; None if there is no such schedule, or none of its
        occurrences waits.
    """
    for store in stores:
        record = await store.schedule_record(name)
        if record is None:
            continue
        try:
            facts, _ = read(record)
        except Unreadable:
            continue
        occurrence = f"{name}@{facts['next']}"
        if (await store.reschedule([occurrence], 0))[0]:
            return store, occurrence
    return None


async def unschedule(stores: Sequence[ReliableStore], name: str) -> bool:
    """Delete a schedule as :meth:`delayq.ReliableQueue.unschedule` does."""
    return any([await store.unschedule(name) for store in stores])


async def pause(stores: Sequence[ReliableStore], name: str) -> bool:
    """Pause a schedule as :meth:`delayq.ReliableQueue.pause_schedule` does."""
    return any([await store.pause_schedule(name) for store in stores])


async def resume(stores: Sequence[ReliableStore], name: str) -> bool:
    """Resume a schedule as :meth:`delayq.ReliableQueue.resume_schedule` does."""
    return any([await store.resume_schedule(name) for store in stores])


def _listed(raw: bytes, record: bytes, shift_us: int) -> ListedSchedule:
    name = raw.decode(errors="replace")
    try:
        schedule = to_schedule(name, record, shift_us)
        facts, timing = read(record)
    except Unreadable:
        return ListedSchedule(name, None)
    if facts["paused"] or not facts["next"]:
        return ListedSchedule(name, schedule)
    first_us = int(facts["next"])
    if timing.every_us:
        runs = [first_us + count * timing.every_us for count in range(_SHOWN)]
    else:
        upcoming = facts["upcoming"] if isinstance(facts["upcoming"], list) else []
        runs = [first_us, *(int(each) for each in upcoming[: _SHOWN - 1])]
    return ListedSchedule(name, schedule, tuple(moment_us(each - shift_us) for each in runs))
