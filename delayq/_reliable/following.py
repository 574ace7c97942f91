"""Follows messages from outside: their states, what handlers report, and their ends."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from delayq._checks import describe_value
from delayq._durations import datetime_at
from delayq._redis.retry import retry_delay
from delayq._reliable.failures import unpack_error
from delayq._reliable.replies import LiveState
from delayq.errors import (
    BadInput,
    Closed,
    OutcomeUnknown,
    ResultTimeout,
    ServerError,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime

    from delayq._reliable.message_context import MessageContext
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import Claim
    from delayq._reliable.store import Watched
    from delayq.errors import LeaseLost

EventState = Literal[LiveState, "done", "dead", "dropped", "unknown"]
_FINAL = ("done", "dead", "dropped", "unknown")
# Seconds between two reports of one message that reach the server.
_BETWEEN_REPORTS = 0.1
# For how many seconds the end of a message waits for the last report.
_FLUSH_WITHIN = 1.0
# The largest text of a report, characters.
_LONGEST_TEXT = 1000
# Seconds between two looks at a message of which nothing is announced: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0


@dataclass(frozen=True)
class MessageEvent:
    """A change of a message that is followed.

    Attributes:
        id: The message's id.
        state: As in :attr:`delayq.MessageHistory.state`. ``"unknown"`` if the message is gone, and
            the queue does not keep how it ended, or there was none of that id.
        attempt: The number of attempts that have begun.
        done: How much the handler has done, by its last report; None if it has reported nothing.
        total: How much there is to do, if it has reported that.
        text: Its current work in words, if it has reported that.
        at: When that was so, by the server's clock (UTC).
        error: For a dead letter, why it died, in one line.
    """

    id: str
    state: EventState
    attempt: int
    done: float | None
    total: float | None
    text: str | None
    at: datetime
    error: str = ""

    @property
    def is_final(self) -> bool:
        """Whether nothing more comes after it."""
        return self.state in _FINAL


class Report(NamedTuple):
    """The last report of a handler.

    Attributes:
        at_us: When, by the server's clock, in microseconds.
        done: How much is done.
        total: How much there is to do, if it said so.
        text: Its current work in words, if it said so.
    """

    at_us: int
    done: float
    total: float | None
    text: str | None


def read_report(report: bytes) -> Report | None:
    """Parse a report as ``progress.lua`` stores it; None if there is none, or it is damaged."""
    moment, _, text = report.partition(b" ")
    try:
        facts = json.loads(text)
        return Report(int(moment), facts["done"], facts["total"], facts["text"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


# Reports


class ProgressReporter:
    """Sends what the handler of one message reports: ten times a second at most, and the last
    report in any case.
    """

    def __init__(
        self, claim: Claim, context: MessageContext[Any], on_lost: Callable[[], LeaseLost]
    ) -> None:
        """``on_lost`` is called if a call finds that the lease is over, and returns the error."""
        self._claim = claim
        self._context = context
        self._on_lost = on_lost
        self._pending: str | None = None
        self._sent_at = -math.inf
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def report(self, done: float, total: float | None, text: str | None) -> None:
        """Send a report, or keep it until the next one may be sent. Raises as
        :meth:`Message.progress`.
        """
        self._pending = _packed(done, total, text)
        wait = self._sent_at + _BETWEEN_REPORTS - self._context.loop.time()
        if wait <= 0:
            if not await self._send():
                raise self._on_lost()
        elif self._sending is None:
            self._sending = self._context.loop.create_task(self._send_later(wait))

    async def flush(self) -> None:
        """Send the last report, if that is still to be done, and wait until it has arrived: not for
        long, because whatever ends the lease comes next.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_WITHIN):
                await self._send()

    async def _send_later(self, wait: float) -> None:
        await asyncio.sleep(wait)
        self._sending = None
        await self._send()

    async def _send(self) -> bool:
        """Send what is pending, behind any report that is on its way, and return whether the lease
        is still ours, as far as we know.
        """
        async with self._turn:
            report, self._pending = self._pending, None
            if report is None:
                return True
            self._sent_at = self._context.loop.time()
            try:
                return await self._context.partition.store.progress(self._claim, report)
            except (ServerError, Closed):
                # The work goes on without it, and the next report says more.
                return True


