"""Recurring messages: one waiting message per name, however many processes schedule it.

The server keeps the schedules in one hash per queue: for each, a definition, the due time of the
next occurrence and, for a cron expression, the moments after it. An occurrence is a message like
any other, with the id ``name@moment``. The client that claims one puts the next in its place before
the handler sees it, in a single script that needs neither Python nor a time zone. No leader has to
be elected, and no worker's death ends a recurrence: an occurrence that was claimed but not yet
followed up comes back when its lease ends. A claim that drops an occurrence (because it is past its
time to live, or out of attempts) reports it, and the client puts the next one in place.

Anything else that may happen to the waiting occurrence (cancelled, purged) is found by a check once
per ``resync_interval``. A process checks if it has scheduled something, if it has received an
occurrence, or if the re-check has found schedules on the server while it waits for messages; of
many such processes, a few check each time. A check goes on where the last one of its process ended
and takes in about a hundred schedules, and more only as long as occurrences are missing: so it
costs the same however many schedules and processes there are. It never restores a definition: the
server's definition counts, and the last call wins.

All moments are by the server's clock. Occurrences missed while there was no consumer to claim them
run once, late, and then return to the schedule. An occurrence that comes due while the previous one
is still being handled or waiting for another attempt is skipped.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayq._durations import datetime_at
from delayq._logging import about
from delayq._reliable.ids import is_occurrence, schedule_of
from delayq._reliable.schedule_store import Occurrence
from delayq._reliable.timing import AHEAD, UnreadableSchedule, parse_schedule
from delayq.errors import BadInput, ConfigurationError, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.context import EngineContext
    from delayq._engine.dispatcher import Dispatcher
    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.replies import Claim
    from delayq._reliable.store import ReliableStore
    from delayq._reliable.timing import Timing
    from delayq._timer.wheel import Timeout

_log = logging.getLogger("delayq")

# When the server knows fewer moments of a cron expression than this, more are computed.
_REFILL_BELOW = AHEAD // 4
# Maximum number of schedules examined per script call.
_AT_A_TIME = 100
# How many of the clients that consume the queue make each regular check, on average.
_CHECKING_CLIENTS = 2
_NO_SUCH = -2


@dataclass(slots=True)
class _Round:
    """One pass over the schedules of a partition, in regular checks of a page each.

    Attributes:
        cursor: The position at which the next check begins.
        has_found_schedules: Whether the checks of this pass have found schedules.
        goes_on: Whether regular checks go on: the pass before has found schedules.
    """

    cursor: bytes = b"0"
    has_found_schedules: bool = False
    goes_on: bool = True


class Recurrence:
    """The recurring messages of one partition of a queue that is open on this client."""

    def __init__(
        self,
        store: ReliableStore,
        index: int,
        services: EngineContext,
        dispatcher: Dispatcher[Claim],
        *,
        free_slots: Callable[[Claim], None],
        clients: Callable[[], int],
    ) -> None:
        """Args:
        store: The partition's data on the server.
        index: The partition's number.
        services: The services the queue is built from.
        dispatcher: Takes claims back.
        free_slots: Frees the slots of a message that was cancelled.
        clients: Returns how many clients consume the partition, as far as is known.
        """
        self._store = store
        self._index = index
        self._dispatcher = dispatcher
        self._free_slots = free_slots
        self._clients = clients
        self._services = services
        # The schedules that are known to lack their next occurrences.
        self._lacking: set[str] = set()
        self._round = _Round()
        self._refilling: set[str] = set()
        self._timeout: Timeout | None = None
        self._closed = False

    async def schedule(
        self, partitions: int, name: str, timing: Timing, version: int, message: OptionsMessage
    ) -> datetime:
        """Make ``message`` recur, and return when it is due next.

        Raises SettingsChanged if the queue has another number of partitions.
        """
        moments = timing.moments(await self._store.now_us()) if timing.cron else []
        due_us = await self._store.schedule(partitions, name, timing, version, message, moments)
        self._check_later()
        return datetime_at(due_us)

    async def advance(self, items: list[Numbered[Claim]]) -> list[Numbered[Claim]]:
        """Put the next occurrences in place for messages that are about to be handed out.

        Returns the messages to hand out. Those of other partitions are not touched.
        """
        occurrences = [
            item for item in items if item[1].partition == self._index and is_occurrence(item[1].id)
        ]
        if not occurrences:
            return items
        claims = [claim for _, claim in occurrences]
        try:
            outcomes = await self._store.occur(claims)
        except ServerError as error:
            if isinstance(error, OutcomeUnknown):
                # The server may have dropped some of them. Those it has not dropped come again.
                self._dispatcher.give_back(occurrences)
                return [item for item in items if item not in occurrences]
            # Nothing was changed. The messages are handed out all the same: the next check puts the
            # missing occurrences in place.
            _log.warning(
                "queue %r: the occurrences that follow %d messages are not stored yet: %s",
                self._store.keys.name,
                len(claims),
                error,
                extra=about(self._store.keys.name),
            )
            outcomes = [Occurrence(is_handed_out=True, moments_ahead=-1)] * len(claims)
            self._lacking.update(_schedule_name(claim.id) for claim in claims)
        except BaseException:
            self._dispatcher.give_back(items)
            raise
        dropped = set()
        for claim, (handed_out, moments) in zip(claims, outcomes, strict=True):
            if moments != _NO_SUCH:
                self._check_later()
                self._refill_if_low(_schedule_name(claim.id), moments)
            if not handed_out:
                dropped.add(claim)
                # Perhaps it was cancelled, and has kept its slots.
                self._free_slots(claim)
        return [item for item in items if item[1] not in dropped]

    def on_dropped(self, occurrences: Iterable[bytes]) -> None:
        """Put the next occurrences in place after the server has dropped these."""
        self._lacking.update(map(_schedule_name, occurrences))
        self._check_soon()

    def start_checks(self) -> None:
        """Check now and then, because the server has schedules, and this process consumes."""
        if self._timeout is None:
            self._check_later()
            self._check_soon()

    async def check(self) -> None:
        """Ensure that the next occurrences are in place: of the schedules that are known to lack
        them, and of about a hundred others.

        It takes in more for as long as occurrences are missing.

        Raises:
            ServerError: The server could not be queried.
        """
        lacking, self._lacking = self._lacking, set()
        try:
            await self._put_in_place(lacking)
        except BaseException:
            self._lacking |= lacking
            raise
        while True:
            cursor, names = await self._store.schedule_names(self._round.cursor, _AT_A_TIME)
            self._round.has_found_schedules |= bool(names)
            added = await self._put_in_place(names)
            self._round.cursor = cursor
            if cursor == b"0":
                self._round = _Round(goes_on=self._round.has_found_schedules)
                return
            if not added:
                return

    async def _put_in_place(self, names: set[str]) -> int:
        """Return how many occurrences of these schedules were missing."""
        ordered, missing = sorted(names), 0
        for at in range(0, len(ordered), _AT_A_TIME):
            page = ordered[at : at + _AT_A_TIME]
            added, *moments = await self._store.recur(page)
            missing += added
            for name, count in zip(page, moments, strict=True):
                self._refill_if_low(name, count)
        return missing

    def close(self) -> None:
        """Stop checking schedules."""
        self._closed = True
        if self._timeout is not None:
            self._timeout.cancel()

    def _refill_if_low(self, name: str, moments: int) -> None:
        """Compute more moments of a schedule if the server knows few."""
        if 0 <= moments < _REFILL_BELOW and name not in self._refilling:
            self._refilling.add(name)
            self._services.background.spawn(self._refill(name), f"moments of {name}")

    async def _refill(self, name: str) -> None:
        try:
            entry = await self._store.schedule_entry(name)
            if entry is None:
                return
            facts, timing = parse_schedule(entry)
            after_us = int(facts["next"]) if facts["next"] else await self._store.now_us()
            await self._store.refill(name, timing, timing.moments(after_us))
        except (ServerError, ConfigurationError, BadInput, UnreadableSchedule) as error:
            _log.warning(
                "queue %r: cannot compute the occurrences of schedule %r here: %s",
                self._store.keys.name,
                name,
                error,
                extra=about(self._store.keys.name),
            )
        finally:
            self._refilling.discard(name)

    def _check_later(self) -> None:
        if self._timeout is None and not self._closed:
            self._timeout = self._services.timer.new_timeout(
                lambda _: self._on_timeout(), self._services.resync_interval
            )

    def _on_timeout(self) -> None:
        self._timeout = None
        if self._lacking or random.random() * self._clients() < _CHECKING_CLIENTS:
            self._check_soon()
        else:
            self._check_later()

    def _check_soon(self) -> None:
        if not self._closed:
            self._services.background.spawn(
                self._check_and_go_on(), f"schedules of {self._store.keys.name}"
            )

    async def _check_and_go_on(self) -> None:
        try:
            await self.check()
        except Exception as error:
            self._check_later()
            if not isinstance(error, ServerError):
                raise
            _log.warning(
                "queue %r: checking the schedules failed: %s",
                self._store.keys.name,
                error,
                extra=about(self._store.keys.name),
            )
        else:
            if self._round.goes_on:
                self._check_later()


def _schedule_name(occurrence: bytes) -> str:
    return schedule_of(occurrence).decode(errors="replace")
