"""The relay: stores the rows of an outbox in their queues, and deletes them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delayq._engine.durability import parse as parse_durability
from delayq._logging import about
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.retry import retry_delay
from delayq._reliable.offer import ENDS_EARLY_TEXT, OfferOutcome
from delayq.errors import BadDelay, BadInput, ConfigurationError, DelayqError, DuplicateMessage
from delayq.outbox._rows import Mark, Result, error_text, new_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.relay_port import RelayPort
    from delayq.client import Client
    from delayq.outbox._rows import RowBatch, Rows

R = TypeVar("R")

_log = logging.getLogger("delayq.outbox")

POLL_INTERVAL = 1.0
"""How often a relay looks for rows of which it was not notified, seconds."""
# How long the batch of another relay stays as it is until that relay counts as dead, seconds.
_TAKE_OVER_AFTER = 2.0
# A batch that was read before this is read again before it is sent, seconds: another relay may have
# sent it since, and the server forgets those of which the rows are deleted.
_STALE_AFTER = 60.0
# The largest number of transactions at a time, and the longest pause between tries, seconds.
_CONNECTIONS, _LONGEST_PAUSE = 4, 5.0


class Database(Protocol):
    """The database of an outbox."""

    async def run(self, work: Callable[[Any], R], /) -> R:
        """Call a function with a connection, in a transaction, and commit it.

        Raises whatever the function or the database raises; then, nothing is changed.
        """

    def opened(
        self, notified: Callable[[str], object] | None, /
    ) -> AbstractAsyncContextManager[object]:
        """Keep the database open in the block, and call ``notified`` with the queue of each row
        that is committed, where the database announces them.
        """


@dataclass(frozen=True)
class RelayCounts:
    """How many rows a relay has handled.

    Attributes:
        stored: Those that are stored in their queues, and deleted.
        set_aside: Those that never can be.
    """

    stored: int
    set_aside: int


class Relay:
    """Stores the messages of an outbox in their queues.

    Create one with :meth:`Outbox.relay`. Several may run, in any number of processes. Those of one
    queue are stored in the order of their rows.

    Attributes:
        name: The outbox's table.
    """

    def __init__(
        self, name: str, rows: Rows, database: Database, durability: str | None = None
    ) -> None:
        """Args:
        name: The name of the outbox in the log.
        rows: Its rows.
        database: Its database.
        durability: How safe messages must be before their rows are deleted.
        """
        if durability is not None:
            parse_durability(durability)
        self.name: str = name
        self._rows = rows
        self._database = database
        self._durability = durability
        self._counts = RelayCounts(0, 0)

    @property
    def counts(self) -> RelayCounts:
        """How many rows this relay has handled."""
        return self._counts

    @asynccontextmanager
    async def running(self, client: Client) -> AsyncIterator[None]:
        """Relay rows, in the background, until the block ends.

        A batch that is on its way then is finished.

        Args:
            client: An open client of the server on which the queues are.

        Raises:
            ConfigurationError: The table cannot be read.
        """
        run = _Run(self, client)
        async with self._database.opened(run.notify):
            await self.check()
            task = asyncio.create_task(run.run(), name=f"delayq relay {self.name}")
            try:
                yield
            finally:
                run.stop()
                # Shielded: a batch that was sent is finished, or the next relay has to send it
                # again.
                await asyncio.shield(task)

    async def drain(self, client: Client) -> RelayCounts:
        """Relay the rows that are there, and return how many.

        Waits for rows of queues that are full, and for a server that does not answer.

        Raises:
            ConfigurationError: The table cannot be read.
        """
        before = self._counts
        run = _Run(self, client)
        async with self._database.opened(None):
            await self.check()
            try:
                await run.drain()
            finally:
                run.stop()
        now = self._counts
        return RelayCounts(now.stored - before.stored, now.set_aside - before.set_aside)

    async def check(self) -> None:
        """Raise ConfigurationError if the table cannot be read."""
        try:
            await self.queues()
        except DelayqError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the outbox {self.name!r} cannot be read: {type(error).__name__}: {error}"
            ) from error

    async def queues(self) -> Sequence[str]:
        """Return the names of the queues that have rows."""
        return await self._database.run(self._rows.queues)

    async def step(
        self,
        queue: str,
        result: Result | None,
        new_mark: Callable[[Sequence[int]], Mark] | None,
    ) -> RowBatch | None:
        """Finish a batch of a queue, and begin the next one, in one transaction."""

        def work(connection: Any) -> RowBatch | None:
            if result is not None:
                self._rows.finish(connection, queue, result)
                if new_mark is None:
                    return None
            return self._rows.begin(connection, queue, new_mark)

        return await self._database.run(work)

    def open_port(self, client: Client, queue: str) -> RelayPort:
        """Open a queue. Raises BadName if it can have no such name."""
        if self._durability is None:
            return client.reliable_queue(queue).relay_port()
        return client.reliable_queue(queue, durability=self._durability).relay_port()

    def count(self, result: Result) -> None:
        """Count the rows of a batch that is finished."""
        before = self._counts
        self._counts = RelayCounts(
            before.stored + len(result.stored), before.set_aside + len(result.errors)
        )

    def __repr__(self) -> str:
        return f"<Relay of {self.name!r}>"


class _Run:
    """One run of a relay: a task for each queue that has rows."""

    def __init__(self, relay: Relay, client: Client) -> None:
        self._relay = relay
        self._client = client
        self._stopping = asyncio.Event()
        self._notified = asyncio.Event()
        self._connections = asyncio.Semaphore(_CONNECTIONS)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Queues of which a row was announced while their task was at work.
        self._announced: set[str] = set()
        # The tokens of other relays' batches, by queue, and since when they are the same.
        self._others: dict[str, tuple[str, float]] = {}
        self._ports: dict[str, RelayPort | BadInput] = {}

    def notify(self, queue: str) -> None:
        """Look for rows of a queue at once."""
        self._announced.add(queue)
        self._notified.set()

    def stop(self) -> None:
        """Begin no other batch."""
        self._stopping.set()
        self._notified.set()

    async def run(self) -> None:
        """Relay rows until the stop."""
        failures = 0
        while not self._stopping.is_set():
            self._notified.clear()
            announced, self._announced = self._announced, set()
            try:
                for queue in announced or await self._relay.queues():
                    self._start(queue)
                failures = 0
            except Exception as error:  # noqa: BLE001 - of any database's driver
                failures += 1
                self._warn(error)
            pause = retry_delay(failures, longest=_LONGEST_PAUSE) if failures else POLL_INTERVAL
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._notified.wait()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def drain(self) -> None:
        """Relay the rows that are there."""
        while True:
            for queue in await self._relay.queues():
                self._start(queue)
            if not self._tasks:
                return
            await asyncio.wait(self._tasks.values())
            if self._others:
                await asyncio.sleep(_TAKE_OVER_AFTER / 10)

    def _start(self, queue: str) -> None:
        if queue not in self._tasks and not self._stopping.is_set():
            task = asyncio.create_task(self._relay_queue(queue), name=f"delayq relay of {queue}")
            self._tasks[queue] = task
            task.add_done_callback(lambda _: self._tasks.pop(queue))

    async def _relay_queue(self, queue: str) -> None:
        """Relay the rows of one queue, until there are none, or another relay is at work."""
        result: Result | None = None
        failures = 0
        while result is not None or not self._stopping.is_set():
            try:
                read_at = monotonic()
                batch = await self._next(queue, result)
                if result is not None:
                    self._relay.count(result)
                    result = None
                if batch is None:
                    return
                if monotonic() - read_at < _STALE_AFTER:
                    result = await self._send(queue, batch)
                    failures = failures + 1 if result.unsent else 0
            except Exception as error:  # noqa: BLE001 - of any database's driver
                self._warn(error, queue)
                failures += 1
                if failures > 1 and self._stopping.is_set():
                    # The next relay sends the batch again, which stores nothing twice.
                    return
            if failures:
                await self._pause(failures)

    async def _next(self, queue: str, result: Result | None) -> RowBatch | None:
        """Finish a batch, and begin the next one of a queue: None if there is none to send."""
        token = new_token()
        new_mark: Callable[[Sequence[int]], Mark] | None = None
        if not self._stopping.is_set():
            # What cannot be a queue has no partitions, and errors for all of its rows.
            port = self._port(queue)
            partitions = 1 if isinstance(port, BadInput) else await port.partitions()
            new_mark = partial(Mark, token, partitions)
        async with self._connections:
            batch = await self._relay.step(queue, result, new_mark)
        if result is not None:
            await self._forget(queue, result)
        if batch is None or batch.mark.token == token:
            self._others.pop(queue, None)
            return batch
        return batch if self._takes_over(queue, batch.mark.token) else None

    async def _forget(self, queue: str, result: Result) -> None:
        port = self._port(queue)
        # If this fails, the server remembers the batch for longer than it has to.
        with suppress(DelayqError):
            if not isinstance(port, BadInput):
                await port.forget(result.mark.token)

    def _port(self, queue: str) -> RelayPort | BadInput:
        """Return a queue, which is opened for the first call only, or why it cannot be one."""
        if (port := self._ports.get(queue)) is None:
            try:
                port = self._relay.open_port(self._client, queue)
            except BadInput as error:
                port = error
            self._ports[queue] = port
        return port

    def _takes_over(self, queue: str, token: str) -> bool:
        """Return whether to send a batch that another relay has begun, which may have died."""
        now = monotonic()
        known, since = self._others.get(queue, ("", now))
        if known != token:
            since = now
        self._others[queue] = (token, since)
        return now - since >= _TAKE_OVER_AFTER

    async def _send(self, queue: str, batch: RowBatch) -> Result:
        """Store the messages of a batch, and return what became of it.

        Raises the first error for which the batch has to be sent again.
        """
        port, errors = self._port(queue), dict[int, str]()
        messages: dict[int, OptionsMessage] = {}
        for row in batch.rows:
            try:
                if isinstance(port, BadInput):
                    raise port
                messages[row.number] = row.message(batch.now_us)
            except BadInput as error:
                errors[row.number] = error_text(error)
        unsent: set[int] = set()
        if not isinstance(port, BadInput):
            mark = batch.mark
            outcomes = await port.store(mark.token, mark.partitions, [*messages.values()])
            for (number, message), outcome in zip(messages.items(), outcomes, strict=True):
                if isinstance(outcome, SettingsChanged) or outcome in (None, OfferOutcome.FULL):
                    unsent.add(number)
                elif isinstance(outcome, DelayqError):
                    raise outcome
                elif (refusal := _refusal(message, outcome)) is not None:
                    errors[number] = error_text(refusal)
        for number, reason in errors.items():
            _log.error(
                "outbox %r: row %d of queue %r is set aside, because it can never be stored: %s",
                self._relay.name,
                number,
                queue,
                reason,
                extra=about(queue),
            )
        return Result(batch.mark, errors, frozenset(unsent))

    async def _pause(self, failures: int) -> None:
        """Wait before the next try, or until the stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(retry_delay(failures, longest=_LONGEST_PAUSE)):
                await self._stopping.wait()

    def _warn(self, error: Exception, queue: str = "") -> None:
        _log.warning(
            "outbox %r%s: relaying failed, and is tried again: %s: %s",
            self._relay.name,
            f", queue {queue!r}" * bool(queue),
            type(error).__name__,
            error,
        )


def _refusal(message: OptionsMessage, outcome: OfferOutcome | None) -> DelayqError | None:
    """Return why a message can never be stored; None if it is, or can be."""
    if outcome is OfferOutcome.DUPLICATE:
        return DuplicateMessage((message.id,))
    return BadDelay(ENDS_EARLY_TEXT) if outcome is OfferOutcome.ENDS_EARLY else None