def _packed(done: float, total: float | None, text: str | None) -> str:
    _check_number("done", done)
    if total is not None:
        _check_number("total", total)
    if text is not None and (not isinstance(text, str) or len(text) > _LONGEST_TEXT):
        raise BadInput(f"text must be a str of at most {_LONGEST_TEXT} characters")
    return json.dumps({"done": done, "total": total, "text": text}, separators=(",", ":"))


def _check_number(name: str, number: float) -> None:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < math.inf:
        raise BadInput(f"{name} must be a number of at least 0, not {describe_value(number)}")


# Following


async def follow(
    queue: OpenReliableQueue,
    id: str,  # noqa: A002
    timeout: float | None,
) -> AsyncIterator[MessageEvent]:
    """Yield the changes of a message, as :meth:`ReliableQueue.follow` does."""
    for partition in queue.partitions:
        partition.listen()
    loop, notifications = queue.loop, queue.notifications
    deadline = math.inf if timeout is None else loop.time() + timeout
    follower, failures, pause = _Follower(id), 0, _FIRST_PAUSE
    with notifications.subscribed(id) as notified:
        while True:
            notified.clear()
            try:
                event = follower.event_of(await _look(queue, id, notifications.remembered_us))
                failures = 0
            except (ServerUnavailable, OutcomeUnknown):
                failures += 1
                event, pause = None, retry_delay(failures, longest=queue.services.retry_most)
            if event is not None:
                yield event
                if event.is_final:
                    return
                pause = _FIRST_PAUSE
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise ResultTimeout(id, timeout or 0.0)
            await notifications.pause(notified, min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)


async def _look(queue: OpenReliableQueue, id: str, remember_us: int) -> Watched:  # noqa: A002
    """Return what is known about a message, in whichever partition it lies."""
    last: Watched | None = None

    async def read(partition: Partition) -> Watched | None:
        nonlocal last
        watched = await partition.store.watch(id, remember_us)
        outcome = watched.outcome
        if last is None or outcome.moment_us > last.outcome.moment_us:
            last = watched
        return watched if outcome.is_live else None

    live = await queue.search(lambda: queue.candidates(id), read)
    assert last is not None
    return live or last


class _Follower:
    """The knowledge so far about a message that is followed."""

    def __init__(self, id: str) -> None:  # noqa: A002
        self._id = id
        # When it was offered, as its body has it: another message may get its id.
        self._offered = b""
        self._last: MessageEvent | None = None

    def event_of(self, watched: Watched) -> MessageEvent | None:
        """Return the event that follows from what is known now; None if nothing has changed."""
        event = self._final(watched) or self._live(watched)
        if self._last is not None and replace(event, at=self._last.at) == self._last:
            return None
        self._last = event
        return event

    def _live(self, watched: Watched) -> MessageEvent:
        self._offered = self._offered or watched.offered
        state: Any = watched.state
        at = datetime_at(watched.outcome.now_us)
        event = MessageEvent(self._id, state, watched.attempt, None, None, None, at)
        if (report := read_report(watched.report)) is None:
            return event
        return replace(
            event,
            done=report.done,
            total=report.total,
            text=report.text,
            at=datetime_at(report.at_us),
        )

    def _final(self, watched: Watched) -> MessageEvent | None:
        outcome, last = watched.outcome, self._last
        record, death = outcome.record, outcome.death
        is_another = self._offered not in (b"", watched.offered)
        if watched.state and not is_another:
            return None
        state: EventState = "dropped" if outcome.keeps and (record or last) else "unknown"
        at_us, error, attempt = outcome.now_us, "", 0 if last is None else last.attempt
        if record is not None and record.is_done and self._offered in (b"", record.offered):
            state, at_us = "done", record.moment_us
            attempt = record.attempts[-1].number if record.attempts else attempt
        elif death is not None:
            state, at_us = "dead", death.died_us
            error = unpack_error(death.error)[0] or death.reason
        known = last or MessageEvent(self._id, state, attempt, None, None, None, datetime_at(at_us))
        return replace(known, state=state, attempt=attempt, at=datetime_at(at_us), error=error)
