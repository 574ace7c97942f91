"""Recurring messages: one waiting message per name, however many processes schedule it.

The server keeps the schedules in one hash per queue: for each, a definition, the due time of the
next occurrence and, for a cron expression, the moments after it. An occurrence is a message like
any other, with the id ``name@moment``. The client that claims one puts the next in its place before
the handler sees it, in a single script that needs neither Python nor a time zone. No leader has to
be elected, and no worker's death ends a recurrence: an occurrence that was claimed but not yet
followed up comes back when its lease ends. A claim that drops an occurrence (because it is past its
time to live, or out of attempts) reports it, and the client puts the next one in place.

Anything else that may happen to the waiting occurrence (cancelled, purged) is found by a look once
per ``resync_interval``. A process looks if it has scheduled something, if it has received an
occurrence, or if the re-check has found schedules on the server while it waits for messages; of
many such processes, a few look each time. A look goes on where the last one of its process ended
and takes in about a hundred schedules, and more only as long as occurrences are missing: so it
costs the same however many schedules and processes there are. It never restores a definition: the
server's definition counts, and the last call wins.

All moments are by the server's clock. Occurrences missed while there was no consumer to claim them
run once, late, and then return to the schedule. An occurrence that comes due while the previous one
is still being handled or waiting for another attempt is skipped.
"""

from __future__ import annotations

import json
import logging
import random
import re
from typing import TYPE_CHECKING, Any

from delayq._durations import moment_us
from delayq._logging import about
from delayq._reliable.replies import Occurrence
from delayq._reliable.timing import AHEAD, Timing
from delayq.errors import BadInput, ConfigurationError, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.context import EngineContext
    from delayq._reliable.new_message import OptionsMessage
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import Claim
    from delayq._timer.wheel import Timeout

_log = logging.getLogger("delayq")

# When the server knows fewer moments of a cron expression than this, more are computed.
_FEW = AHEAD // 4
# Maximum number of schedules examined per script call.
_AT_A_TIME = 100
# How many of the clients that consume the queue take each regular look, on average.
_LOOKERS = 2
DIGITS = 16
"""An id ends in "@" and the microseconds since the epoch, which have sixteen digits from 2001 to
2286.
"""
_NO_SUCH = -2
_MOMENT = re.compile("[0-9]{1,20}")


def is_occurrence(id: bytes) -> bool:  # noqa: A002
    """Return whether a message may be an occurrence, judging by its id."""
    return id[-DIGITS - 1 : -DIGITS] == b"@" and id[-DIGITS:].isdigit()


def schedule_of(occurrence: bytes) -> bytes:
    """Return the name of the schedule to which the occurrence with this id belongs."""
    return occurrence[: -DIGITS - 1]


