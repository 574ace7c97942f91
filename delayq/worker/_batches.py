"""Gathers messages into batches, for listeners that handle many at a time.

Each message of a batch is handled like any other: it holds its own lease, and settles itself. Only
its handler is shared. So the batch that fails is retried message by message, as the attempts and
the backoff of each one say.

While batches are quick, the next one gathers as they are handled. While they take long, and under a
rate, none does: its messages would be out of reach for other workers, or begin in another window
than that in which their start was counted.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from logging import ERROR, INFO
from typing import TYPE_CHECKING, Any

from delayq._engine import prefetch
from delayq._logging import log
from delayq._reliable.failures import instruction_of, is_instruction
from delayq.worker._handling import Handling, below_the_worker, settle
from delayq.worker._threads import NotBegun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from delayq._reliable.consumer import WorkerMessage
    from delayq._reliable.replies import Claim, Start
    from delayq.worker._handling import Middleware
    from delayq.worker._injection import Dependency
    from delayq.worker._listeners import Listener
    from delayq.worker._threads import Threads

# How long the messages of a claim have to join at least, in seconds: whatever is around the handler
# may wait for something, even if nothing is to linger.
_MIN_JOIN_TIME = 0.05
# The number of messages that came too late for their batches and are remembered.
_MAX_LATE = 1000


class BatchFailed(Exception):
    """The handler of a batch has failed: raised for each of its messages.

    Attributes:
        error: The exception that the handler raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error: BaseException = error


class NotNow(BaseException):
    """Raised for a message that does not get into a batch in time, and goes back.

    No ``Exception``: a middleware does not take it for an error of the handler.
    """


@dataclass(eq=False)
class _Wave:
    """Messages that were claimed together, whose starts a rate has counted.

    Attributes:
        remaining: Number of those that have yet to join.
        claimed_at: When they were claimed, in loop time.
        deadline: How long the others wait for these, in loop time.
    """

    remaining: int
    claimed_at: float
    deadline: float


@dataclass(eq=False)
class _Member:
    """A message that is in a batch, or waits for one.

    Attributes:
        message: The message.
        deadline: When its batch begins at the latest, even if it is not full, in loop time.
        expires_at: When it must not be handled any more, in loop time.
        outcome: The outcome of its batch: the result of the message.
        on_begin: Called when its batch begins.
        start: Its start, if a rate has counted it.
        wave: The messages with which it was claimed, in that case.
        batch: Its batch, once that has begun.
    """

    message: WorkerMessage[Any]
    deadline: float
    expires_at: float
    outcome: asyncio.Future[Any]
    on_begin: Callable[[], None] | None
    start: Start | None = None
    wave: _Wave | None = None
    batch: _Batch | None = None


@dataclass(eq=False)
class _Batch:
    members: Sequence[_Member]
    task: asyncio.Task[None] = field(init=False)


@dataclass
class _Pace:
    """How the batches of a listener go.

    Attributes:
        is_quick: Whether the last one took no longer than a moment.
        is_rated: Whether a rate has counted the start of the last message that joined.
        end_count: Number of batches that have ended.
        check: Checks after a moment whether messages wait for batches that take long.
        capacity: The last known capacity.
        starts: When a rate counted the starts of the last batches, by the server's clock, and when
            these began, in loop time.
    """

    is_quick: bool = False
    is_rated: bool = False
    end_count: int = 0
    check: asyncio.TimerHandle | None = None
    capacity: int = 0
    starts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=100))

    def record_start(self, start: Start) -> None:
        """Note that messages with this start begin now."""
        self.starts.append((start.at_us, asyncio.get_running_loop().time()))

    def earliest(self, start: Start) -> float:
        """Return when a message with this start may begin, in loop time."""
        for at_us, began_at in reversed(self.starts):
            if at_us + start.period_us <= start.at_us:
                return began_at + start.period_us / 1_000_000
        return 0.0


