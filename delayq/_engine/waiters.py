"""Hands messages that left the server to the local callers that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq._engine.leaving import Paced
from delayq._engine.prefetch import fetches_more, next_batch
from delayq._logging import about
from delayq._redis.connection import own_copy
from delayq._redis.hand_back import send
from delayq._redis.retry import retry_delay
from delayq.errors import Closed, ConfigurationError, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
    from typing import Self

    from delayq._engine.context import EngineContext
    from delayq._redis.hand_back import HandBack, LastCalls
    from delayq._timer.wheel import Timeout

_log = logging.getLogger("delayq")

Item = TypeVar("Item")
Value = TypeVar("Value")

Taken = tuple[int, Item]
"""An item with its place in the order of taking, so that items given back keep that order."""

# Iterations of the event loop until the task that makes the call has started and has sent it.
_TURNS_TO_LEAVE = 2
# Maximum number of items that one call gives back, and of bytes, unless it is a single item: a
# script blocks the whole server.
_CHUNK = 100
_CHUNK_BYTES = 256 * 1024
# Maximum number of give-back calls sent at a time, one behind the other.
_AT_ONCE = 16
# How long a caller that does not want to wait for messages waits for the server, in seconds.
ANSWER_WITHIN = 5.0


def shares(count: int, wants: Sequence[int]) -> list[int]:
    """Return how many of ``count`` items each waiting caller gets: equal shares, with any remainder
    going to the first ones.
    """
    result = []
    for place, want in enumerate(wants):
        others = len(wants) - place
        share = min(want, -(-count // others))
        result.append(share)
        count -= share
    return result


class Batch(deque[Taken[Item]], Paced):
    """The items that one reader has in hand."""


class _Waiter(Generic[Item]):
    __slots__ = ("future", "joined", "limit", "once", "want")

    def __init__(
        self, future: asyncio.Future[list[Taken[Item]]], want: int, *, once: bool, joined: int
    ) -> None:
        self.future: asyncio.Future[list[Taken[Item]]] = future
        self.want: int = want
        self.once: bool = once
        self.joined: int = joined
        self.limit: Timeout | None = None

    def take_result(self) -> list[Taken[Item]]:
        """Remove and return the items that the waiter was handed, if any."""
        future = self.future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return []
        items = future.result()
        taken = items.copy()
        items.clear()
        return taken


class Reader(Generic[Item]):
    """The state of one loop: the items in hand, and those being fetched while it handles them."""

    __slots__ = ("ahead", "fetching")

    def __init__(self) -> None:
        self.ahead: Batch[Item] = Batch()
        self.fetching: _Waiter[Item] | None = None


class Loop(Generic[Value]):
    """The iterator of a loop.

    When the loop is left, items fetched ahead go back before the next statement runs.

    An asynchronous generator that is dropped is closed only some iterations of the event loop
    later. Until then, a call that follows the loop would take messages from behind those that were
    fetched ahead.
    """

    def __init__(self, values: AsyncGenerator[Value, None], left: Callable[[], None]) -> None:
        """Args:
        values: Yields the values that the loop handles.
        left: Called when no reference to the iterator is left.
        """
        self._values = values
        self._left = left

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Value]:
        return self._values.__anext__()

    async def aclose(self) -> None:
        """End the loop."""
        await self._values.aclose()

    def __del__(self) -> None:
        self._left()


class _Chunk(Generic[Item]):
    """Items that go back in one call."""

    __slots__ = ("call", "items")

    def __init__(self, call: HandBack, items: list[Taken[Item]]) -> None:
        self.call = call
        self.items = items


class Waiters(Generic[Item]):
    """The callers of one queue, in order of arrival, and the items they take: payloads or leases.

    Callers never touch the connection themselves: one of the client's tasks takes on their behalf.
    A cancelled caller thus leaves no half-read answer behind, and items that arrive for a caller
    that has gone are handed to the next one, or go back.
    """

    def __init__(
        self,
        queue: str,
        services: EngineContext,
        *,
        push: Callable[[], None],
        wanted: Callable[[], None],
        idle: Callable[[], None],
        hand_back: Callable[[Sequence[Item]], HandBack],
        size: Callable[[Item], int] = lambda _: 0,
        given_back: Callable[[Sequence[Item]], object] = lambda _: None,
    ) -> None:
        """Args:
        queue: The queue's name, for the log. push: Requests an attempt to take, which begins with
        :meth:`begin` and ends with :meth:`end` or :meth:`fail`. wanted: Requests the same for a
        caller that can wait. It may do nothing while it is known that no message is there yet.
        idle: Called when the last caller that waited for messages has left. hand_back: Builds the
        call that returns items to the server, in this order, ahead of everything that is there.
        size: Returns how many bytes an item takes in that call. given_back: Called once with items
        that went back and will not be handed to a caller here any more.
        """
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._server = services.server
        self._timer = services.timer
        self._background = services.background
        self._push = push
        self._wanted = wanted
        self._idle = idle
        self._hand_back = hand_back
        self._size = size
        self._given_back = given_back
        self._patient = 0
        # In order of arrival.
        self._waiters: dict[_Waiter[Item], None] = {}
        # The waiters that their callers await, including those that have been handed items but
        # whose task has yet to run.
        self._awaited: set[_Waiter[Item]] = set()
        self._readers: dict[Reader[Item], None] = {}
        # Items going back: those not in a call yet, and those in calls, in the order in which they
        # go back.
        self._returned: list[Taken[Item]] = []
        self._chunks: list[_Chunk[Item]] = []
        self._returning: asyncio.Task[Any] | None = None
        self._attempts = 0
        self._attempt: asyncio.Future[None] | None = None
        self._taken = 0
        # Set when the taker is closed.
        self._last: LastCalls | None = None
        self._sent_last = False

    @property
    def waiting(self) -> bool:
        """Whether a caller waits for messages that are still to come."""
        return self._patient > 0

    @property
    def is_idle(self) -> bool:
        """Whether no caller is taking and nothing is on its way back."""
        return not (
            self._waiters or self._readers or self._returned or self._chunks or self._attempt
        )

    async def get(self, want: int, timeout: float | None) -> list[Taken[Item]]:
        """Take one to ``want`` items, waiting at most ``timeout`` seconds (None: indefinitely).

        Returns [] if none came.

        Raises:
            Closed: The queue is closed, or closes in the meantime.
            ServerUnavailable, OutcomeUnknown: Only with a timeout of 0: the server could not be
                queried.
            ServerRefused: The server does not let us take.
        """
        if self._last is not None:
            raise Closed("the queue is closed")
        waiter = self._join(want, timeout)
        self._awaited.add(waiter)
        try:
            taken = await waiter.future
        except asyncio.CancelledError:
            self.give_back(waiter.take_result())
            raise
        finally:
            self._awaited.discard(waiter)
            self._leave(waiter)
        if not taken and self._last is not None:
            raise Closed("the queue is closed")
        return taken

    def _join(self, want: int, timeout: float | None) -> _Waiter[Item]:
        """Add a caller to the line, as :meth:`get` does. Remove it with :meth:`_leave`."""
        once = timeout is not None and timeout <= 0
        # Not _Waiter[Item](...): calling an alias costs more than everything else here.
        waiter: _Waiter[Item] = _Waiter(
            asyncio.get_running_loop().create_future(), want, once=once, joined=self._attempts
        )
        self._waiters[waiter] = None
        self._patient += not once
        if once:
            self._push()
        else:
            self._wanted()
        if timeout is not None:
            waiter.limit = self._timer.new_timeout(
                lambda _: self._expired(waiter), ANSWER_WITHIN if once else timeout
            )
        return waiter

    @property
    def wanted(self) -> int:
        """Number of items the callers would take now."""
        return sum(waiter.want for waiter in self._waiters if not waiter.future.done())

    def begin(self) -> int:
        """Start an attempt. Returns how many items to take. :meth:`over` must follow."""
        self._attempts += 1
        if self._attempt is None:
            self._attempt = asyncio.get_running_loop().create_future()
        return self.wanted

    def over(self) -> None:
        """End the attempt, whatever its outcome."""
        if self._attempt is not None:
            self._attempt.set_result(None)
            self._attempt = None

    def end(self, items: Iterable[Item], *, more: bool = False) -> None:
        """Report the items that the attempt brought.

        If ``more`` are to come at once, callers need not share.
        """
        self.receive(items, more=more)
        for waiter in list(self._waiters):
            # While there is more, no caller is told that there is nothing: the next attempt follows
            # at once.
            if not more and waiter.once and waiter.joined < self._attempts:
                self._resolve(waiter, [])

    def receive(self, items: Iterable[Item], *, more: bool = False) -> None:
        """Accept items from the server, in this order."""
        taken = []
        for item in items:
            self._taken += 1
            taken.append((self._taken, item))
        self.give_back(taken, more=more)

    def fail(self, error: DelayqError) -> None:
        """Report that the attempt has failed.

        Callers that can wait stay for the next one, unless that is bound to fail too.
        """
        for waiter in list(self._waiters):
            if waiter.once or isinstance(error, ServerRefused | ConfigurationError):
                self._leave(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(own_copy(error))

    def give_back(self, taken: Iterable[Taken[Item]], *, more: bool = False) -> None:
        """Hand items to the waiting callers, and the rest back to the server, in order."""
        # Items that wait to go back come before those that have just arrived.
        items, self._returned = sorted([*self._returned, *taken]), []
        self._returned = self._hand_out(items, more=more)
        if not self._returned:
            return
        if self._last is not None:
            self._send_last()
        elif self._returning is None:
            self._returning = self._background.spawn(self._return(), "give back")

    async def batches(
        self, reader: Reader[Item] | None = None
    ) -> AsyncGenerator[deque[Taken[Item]], None]:
        """Yield batches without end: one to 100 items, as many as the reader handles in a moment.

        Ends when the queue closes.

        If batches are large and come back full, the next one is fetched while the current one is
        handled.

        The reader empties each batch. Items that it leaves there when it goes, or when the queue
        closes, go back.
        """
        loop = asyncio.get_running_loop()
        reader = Reader() if reader is None else reader
        self._readers[reader] = None
        ahead = reader.ahead
        batch = 1
        try:
            while await self._fill(reader, batch):
                count, started = len(ahead), loop.time()
                if fetches_more(batch, count):
                    # Fetch while these are handled, so that neither we nor the server wait for the
                    # other.
                    reader.fetching = self._join(batch, 0)
                    # A reader that never awaits would keep the call from being sent.
                    for _ in range(_TURNS_TO_LEAVE):
                        await asyncio.sleep(0)
                ahead.waited = 0.0
                yield ahead
                batch = next_batch(batch, count, loop.time() - started - ahead.waited)
        finally:
            del self._readers[reader]
            # All at once, so that everything goes back in order.
            self.give_back(self._take_all(reader))

    def abandon(self, reader: Reader[Item]) -> None:
        """Give back everything held by a reader whose loop was left.

        Does nothing in another thread, or after the event loop has ended.
        """
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - documented for libraries; it does not raise
            self.give_back(self._take_all(reader))

    @contextmanager
    def at_hand(self) -> Iterator[deque[Taken[Item]]]:
        """Provide a buffer for a reader that takes with :meth:`get`.

        Items that it leaves there when it goes, or when the queue closes, go back.
        """
        reader: Reader[Item] = Reader()
        self._readers[reader] = None
        try:
            yield reader.ahead
        finally:
            del self._readers[reader]
            self.give_back(self._take_all(reader))

    def _take_all(self, reader: Reader[Item]) -> list[Taken[Item]]:
        """Remove and return all items that a reader has in hand or has fetched.

        The reader is left empty, so that no message assumes that more are in hand.
        """
        taken = list(reader.ahead)
        reader.ahead.clear()
        if (waiter := reader.fetching) is not None:
            reader.fetching = None
            self._leave(waiter)
            taken += waiter.take_result()
            # Its result is not needed any more.
            waiter.future.cancel()
        return taken

    async def _fill(self, reader: Reader[Item], want: int) -> bool:
        """Put the next items in front of a reader. Returns False if the queue has closed."""
        if (waiter := reader.fetching) is not None:
            # Items that could not be fetched are requested again.
            with suppress(DelayqError):
                await waiter.future
            reader.ahead.extend(self._take_all(reader))
        if not reader.ahead:
            with suppress(Closed):
                reader.ahead.extend(await self.get(want, None))
        return self._last is None

    def close(self, last: LastCalls) -> None:
        """End every waiting call. Before this returns, write back the items that reached no
        caller.
        """
        self._last = last
        for waiter in list(self._waiters):
            self._leave(waiter)
            if not waiter.future.done():
                waiter.future.set_exception(Closed("the queue is closed"))
        for waiter in self._awaited:
            self._returned += waiter.take_result()
        for reader in self._readers:
            self._returned += self._take_all(reader)
        if self._returning is not None:
            self._returning.cancel()
        self._send_last()

    async def returned(self, within: float) -> None:
        """Wait until the items given back are on the server, for at most ``within`` seconds."""
        if self._returning is not None:
            await asyncio.wait({self._returning}, timeout=within)

    async def aclose(self, grace: float) -> None:
        """Wait until everything is back, for at most ``grace`` seconds."""
        assert self._last is not None, "closed before"
        try:
            await self._last.settle(grace)
        finally:
            self._report_what_is_left()

    def _report_what_is_left(self) -> None:
        """Log how many messages are not known to be back."""
        for unsure, words in (
            (False, "could not be handed back"),
            (True, "may not have been handed back"),
        ):
            chunks = [
                chunk
                for chunk in self._chunks
                if not chunk.call.is_done and chunk.call.is_unsure is unsure
            ]
            if chunks:
                _log.error(
                    "%d messages were taken from queue %r and %s: %s",
                    sum(len(chunk.items) for chunk in chunks),
                    self._queue,
                    words,
                    chunks[0].call.outcome or "the server did not answer in time",
                    extra=about(self._queue),
                )

    def _send_last(self) -> None:
        # Calls that were sent before come first, and are repeated unchanged.
        assert self._last is not None, "closed before"
        fresh = self._cut()
        self._chunks += fresh
        if not self._sent_last:
            fresh = self._chunks
            self._sent_last = True
        for chunk in fresh:
            self._given_back([item for _, item in chunk.items])
        self._last.send(self._queue, [chunk.call for chunk in fresh])

    def _hand_out(self, taken: list[Taken[Item]], *, more: bool = False) -> list[Taken[Item]]:
        waiting = [waiter for waiter in self._waiters if not waiter.future.done()]
        # The callers for whom the attempt was made come first. Items that one of them gives back
        # then go to the others, in order.
        asked = [waiter for waiter in waiting if waiter.joined < self._attempts]
        for waiters in (asked, [waiter for waiter in waiting if waiter.joined >= self._attempts]):
            wants = [waiter.want for waiter in waiters]
            at = 0
            # If more is on its way, the first callers get all they want, and handle it while the
            # rest arrives for the others.
            for waiter, share in zip(
                waiters, wants if more else shares(len(taken), wants), strict=True
            ):
                if share and at < len(taken):
                    self._resolve(waiter, taken[at : at + share])
                    at += share
            taken = taken[at:]
        return taken

    def _leave(self, waiter: _Waiter[Item]) -> None:
        if waiter.limit is not None:
            waiter.limit.cancel()
        if waiter in self._waiters:
            del self._waiters[waiter]
            self._patient -= not waiter.once
            if not waiter.once and not self._patient:
                self._idle()

    def _resolve(self, waiter: _Waiter[Item], taken: list[Taken[Item]]) -> None:
        self._leave(waiter)
        if not waiter.future.done():
            waiter.future.set_result(taken)

    def _expired(self, waiter: _Waiter[Item]) -> None:
        if waiter.future.done():
            return
        if waiter.once:
            waiter.future.set_exception(
                ServerUnavailable(f"the server did not answer within {ANSWER_WITHIN:g} s")
            )
        else:
            waiter.future.set_result([])

    def _cut(self) -> list[_Chunk[Item]]:
        """Pack the items that go back into calls short enough for one script, beginning with the
        last items of the order.
        """
        items, self._returned = sorted(self._returned), []
        chunks = []
        while items:
            first, size = len(items), 0
            while first and len(items) - first < _CHUNK:
                size += self._size(items[first - 1][1])
                if size > _CHUNK_BYTES and first < len(items):
                    break
                first -= 1
            chunks.append(
                _Chunk(self._hand_back([item for _, item in items[first:]]), items[first:])
            )
            del items[first:]
        return chunks

    async def _return(self) -> None:
        failures = 0
        try:
            while self._returned or self._chunks:
                if self._attempt is not None:
                    # The attempt's items belong behind these, so they have to go back first.
                    await asyncio.wait({self._attempt})
                self._chunks += self._cut()
                if not (chunks := self._chunks[:_AT_ONCE]):
                    # The items have been handed out in the meantime.
                    continue
                await send(self._server, [chunk.call for chunk in chunks])
                left = []
                for chunk in chunks:
                    if chunk.call.is_done:
                        self._given_back([item for _, item in chunk.items])
                    else:
                        left.append(chunk)
                # Calls that may have been carried out are repeated unchanged. Other items may go to
                # callers that have arrived since.
                self._chunks[: len(chunks)] = [chunk for chunk in left if chunk.call.is_unsure]
                self._returned += [
                    item for chunk in left if not chunk.call.is_unsure for item in chunk.items
                ]
                if not left:
                    failures = 0
                    continue
                failures += 1
                if failures == 1:
                    count, error = sum(len(chunk.items) for chunk in left), left[0].call.outcome
                    _log.warning(
                        "handing %d messages back to queue %r: %s",
                        count,
                        self._queue,
                        error,
                        extra=about(self._queue),
                    )
                self._returned = self._hand_out(sorted(self._returned))
                await asyncio.sleep(retry_delay(failures))
        finally:
            self._returning = None