class Recurrence:
    """The recurring messages of one partition of a queue that is open on this client."""

    def __init__(self, partition: Partition, services: EngineContext) -> None:
        self._open = partition
        self._store = partition.store
        self._timer = services.timer
        self._background = services.background
        # How often a process looks at schedules, if there are any.
        self._interval = services.resync_interval
        # The schedules that are known to lack their next occurrences.
        self._lacking: set[str] = set()
        # Where the next look begins, and whether those since the first page have found any.
        self._cursor = b"0"
        self._has_found_any = False
        self._goes_on = True
        self._refilling: set[str] = set()
        self._timeout: Timeout | None = None

    async def schedule(
        self, partitions: int, name: str, timing: Timing, version: int, message: OptionsMessage
    ) -> datetime:
        """Make ``message`` recur, and return when it is due next.

        Raises SettingsChanged if the queue has another number of partitions.
        """
        moments = timing.moments(await self._store.now_us()) if timing.cron else []
        due_us = await self._store.schedule(partitions, name, timing, version, message, moments)
        self._keep_looking()
        return moment_us(due_us)

    async def unschedule(self, name: str) -> bool:
        """Stop a message from recurring.

        The looks go on until a worker has finished with the last occurrence.
        """
        return await self._store.unschedule(name)

    async def begin(self, taken: list[Numbered[Claim]]) -> list[Numbered[Claim]]:
        """Put the next occurrences in place for messages that are about to be handed out.

        Returns the messages to hand out. Those of other partitions are not touched.
        """
        recurring = [
            each
            for each in taken
            if each[1].partition == self._open.index and is_occurrence(each[1].id)
        ]
        if not recurring:
            return taken
        claims = [claim for _, claim in recurring]
        try:
            outcomes = await self._store.occur(claims)
        except ServerError as error:
            if isinstance(error, OutcomeUnknown):
                # The server may have dropped some of them. Those it has not dropped come again.
                self._open.queue.dispatcher.give_back(recurring)
                return [one for one in taken if one not in recurring]
            # Nothing was changed. The messages are handed out all the same: the next look finds
            # what is missing.
            _log.warning(
                "queue %r: the occurrences that follow %d messages are not stored yet: %s",
                self._open.name,
                len(claims),
                error,
                extra=about(self._open.name),
            )
            outcomes = [Occurrence(handed_out=True, left=-1)] * len(claims)
            self._lacking.update(_name_of(claim.id) for claim in claims)
        except BaseException:
            self._open.queue.dispatcher.give_back(taken)
            raise
        dropped = set()
        for claim, (handed_out, left) in zip(claims, outcomes, strict=True):
            if left != _NO_SUCH:
                self._keep_looking()
                self._heed(_name_of(claim.id), left)
            if not handed_out:
                dropped.add(claim)
                # Perhaps it was cancelled, and has kept its slots.
                self._open.acknowledger.stopped(claim)
        return [one for one in taken if one[1] not in dropped]

    def follow_up(self, occurrences: Iterable[bytes]) -> None:
        """Put the next occurrences in place after the server has dropped these."""
        self._lacking.update(map(_name_of, occurrences))
        self._look_soon()

    def attend(self) -> None:
        """Look now and then, because the server has schedules, and this process consumes."""
        if self._timeout is None:
            self._keep_looking()
            self._look_soon()

    async def look(self) -> None:
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
            cursor, names = await self._store.schedule_names(self._cursor, _AT_A_TIME)
            self._has_found_any |= bool(names)
            added = await self._put_in_place(names)
            self._cursor = cursor
            if cursor == b"0":
                self._goes_on, self._has_found_any = self._has_found_any, False
                return
            if not added:
                return

    async def _put_in_place(self, names: set[str]) -> int:
        """Return how many occurrences of these schedules were missing."""
        ordered, missing = sorted(names), 0
        for at in range(0, len(ordered), _AT_A_TIME):
            page = ordered[at : at + _AT_A_TIME]
            added, *others = await self._store.recur(page)
            missing += added
            for name, left in zip(page, others, strict=True):
                self._heed(name, left)
        return missing

    def close(self) -> None:
        """Stop looking at schedules."""
        if self._timeout is not None:
            self._timeout.cancel()

    def _heed(self, name: str, left: int) -> None:
        if 0 <= left < _FEW and name not in self._refilling:
            self._refilling.add(name)
            self._background.spawn(self._refill(name), f"moments of {name}")

    async def _refill(self, name: str) -> None:
        try:
            record = await self._store.schedule_record(name)
            if record is None:
                return
            facts, timing = read(record)
            after_us = int(facts["next"]) if facts["next"] else await self._store.now_us()
            await self._store.refill(name, timing, timing.moments(after_us))
        except (ServerError, ConfigurationError, BadInput, Unreadable) as error:
            _log.warning(
                "queue %r: cannot compute the occurrences of schedule %r here: %s",
                self._open.name,
                name,
                error,
                extra=about(self._open.name),
            )
        finally:
            self._refilling.discard(name)

    def _keep_looking(self) -> None:
        if self._timeout is None and not self._open.closed:
            self._timeout = self._timer.new_timeout(lambda _: self._due(), self._interval)

    def _due(self) -> None:
        self._timeout = None
        clients = self._open.wakeups.plan.stagger.clients
        if self._lacking or random.random() * clients < _LOOKERS:
            self._look_soon()
        else:
            self._keep_looking()

    def _look_soon(self) -> None:
        if not self._open.closed:
            self._background.spawn(self._look_again(), f"schedules of {self._open.name}")

    async def _look_again(self) -> None:
        try:
            await self.look()
        except Exception as error:
            self._keep_looking()
            if not isinstance(error, ServerError):
                raise
            self._log_failed(error)
        else:
            if self._goes_on:
                self._keep_looking()

    def _log_failed(self, error: ServerError) -> None:
        _log.warning(
            "queue %r: checking the schedules failed: %s",
            self._open.name,
            error,
            extra=about(self._open.name),
        )


def _name_of(occurrence: bytes) -> str:
    return schedule_of(occurrence).decode(errors="replace")


class Unreadable(Exception):
    """Raised when the data stored on the server cannot be read as the record of a schedule."""


def read(record: bytes) -> tuple[dict[str, Any], Timing]:
    """Parse the record of a schedule. Returns its facts and its timing. Raises
    :class:`Unreadable`.
    """
    try:
        facts: dict[str, Any] = json.loads(record.partition(b"\n")[0])
        moments = facts["next"], facts["last"]
        if not all(moment == "" or _MOMENT.fullmatch(moment) for moment in moments):
            raise ValueError(moments)  # noqa: TRY301
        facts["priority"], facts["version"] = int(facts["priority"]), int(facts["version"])
        facts["paused"] = bool(facts.get("paused"))
        return facts, Timing.parse(facts["timing"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise Unreadable(f"the schedule's record cannot be read: {type(error).__name__}") from None
