"""The calls about recurring messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delayq._reliable.scripts import (
    OCCUR,
    PAUSE_SCHEDULE,
    RECUR,
    REFILL,
    RESUME_SCHEDULE,
    SCHEDULE,
    UNSCHEDULE,
    ScriptRunner,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.replies import Claim
    from delayq._reliable.timing import Timing

# Prefix of what is stored of a schedule that ended while one of its occurrences was being handled.
_ENDED = b'{"ended":'


class StoredSchedules(NamedTuple):
    """The stored schedules by name, and by how much tests have moved the time, in microseconds."""

    entries: dict[bytes, bytes]
    shift_us: int


class Occurrence(NamedTuple):
    """The outcome for a claimed occurrence of a recurring message.

    Attributes:
        is_handed_out: Whether to hand it out.
        moments_ahead: As :meth:`ScheduleStore.recur` returns it.
    """

    is_handed_out: bool
    moments_ahead: int


class ScheduleStore(ScriptRunner):
    """Reads and changes schedules, and puts their occurrences in place."""

    async def now_us(self) -> int:
        """Return the server's time, shifted as far as tests have moved it."""
        shift = await self.client.command("HGET", self.keys.schedules, "")
        return await self.client.time_us() + int(shift or 0)

    async def schedule(
        self,
        partitions: int,
        name: str,
        timing: Timing,
        version: int,
        message: OptionsMessage,
        moments: Sequence[int],
    ) -> int:
        """Make a message recur, and return when it is due next.

        ``moments`` are the next ones if there is no period. Raises SettingsChanged if the queue has
        another number of partitions.
        """
        due_us, _ = await self.run(
            SCHEDULE,
            partitions,
            name,
            timing.text,
            version,
            timing.every_us,
            message.priority,
            message.ttl_us,
            message.content,
            *moments,
        )
        return int(due_us)

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule and its waiting message, and return whether it was there."""
        return bool(await self.run(UNSCHEDULE, name))

    async def pause_schedule(self, name: str) -> bool:
        """Pause a schedule, drop its waiting message, and return whether there is that schedule."""
        return bool(await self.run(PAUSE_SCHEDULE, name))

    async def resume_schedule(self, name: str) -> bool:
        """Resume a schedule, and return whether there is one of that name."""
        return bool(await self.run(RESUME_SCHEDULE, name))

    async def schedules(self) -> StoredSchedules:
        """Return all schedules."""
        reply = await self.client.command("HGETALL", self.keys.schedules)
        entries: dict[bytes, bytes] = dict(zip(reply[::2], reply[1::2], strict=True))
        shift_us = int(entries.pop(b"", 0))
        return StoredSchedules(
            {name: entry for name, entry in entries.items() if not entry.startswith(_ENDED)},
            shift_us,
        )

    async def schedule_names(self, cursor: bytes, count: int) -> tuple[bytes, set[str]]:
        """Return the next cursor and the names of about ``count`` schedules. Some may come twice.

        The first cursor is ``b"0"``, and so is the one after the last page.
        """
        next_cursor, reply = await self.client.command(
            "HSCAN", self.keys.schedules, cursor, "COUNT", count
        )
        return next_cursor, {name.decode(errors="replace") for name in reply[::2] if name}

    async def schedule_entry(self, name: str) -> bytes | None:
        """Return what is stored of one schedule; None if there is none of that name."""
        entry: bytes | None = await self.client.command("HGET", self.keys.schedules, name)
        return entry

    async def occur(self, claims: Sequence[Claim]) -> list[Occurrence]:
        """Put in place what follows the claimed occurrences, and return what became of each of
        them.
        """
        reply = await self.run(OCCUR, *(part for claim in claims for part in claim.lease_id))
        return [
            Occurrence(bool(is_handed_out), ahead)
            for is_handed_out, ahead in zip(reply[::2], reply[1::2], strict=True)
        ]

    async def recur(self, names: Sequence[str]) -> list[int]:
        """Put missing occurrences in place.

        Returns:
            How many were missing; then for each schedule how many moments it has beyond its next
                one: -1 if that does not matter, -2 if there is no such schedule.
        """
        reply: list[int] = await self.run(RECUR, *names)
        return reply

    async def refill(self, name: str, timing: Timing, moments: Sequence[int]) -> None:
        """Store more moments of a schedule, if it still has that timing."""
        await self.run(REFILL, name, timing.text, *moments)