class Batches:
    """Gathers messages into batches, and calls a function for each batch."""

    def __init__(
        self,
        handle: Callable[[list[WorkerMessage[Any]]], Awaitable[Sequence[Any] | None]],
        *,
        size: int,
        linger: float,
        concurrency: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        handle: Handles a batch, and returns the result of each message; nothing if there are none.
        size: The largest number of messages in one.
        linger: How long a message waits for others, in seconds.
        concurrency: Number of batches at a time.
        on_change: Called when :attr:`capacity` has changed.
        """
        self._handle = handle
        self._size = size
        self._linger = linger
        self._concurrency = concurrency
        self._waiting: deque[_Member] = deque()
        self._running: set[_Batch] = set()
        # Messages that have yet to join.
        self._expected: dict[Claim, _Wave] = {}
        # How long messages took that came too late, by id.
        self._late: dict[bytes, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._on_change = on_change
        self._pace = _Pace()
        self._pace.capacity = self.capacity
        # Each batch has a copy, so that it sees no variable that a message or a batch has set.
        self._context = copy_context()

    @property
    def gathers_ahead(self) -> bool:
        """Whether messages may wait for a batch while others are handled."""
        return self._pace.is_quick and not self._pace.is_rated

    @property
    def capacity(self) -> int:
        """Number of messages that may be in batches, or wait for one."""
        if self.gathers_ahead:
            return self._size * (self._concurrency + 1)
        free = max(0, self._concurrency - len(self._running))
        return self._size * free + sum(len(batch.members) for batch in self._running)

    def _check_capacity(self) -> None:
        if (capacity := self.capacity) != self._pace.capacity:
            self._pace.capacity = capacity
            self._on_change()

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
            member.deadline = 0.0
            if member.wave is not None:
                member.wave.deadline = 0.0
        for wave in self._expected.values():
            wave.deadline = 0.0
        self._begin()

    def expect(self, claims: Iterable[Claim]) -> None:
        """Note that these messages, which were claimed together, are about to join, as far as a
        rate has counted their starts: unless :meth:`expect_no_more` says that one does not.

        Those that join wait for the others: for a moment longer than the linger, and for half a
        period at most, so that they begin in the window of their claim. For one that came too late
        before, they wait as long as it took, or it might never be handled.
        """
        starts = {claim: start for claim in claims if (start := claim.start) is not None}
        if not starts:
            return
        period = max(start.period_us for start in starts.values()) / 1_000_000
        patience = min(self._linger + _MIN_JOIN_TIME, period / 2)
        if self._late:
            late = max(self._late.get(claim.id, 0.0) for claim in starts)
            patience = max(patience, min(late, period - _MIN_JOIN_TIME))
        now = asyncio.get_running_loop().time()
        self._expected |= dict.fromkeys(starts, _Wave(len(starts), now, now + patience))

    def expect_no_more(self, claims: Iterable[Claim]) -> None:
        """Note that these messages have joined, or are not going to."""
        is_complete = False
        for claim in claims:
            if (wave := self._expected.pop(claim, None)) is not None:
                wave.remaining -= 1
                if not wave.remaining:
                    wave.deadline, is_complete = 0.0, True
        if is_complete:
            self._begin()

    async def join(
        self,
        message: WorkerMessage[Any],
        on_begin: Callable[[], None] | None = None,
        *,
        start: Start | None = None,
        expires_at: float = math.inf,
    ) -> Any:
        """Have a message handled in a batch, and wait for its result. Call ``on_begin`` when the
        batch begins.

        If a rate has counted its ``start``, it waits for no others but those that were claimed with
        it, as :meth:`expect` says; and at least for the period of the rate after those that began
        in the window before. So windows stay apart, even if a reply comes late. After
        ``expires_at``, in loop time, it is not handled any more.

        If this is cancelled before the batch ends, the batch goes on for its other messages.

        Raises:
            BatchFailed: The handler has raised an error.
            NotBegun: There was no thread for the handler.
            NotNow: The message should go back, because it would wait for too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._linger
        member = _Member(message, deadline, expires_at, loop.create_future(), on_begin, start)
        self._waiting.append(member)
        self._pace.is_rated = start is not None
        if start is not None:
            member.wave = self._expected.get(message.claim) or _Wave(0, 0.0, 0.0)
            self.expect_no_more([message.claim])
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
            elif all(sibling.outcome.cancelled() for sibling in batch.members):
                batch.task.cancel()
                await asyncio.wait((batch.task,))
            elif not batch.task.done():
                # The handler goes on with this message, too, which keeps its slots if it is
                # cancelled.
                message.handler_outlives()
                batch.task.add_done_callback(lambda _: message.handler_ended())
            raise

    def _begin(self) -> None:
        """Begin the batches that are full, or have waited for long enough."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self._concurrency:
            first = self._waiting[0]
            is_full = len(self._waiting) >= self._size and first.wave is None
            if not is_full and loop.time() < (begins_at := self._begins_at(first)):
                self._begin_at(begins_at)
                self._check_capacity()
                return
            if not self._are_ready(loop.time()):
                continue
            batch = _Batch(self._take(loop.time()))
            for member in batch.members:
                member.batch = batch
                if member.wave is not None:
                    self._late.pop(member.message.claim.id, None)
                if member.on_begin is not None:
                    member.on_begin()
            self._running.add(batch)
            batch.task = loop.create_task(
                self._run(batch), name="delayq batch", context=self._context.copy()
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._pace.check is None:
            self._pace.check = loop.call_later(
                prefetch.WITHIN, self._check_pace, self._pace.end_count
            )
        self._check_capacity()

    def _begin_at(self, moment: float) -> None:
        if self._timer is not None and self._timer.when() > moment:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(moment, self._on_timer)

    def _begins_at(self, member: _Member) -> float:
        """Return when the batch of a member begins at the latest, even if it is not full."""
        if member.wave is None or member.start is None:
            return member.deadline
        return max(member.wave.deadline, self._pace.earliest(member.start))

    def _take(self, now: float) -> list[_Member]:
        """Remove and return the members of the next batch: the first that waits, and others that
        may begin with it.
        """
        members = [self._waiting.popleft()]
        while self._waiting and len(members) < self._size:
            member, last = self._waiting[0], members[-1]
            is_alike = member.wave is last.wave and member.start == last.start
            if not is_alike and member.wave is not None and now < self._begins_at(member):
                break
            members.append(self._waiting.popleft())
        return members

    def _are_ready(self, now: float) -> bool:
        """Return whether all messages that wait can be handled, or take out the others."""
        _send_back(member for member in self._waiting if member.expires_at < now)
        if any(member.outcome.done() for member in self._waiting):
            # Some are cancelled, or have expired, and are about to leave.
            self._waiting = deque(member for member in self._waiting if not member.outcome.done())
            return False
        return True

    def _check_pace(self, end_count: int) -> None:
        """Send messages back that wait for batches that take long.

        ``end_count`` is the number of batches that had ended a moment ago.
        """
        self._pace.check = None
        if self._pace.end_count == end_count and len(self._running) >= self._concurrency:
            self._pace.is_quick = False
            now = asyncio.get_running_loop().time()
            for member in self._waiting:
                if member.wave is not None and len(self._late) < _MAX_LATE:
                    self._late[member.message.claim.id] = now - member.wave.claimed_at
            _send_back(self._waiting)
            self._waiting.clear()
            self._check_capacity()
        else:
            self._begin()

    def _on_timer(self) -> None:
        self._timer = None
        self._begin()

    async def _run(self, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        if (start := batch.members[-1].start) is not None:
            self._pace.record_start(start)
            # And again once the handler has begun, which takes long while the machine is busy.
            loop.call_soon(self._pace.record_start, start)
        failure: BaseException | None = None
        results: Sequence[Any] | None = None
        try:
            results = await self._handle([member.message for member in batch.members])
        except BaseException as error:  # noqa: BLE001 - any error is for the messages
            failure = error
        result_of = dict(zip(batch.members, results or (), strict=False))
        members = [member for member in batch.members if not member.outcome.done()]
        for member in members:
            outcome = member.outcome
            if failure is None:
                outcome.set_result(result_of.get(member))
            elif isinstance(failure, NotBegun):
                outcome.set_exception(NotBegun(*failure.args))
            elif member is members[0] and isinstance(failure, KeyboardInterrupt):
                # One of the messages ends the worker, once the message was given back.
                outcome.set_exception(failure)
            else:
                outcome.set_exception(BatchFailed(failure))
        self._running.discard(batch)
        self._pace.end_count += 1
        self._pace.is_quick = loop.time() - started <= prefetch.WITHIN
        self._begin()


def _send_back(members: Iterable[_Member]) -> None:
    for member in members:
        if not member.outcome.done():
            member.outcome.set_exception(NotNow())


class BatchHandling(Handling):
    """Handles the messages of a listener that takes batches."""

    def __init__(
        self,
        listener: Listener,
        middleware: Sequence[Middleware],
        dependencies: Mapping[Any, Dependency],
        instances: Mapping[Any, Any],
        threads: Threads,
        is_cancelled: Callable[[], bool],
        concurrency: int,
    ) -> None:
        """Args:
        concurrency: Number of batches at a time. Otherwise as for :class:`Handling`.
        """
        super().__init__(listener, middleware, dependencies, instances, threads, is_cancelled)
        settings = listener.settings
        assert settings.batch is not None
        self._concurrency = concurrency
        self._batches = Batches(
            self._handle_batch,
            size=settings.batch,
            linger=settings.linger,
            concurrency=concurrency,
            on_change=self._on_capacity_change,
        )
        # One batch gathers while the others are handled.
        self.capacity: int = settings.batch * (concurrency + 1)
        # The limit is that of a batch, not that of a message, which waits for others.
        self._batch_timeout, self._timeout = self._timeout, None
        self._is_bare = False

    def _on_capacity_change(self) -> None:
        # The pool sets it later.
        self._threads.on_change()

    @property
    def gathers_ahead(self) -> bool:
        """Whether messages may wait for a batch while others are handled."""
        return self._batches.gathers_ahead

    def hurry(self) -> None:
        """Wait for no further messages, because none will come."""
        self._batches.hurry()

    def expect(self, claims: Iterable[Claim]) -> None:
        """Note that these messages, which were claimed together, are about to be handled."""
        self._batches.expect(claims)

    def expect_no_more(self, claims: Iterable[Claim]) -> None:
        """Note that these messages are not about to be handled."""
        self._batches.expect_no_more(claims)

    def capacity_beside(self, hanging: int) -> int:
        """Use the threads that do not hang, and return how many messages may be at work."""
        free = max(0, self._concurrency - hanging)
        self._batches.set_concurrency(free)
        return self._batches.capacity if free else 0

    async def handle(self, message: WorkerMessage[Any]) -> None:
        try:
            await super().handle(message)
        finally:
            self.expect_no_more([message.claim])

    async def _handle_value(self, message: WorkerMessage[Any], value: Any) -> Any:
        del value  # the message has it
        # Decoding has parsed the body if the message has options.
        seconds = message.timeout if message.has_options else None
        claim = message.claim
        join = partial(self._batches.join, message, start=claim.start, expires_at=claim.expires_at)
        if seconds is None:
            return await join()
        # The time in which it waits for others, or for another batch, does not count.
        timeout, now = asyncio.timeout(None), asyncio.get_running_loop().time
        call = join(lambda: timeout.reschedule(now() + seconds))
        return await self._within(seconds, call, timeout)

    def _time_limit(self, message: WorkerMessage[Any]) -> float | None:
        del message  # its limit begins with its batch
        return None

    async def _handle_batch(self, messages: list[WorkerMessage[Any]]) -> Sequence[Any]:
        takes_messages = self._plan.takes_message
        # The list is the handler's own.
        first = [message if takes_messages else message.value for message in messages]
        call = self._call_handler(first, {**self._instances}, messages)
        timeout = self._batch_timeout
        try:
            result = await (call if timeout is None else self._within(timeout, call))
            return self._results(result, messages)
        except BaseException as error:
            error.with_traceback(below_the_worker(error.__traceback__))
            instruction = instruction_of(error) if is_instruction(error) else None
            count = len(messages)
            task = asyncio.current_task()
            if instruction is not None:
                text = "a batch of %d messages was answered with %s: %s"
                log(INFO, self._queue, text, count, type(instruction).__name__, instruction)
            elif not (
                isinstance(error, NotBegun | KeyboardInterrupt)
                # All of its messages have left it, or the worker ends.
                or (isinstance(error, asyncio.CancelledError) and task and task.cancelling())
            ):
                log(ERROR, self._queue, "a batch of %d messages failed", count, error=error)
            raise

    def _results(self, result: Any, messages: Sequence[WorkerMessage[Any]]) -> Sequence[Any]:
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

    async def _fail(self, message: WorkerMessage[Any], error: BaseException) -> None:
        self.expect_no_more([message.claim])
        if isinstance(error, NotNow):
            await settle(message, message.give_back_unbegun)
        elif not isinstance(error, BatchFailed):
            await super()._fail(message, error)
        elif isinstance(error.error, KeyboardInterrupt):
            await settle(message, message.release)
        else:
            message.report_failure(error.error)
            error.error.with_traceback(below_the_worker(error.error.__traceback__))
            _, call = self._outcome_of(message, error.error)
            await settle(message, call)
