"""Gathers messages into batches, for listeners that handle many at a time.

Each message of a batch is handled like any other: it holds its own lease, and settles itself. Only
its handler is shared. So the batch that fails is retried message by message, as the attempts and
the backoff of each one say.
"""
# ruff: noqa: SLF001 - the worker and the queue are one library

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from logging import ERROR, INFO
from typing import TYPE_CHECKING, Any

from delayq._logging import log
from delayq._reliable.message import instruction_of, is_instruction
from delayq.worker._handling import Handling, below_the_worker, settle, tell
from delayq.worker._threads import NotBegun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._reliable.message import Message


class BatchFailed(Exception):
    """The handler of a batch has failed: raised for each of its messages.

    Attributes:
        error: The exception that the handler raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error: BaseException = error


@dataclass(eq=False)
class _Member:
    """A message that is in a batch, or waits for one.

    Attributes:
        message: The message.
        until: When its batch begins at the latest, even if it is not full, in loop time.
        outcome: The outcome of its batch: the result of the message.
        begun: Called when its batch begins.
        batch: Its batch, once that has begun.
    """

    message: Message[Any]
    until: float
    outcome: asyncio.Future[Any]
    begun: Callable[[], None] | None
    batch: _Batch | None = None


@dataclass(eq=False)
class _Batch:
    members: Sequence[_Member]
    task: asyncio.Task[None] = field(init=False)


class Batches:
    """Gathers messages into batches, and calls a function for each batch."""

    def __init__(
        self,
        handle: Callable[[list[Message[Any]]], Awaitable[Sequence[Any] | None]],
        *,
        size: int,
        linger: float,
        concurrency: int,
    ) -> None:
        """Args:
        handle: Handles a batch, and returns the result of each message; nothing if there are none.
        size: The largest number of messages in one.
        linger: How long a message waits for others, in seconds.
        concurrency: Number of batches at a time.
        """
        self._handle = handle
        self._size = size
        self._linger = linger
        self._concurrency = concurrency
        self._waiting: deque[_Member] = deque()
        self._running: set[_Batch] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Each batch has a copy, so that it sees no variable that a message or a batch has set.
        self._context = copy_context()

    def set_concurrency(self, concurrency: int) -> None:
        """Change the number of batches at a time. With none, the messages that wait are given up.

        They raise :class:`NotBegun`.
        """
        self._concurrency = concurrency
        while not concurrency and self._waiting:
            member = self._waiting.popleft()
            if not member.outcome.done():
                member.outcome.set_exception(NotBegun("all threads of the listener hang"))
        self._begin()

    def hurry(self) -> None:
        """Begin with the messages that wait for others, because no others will come."""
        self._linger = 0.0
        for member in self._waiting:
            member.until = 0.0
        self._begin()

    async def join(self, message: Message[Any], begun: Callable[[], None] | None = None) -> Any:
        """Have a message handled in a batch, and wait for its result. Call ``begun`` when the batch
        begins.

        If this is cancelled before the batch ends, the batch goes on for its other messages.

        Raises:
            BatchFailed: The handler has raised an error.
            NotBegun: There was no thread for the handler.
        """
        loop = asyncio.get_running_loop()
        member = _Member(message, loop.time() + self._linger, loop.create_future(), begun)
        self._waiting.append(member)
        self._begin()
        try:
            return await member.outcome
        except asyncio.CancelledError:
            batch = member.batch
            if not member.outcome.cancelled():
                # The batch has ended, so it is too late.
                return member.outcome.result()
            if batch is None:
                if member in self._waiting:
                    self._waiting.remove(member)
            elif all(each.outcome.cancelled() for each in batch.members):
                batch.task.cancel()
                await asyncio.wait((batch.task,))
            raise

    def _begin(self) -> None:
        """Begin the batches that are full, or have waited for long enough."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self._concurrency:
            first = self._waiting[0]
            if len(self._waiting) < self._size and loop.time() < first.until:
                if self._timer is None:
                    self._timer = loop.call_at(first.until, self._timer_rang)
                return
            if any(each.outcome.done() for each in self._waiting):
                # They are cancelled, and about to leave.
                self._waiting = deque(each for each in self._waiting if not each.outcome.done())
                continue
            count = min(self._size, len(self._waiting))
            batch = _Batch([self._waiting.popleft() for _ in range(count)])
            for member in batch.members:
                member.batch = batch
                if member.begun is not None:
                    member.begun()
            self._running.add(batch)
            batch.task = loop.create_task(
                self._run(batch), name="delayq batch", context=self._context.copy()
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timer_rang(self) -> None:
        self._timer = None
        self._begin()

    async def _run(self, batch: _Batch) -> None:
        failure: BaseException | None = None
        results: Sequence[Any] | None = None
        try:
            results = await self._handle([member.message for member in batch.members])
        except BaseException as error:  # noqa: BLE001 - any error is for the messages
            failure = error
        of_each = dict(zip(batch.members, results or (), strict=False))
        members = [member for member in batch.members if not member.outcome.done()]
        left = [member.outcome for member in members]
        for member, each in zip(members, left, strict=True):
            if failure is None:
                each.set_result(of_each.get(member))
            elif isinstance(failure, NotBegun):
                each.set_exception(NotBegun(*failure.args))
            elif each is left[0] and isinstance(failure, KeyboardInterrupt):
                # One of the messages ends the worker, once the message was given back.
                each.set_exception(failure)
            else:
                each.set_exception(BatchFailed(failure))
        self._running.discard(batch)
        self._begin()


class BatchHandling(Handling):
    """Handles the messages of a listener that takes batches."""

    def gather(self, concurrency: int) -> None:
        """Begin to gather batches, of which this many are handled at a time."""
        settings = self._listener.settings
        assert settings.batch is not None
        self._concurrency, self._batch = concurrency, settings.batch
        self._batches = Batches(
            self._handle, size=self._batch, linger=settings.linger, concurrency=concurrency
        )
        # One batch gathers while the others are handled.
        self.places: int = self._batch * (concurrency + 1)
        # The limit is that of a batch, not that of a message, which waits for others.
        self._limit, self._timeout = self._timeout, None
        self._is_bare = False

    def hurry(self) -> None:
        self._batches.hurry()

    def threads_changed(self, most: int) -> int:
        free = max(0, self._concurrency - self.threads.hanging)
        self._batches.set_concurrency(free)
        return min(most, self._batch * (free + 1)) if free else 0

    async def _call(self, message: Message[Any], value: Any) -> Any:
        del value  # the message has it
        # Decoding has parsed the body if there is anything of its own in it.
        own = None if message._parsed is None else message.timeout
        if own is None:
            return await self._batches.join(message)
        # The time in which it waits for others, or for another batch, does not count.
        limit, now = asyncio.timeout(None), asyncio.get_running_loop().time
        joined = self._batches.join(message, lambda: limit.reschedule(now() + own))
        return await self._within(own, joined, limit)

    def _limit_of(self, message: Message[Any]) -> float | None:
        del message  # its limit begins with its batch
        return None

    async def _handle(self, messages: list[Message[Any]]) -> Sequence[Any]:
        takes_messages = self._plan.takes_message
        # The list is the handler's own.
        first = [each if takes_messages else each.value for each in messages]
        call = self._call_handler(first, {**self._made})
        try:
            result = await (call if self._limit is None else self._within(self._limit, call))
            return self._of_each(result, messages)
        except BaseException as error:
            error.with_traceback(below_the_worker(error.__traceback__))
            said = instruction_of(error) if is_instruction(error) else None
            count = len(messages)
            if said is not None:
                text = "a batch of %d messages was answered with %s: %s"
                log(INFO, self._queue, text, count, type(said).__name__, said)
            elif not (
                isinstance(error, NotBegun | KeyboardInterrupt)
                # All of its messages have left it, or the worker ends.
                or (isinstance(error, asyncio.CancelledError) and _is_cancelled())
            ):
                log(ERROR, self._queue, "a batch of %d messages failed", count, error=error)
            raise

    def _of_each(self, result: Any, messages: Sequence[Message[Any]]) -> Sequence[Any]:
        """Return the result of each message of a batch; nothing if results are not kept."""
        if result is None or not messages[0].keeps_result:
            return ()
        if isinstance(result, list | tuple) and len(result) == len(messages):
            return result
        # The batch was handled; perhaps results are kept only since a setting has changed.
        text = (
            "the handler of a batch of %d messages returned a %s: no results are stored. Return a"
            " list of as many results, or None"
        )
        log(ERROR, self._queue, text, len(messages), type(result).__name__)
        return ()

    async def _failed(self, message: Message[Any], error: BaseException) -> None:
        if not isinstance(error, BatchFailed):
            await super()._failed(message, error)
        elif isinstance(error.error, KeyboardInterrupt):
            await settle(message, message.release)
        else:
            tell(message, error.error)
            error.error.with_traceback(below_the_worker(error.error.__traceback__))
            await settle(message, partial(self._retry, message, error.error))


def _is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
