"""Reads a queue in batches for a loop, and returns what waits behind a handler that takes long."""

from __future__ import annotations

import asyncio

# It is documented for libraries, and does not raise.
from asyncio import _get_running_loop
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._engine import prefetch
from delayq._engine.prefetch import Pace, Prefetched
from delayq.errors import Closed, DelayqError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator
    from typing import Self

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.dispatcher import Dispatcher, WaitingCaller
    from delayq._timer.wheel import Timeout

Item = TypeVar("Item")
Value = TypeVar("Value")


class Reader(Generic[Item]):
    """Reads items for one loop: those in hand, and those being fetched while it handles them.

    Attributes:
        ahead: The items in hand.
    """

    __slots__ = (
        "_awaiting",
        "_dispatcher",
        "_fetching",
        "_late_waited",
        "_pace",
        "_watch",
        "ahead",
    )

    def __init__(self) -> None:
        self.ahead: Prefetched[Numbered[Item]] = Prefetched()
        self._dispatcher: Dispatcher[Item] | None = None
        self._pace = Pace()
        # Fetches the batch for which the loop waits, and the one after that.
        self._awaiting: WaitingCaller[Item] | None = None
        self._fetching: WaitingCaller[Item] | None = None
        # Checks the pace after a moment, while items wait.
        self._watch: Timeout | None = None
        # The value of :attr:`Prefetched.ack_time` when the loop was last late.
        self._late_waited = 0.0

    async def batches(
        self, dispatcher: Dispatcher[Item], policy: Hashable = None
    ) -> AsyncGenerator[Prefetched[Numbered[Item]], None]:
        """Yield batches until the queue closes: one to 100 items, as many as the loop handles in a
        moment.

        If batches are large, come back full and leave more, the next one is fetched while the
        current one is handled. The loop empties each batch. Items that it leaves there when it
        ends, or when the queue closes, go back; so do those that wait while one takes longer than a
        moment. A loop calls :meth:`return_if_late` when it comes for the next item more than a
        moment after the one before, because handlers that block the event loop are not seen here.
        """
        now = dispatcher.loop.time
        with self.attached_to(dispatcher) as ahead:
            while await self._fill(dispatcher, policy):
                count, started = len(ahead), now()
                if self._fetching is None and self._fetches_more(count, self._pace.batch):
                    self._fetching = dispatcher.join(self._pace.batch, 0, policy)
                    # A loop that never awaits would keep the call from being sent.
                    for _ in range(prefetch.ITERATIONS_TO_SEND):
                        await asyncio.sleep(0)
                ahead.ack_time, ahead.is_fetching = 0.0, self._fetching is not None
                self._late_waited = 0.0
                self._pace.begin_batch(count, started)
                if self._watch is None and (count > 1 or ahead.is_fetching):
                    self._watch = dispatcher.services.timer.new_timeout(
                        self._check_pace, prefetch.WITHIN
                    )
                yield ahead
                self._pace.end_batch(now() - started - ahead.ack_time)

    def return_if_late(self, late: float) -> None:
        """Return what is in hand if the loop comes for the next item ``late`` seconds later than a
        moment after the one before, unless it has waited for acknowledgements.
        """
        waited = self.ahead.ack_time - self._late_waited
        self._late_waited = self.ahead.ack_time
        if late > waited:
            self._return_all_but(0)

    def abandon(self) -> None:
        """Give back what a reader has whose loop was left, if the event loop still runs."""
        dispatcher = self._dispatcher
        if dispatcher is not None and _get_running_loop() is dispatcher.loop:
            dispatcher.give_back(self.take_all())

    @contextmanager
    def attached_to(self, dispatcher: Dispatcher[Item]) -> Iterator[Prefetched[Numbered[Item]]]:
        """Give back what is in hand at the end of the block, or when the queue closes."""
        self._dispatcher = dispatcher
        dispatcher.add_holder(self)
        try:
            yield self.ahead
        finally:
            if self._watch is not None:
                self._watch.cancel()
            dispatcher.remove_holder(self)

    def take_all(self) -> list[Numbered[Item]]:
        """Remove and return all items that are in hand or were fetched."""
        items = list(self.ahead)
        self.ahead.clear()
        self.ahead.is_fetching = False
        for caller in (self._awaiting, self._fetching):
            if caller is not None and self._dispatcher is not None:
                self._dispatcher.leave(caller)
                items += caller.take_items()
                # Its result is not needed any more.
                caller.future.cancel()
        self._awaiting = self._fetching = None
        return items

    async def _fill(self, dispatcher: Dispatcher[Item], policy: Hashable) -> bool:
        """Put the next items in hand. Return False if the queue has closed."""
        if (caller := self._fetching) is not None:
            self._awaiting, self._fetching, caller.on_served = caller, None, self._on_served
            # Items that could not be fetched are requested again.
            with suppress(DelayqError):
                await caller.future
            dispatcher.leave(caller)
            self._awaiting = None
            self.ahead.extend(caller.take_items())
        if not self.ahead:
            with suppress(Closed):
                size = 1 if dispatcher.is_contested else self._pace.batch
                self.ahead.extend(await dispatcher.take(size, None, policy))
        return not dispatcher.is_closed

    def _on_served(self, caller: WaitingCaller[Item]) -> None:
        """Fetch the next batch right away: the loop will handle these items at once."""
        if self._fetches_more(len(caller.items), caller.max_items):
            assert self._dispatcher is not None
            self._fetching = self._dispatcher.join(self._pace.batch, 0, caller.policy)

    def _fetches_more(self, count: int, requested: int) -> bool:
        dispatcher = self._dispatcher
        return (
            self._pace.fetches_more(count, requested)
            and dispatcher is not None
            and dispatcher.has_more
            and not dispatcher.is_contested
        )

    def _check_pace(self, _: Timeout) -> None:
        """Return what waits in hand if the loop handles less than expected."""
        self._watch = None
        dispatcher, ahead, fetching, pace = self._dispatcher, self.ahead, self._fetching, self._pace
        if dispatcher is None or self._awaiting is not None or not (ahead or fetching):
            # It waits for a batch, and is watched again when it has one.
            return
        now = dispatcher.loop.time()
        if now >= pace.check_at:
            if not ahead.awaits_ack:
                in_flight = 0 if fetching is None else len(fetching.items)
                keep = pace.messages_to_keep(len(ahead), len(ahead) + in_flight)
                if keep is not None:
                    self._return_all_but(keep)
            pace.begin_check(len(ahead), now)
        self._watch = dispatcher.services.timer.new_timeout(self._check_pace, pace.check_at - now)

    def _return_all_but(self, keep: int) -> None:
        """Return what is in hand and what is being fetched, except for the next ``keep`` items."""
        assert self._dispatcher is not None
        ahead = self.ahead
        next_items = [ahead.popleft() for _ in range(min(keep, len(ahead)))]
        self._pace.on_returned(len(ahead), keep)
        items = self.take_all()
        ahead.extend(next_items)
        self._dispatcher.give_back(items)


class ReturningIterator(Generic[Value]):
    """The iterator of a loop, which returns items fetched ahead before the next statement runs.

    An asynchronous generator that is dropped is closed only some iterations of the event loop
    later. Until then, a call that follows the loop would take messages from behind those.
    """

    def __init__(self, values: AsyncGenerator[Value, None], on_dropped: Callable[[], None]) -> None:
        """Call ``on_dropped`` when no reference to the iterator exists any more."""
        self._values = values
        self._on_dropped = on_dropped

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Value]:
        return self._values.__anext__()

    async def aclose(self) -> None:
        """End the loop."""
        await self._values.aclose()

    def __del__(self) -> None:
        self._on_dropped()
