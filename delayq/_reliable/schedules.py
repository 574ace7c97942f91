"""The public interface to recurring messages."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, timedelta
from functools import partial
from typing import TYPE_CHECKING, Generic

from delayq._checks import describe_value
from delayq._durations import Duration, datetime_at
from delayq._generics import T
from delayq._logging import about
from delayq._reliable.ids import OCCURRENCE_DIGITS, home_of
from delayq._reliable.offer import Offer
from delayq._reliable.timing import UnreadableSchedule, parse_schedule, timing_of
from delayq.codecs.protocol import own_attribute
from delayq.errors import BadInput, DecodeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime, tzinfo

    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.consumer import Consumer
    from delayq._reliable.message import Message
    from delayq._reliable.offer_encoder import OfferEncoder
    from delayq._reliable.partition import Partition
    from delayq._reliable.store import ReliableStore


_log = logging.getLogger("delayq")

_LONGEST_NAME = 512 - OCCURRENCE_DIGITS - 1
_MOST_VERSION = 2**53


@dataclass(frozen=True)
class Schedule:
    """A recurring message.

    Attributes:
        name: The schedule's name.
        cron: The cron expression, or None.
        every: The period, or None.
        timezone: The time zone in which the expression is evaluated; None for a period.
        next_at: When the next occurrence is due, by the server's clock (UTC); None while the
            schedule is paused, or no process that can compute it is running.
        last_at: When the last occurrence that was handed out had been due; None before the first.
        priority: 0 to 9.
        version: The version passed to :meth:`ReliableQueue.schedule`.
        paused: Whether it is paused.
    """

    name: str
    cron: str | None
    every: timedelta | None
    timezone: str | None
    next_at: datetime | None
    last_at: datetime | None
    priority: int
    version: int
    paused: bool = False


def to_schedule(name: str, entry: bytes, shift_us: int) -> Schedule:
    """Convert a stored schedule. Raises :class:`UnreadableSchedule`."""
    facts, timing = parse_schedule(entry)

    def moment(text: str) -> datetime | None:
        return datetime_at(int(text) - shift_us) if text else None

    return Schedule(
        name=name,
        cron=timing.cron or None,
        every=timedelta(microseconds=timing.every_us) if timing.every_us else None,
        timezone=timing.timezone or None,
        next_at=None if facts["paused"] else moment(facts["next"]),
        last_at=moment(facts["last"]),
        priority=facts["priority"],
        version=facts["version"],
        paused=facts["paused"],
    )


class Recurring(Generic[T]):
    """The methods of a reliable queue that deal with recurring messages."""

    _consumer: Consumer[Message[T]]
    _encoder: OfferEncoder[T]

    async def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        value: T,
        timezone: str | tzinfo = UTC,
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        version: int = 0,
    ) -> datetime:
        """Schedule a recurring message.

        One occurrence waits at a time, however many processes call this.

        Call it wherever a process starts: repeating the same definition changes nothing, and never
        postpones the next occurrence. A different definition replaces the previous one and its
        waiting message; as long as ``cron`` and ``timezone``, or ``every``, are the same, the
        message keeps its due time.

        Args:
            name: The schedule's name; its messages have the ids ``name@<microseconds>``.
            cron: Five fields, as in a crontab, or six, the first of which is seconds. Needs
                ``delayq[cron]``.
            every: Instead of ``cron``, a period: seconds or a timedelta. The first occurrence is
                due after one period.
            value: Any value that the codec can encode.
            timezone: The time zone in which ``cron`` is evaluated: a name such as
                ``"Europe/Berlin"``, or a tzinfo.
            headers: As in :meth:`offer`.
            priority: As in :meth:`offer`.
            ttl: How long after its due time an occurrence is still worth handling: seconds or a
                timedelta.
            max_attempts: As in :meth:`offer`.
            timeout: As in :meth:`offer`.
            version: If releases with different definitions run side by side, the higher version
                wins. Among equal versions, the last call wins.

        Returns:
            When the next occurrence is due, by the server's clock (UTC), unless the schedule is
            paused.

        Raises:
            BadInput, EncodeError: Nothing was written.
            ConfigurationError: ``delayq[cron]`` is not installed.
            ServerUnavailable, ServerRefused, OutcomeUnknown, Closed: As :meth:`offer`. Calling it
                again is safe.
        """
        self._consumer.check_open()
        _check_name(name)
        timing = timing_of(cron, every, timezone)
        if (
            isinstance(version, bool)
            or not isinstance(version, int)
            or not 0 <= version <= _MOST_VERSION
        ):
            raise BadInput(f"version must be an int from 0 to 2**53, not {version!r}")
        message = self._encoder.with_options(
            Offer(
                value,
                headers=headers,
                priority=priority,
                ttl=ttl,
                max_attempts=max_attempts,
                timeout=timeout,
            )
        )
        # An expression that never matches is refused before anything is written.
        timing.moments(0)
        queue = await self._consumer.declare()

        async def store(index: int, count: int) -> datetime:
            partition = queue.opened_partitions[index]
            definition = await self._as_stored(partition.store, name, message)
            return await partition.recurrence.schedule(count, name, timing, version, definition)

        return await queue.settings.write(partial(home_of, name), store)

    async def _as_stored(
        self, store: ReliableStore, name: str, message: OptionsMessage
    ) -> OptionsMessage:
        """Return a message with the bytes that the schedule has, if only its encryption differs:
        other bytes would be another definition.
        """
        codec = self._consumer.codec
        fingerprint: Callable[[bytes], bytes] | None = own_attribute(codec, "fingerprint")
        entry = None if fingerprint is None else await store.schedule_entry(name)
        if fingerprint is None or entry is None:
            return message
        _, _, stored = entry.partition(b"\n")
        head, _, payload = message.content.partition(b"\n")
        stored_head, _, stored_payload = stored.partition(b"\n")
        with suppress(DecodeError):
            if head == stored_head and fingerprint(payload) == fingerprint(stored_payload):
                return message._replace(content=stored)
        return message

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule, and drop its waiting message.

        A message that a worker has is handled to completion.

        Returns:
            True if there was such a schedule.

        Raises:
            OutcomeUnknown: The reply was lost: it may have been carried out. With any other error,
                it was not.
        """
        return await self._in_home_partition(name, lambda store: store.unschedule(name))

    async def pause_schedule(self, name: str) -> bool:
        """Pause a schedule, and drop its waiting message.

        A message that a worker has is handled to completion. :meth:`schedule` changes the
        definition of a paused schedule, but does not resume it.

        Returns:
            True if there is such a schedule. Pausing it again changes nothing.

        Raises:
            OutcomeUnknown: The reply was lost: it may have been carried out, and calling this again
                is safe. With any other error, it was not.
        """
        return await self._in_home_partition(name, lambda store: store.pause_schedule(name))

    async def resume_schedule(self, name: str) -> bool:
        """Resume a paused schedule.

        Occurrences that it missed in the meantime are skipped. Returns and raises as
        :meth:`pause_schedule` does.
        """
        return await self._in_home_partition(name, lambda store: store.resume_schedule(name))

    async def _in_home_partition(
        self, name: str, call: Callable[[ReliableStore], Awaitable[bool]]
    ) -> bool:
        """Make a call to the partition that has the schedule."""
        _check_name(name)
        queue = await self._consumer.declare()
        return bool(
            await queue.search(
                lambda: [queue.home_of(name)], lambda partition: call(partition.store)
            )
        )

    async def schedules(self) -> list[Schedule]:
        """Return the queue's schedules, by name.

        Schedules that cannot be read are left out and logged.
        """
        queue = await self._consumer.declare()
        parts = await queue.for_each_partition(self._schedules_in)
        return sorted(
            (schedule for part in parts for schedule in part), key=lambda schedule: schedule.name
        )

    async def _schedules_in(self, partition: Partition) -> Sequence[Schedule]:
        stored, shift_us = await partition.store.schedules()
        schedules = []
        for raw, entry in stored.items():
            name = raw.decode(errors="replace")
            try:
                schedules.append(to_schedule(name, entry, shift_us))
            except UnreadableSchedule as error:
                _log.warning(
                    "queue %r: schedule %r is left out: %s",
                    self._consumer.queue.name,
                    name,
                    error,
                    extra=about(self._consumer.queue.name),
                )
        return schedules


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise BadInput(f"a schedule's name must be a non-empty str, not {describe_value(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadInput("a schedule's name must be encodable as UTF-8") from None
    if size > _LONGEST_NAME:
        raise BadInput(f"a schedule's name must have at most {_LONGEST_NAME} bytes, not {size}")
