"""Hands messages that left the server to the local callers that wait for them."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._engine import prefetch
from delayq._engine.leases import Batch
from delayq._engine.line import Line, Order, Place, Source, Taken
from delayq._engine.prefetch import fetches_more, next_batch, to_keep
from delayq._engine.returns import Returns
from delayq._redis.connection import own_copy
from delayq.errors import Closed, ConfigurationError, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Sequence,
    )
    from typing import Self

    from delayq._engine.context import EngineContext
    from delayq._redis.hand_back import HandBack, LastCalls
    from delayq._timer.wheel import Timeout

Item = TypeVar("Item")
Value = TypeVar("Value")

# Iterations of the event loop until the task that makes the call has started and has sent it.
_TURNS_TO_LEAVE = 2
# How long a caller that does not want to wait for messages waits for the server, in seconds.
ANSWER_WITHIN = 5.0


class _Waiter(Place[Item]):
    """A caller.

    Attributes:
        future: Ends its call.
        limit: Ends it without an item.
        reader: The loop for which it fetches a batch, if that waits for the batch.
    """

    __slots__ = ("future", "limit", "reader")

    future: asyncio.Future[list[Taken[Item]]]
    limit: Timeout | None
    reader: Reader[Item] | None

    @property
    def is_open(self) -> bool:
        return not self.future.done()

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has ended already."""
        if not self.future.done():
            self.future.set_exception(error)


class Reader(Generic[Item]):
    """The state of one loop: the items in hand, and those being fetched while it handles them.

    Attributes:
        ahead: The items in hand.
        awaited: Fetches the batch for which the loop waits.
        fetching: Fetches the one after that.
        batch: The size of the batches that the loop handles in a moment.
        watch: Looks at its pace after a moment, while items wait.
        since: When the loop got its batch, or when its pace was looked at last, in seconds.
        waiting: Number of items that waited in hand then.
        returned: Number of items of the batch that went back.
        pace: Number of items that it handled in the moment before that.
        waited: What :attr:`Batch.waited` was when the reader was last late.
    """

    __slots__ = (
        "ahead",
        "awaited",
        "batch",
        "fetching",
        "pace",
        "returned",
        "since",
        "waited",
        "waiting",
        "watch",
    )

    def __init__(self) -> None:
        self.ahead: Batch[Taken[Item]] = Batch()
        self.awaited: _Waiter[Item] | None = None
        self.fetching: _Waiter[Item] | None = None
        self.batch: int = 1
        self.watch: Timeout | None = None
        self.since: float = 0.0
        self.waiting: int = 0
        self.returned: int = 0
        self.pace: int = prefetch.MOST
        self.waited: float = 0.0


class Loop(Generic[Value]):
    """The iterator of a loop, which gives items fetched ahead back before the next statement runs.

    An asynchronous generator that is dropped is closed only some iterations of the event loop
    later. Until then, a call that follows the loop would take messages from behind those.
    """

    def __init__(self, values: AsyncGenerator[Value, None], left: Callable[[], None]) -> None:
        """Call ``left`` when no reference to the iterator is left."""
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


class Supply(Source, Generic[Item]):
    """One of the sources of a line of callers, and the attempts to take from it.

    :meth:`begin` begins an attempt, :meth:`end` or :meth:`fail` reports what came of it, and
    :meth:`over` must follow.

    Attributes:
        waiters: The callers.
        ask: Requests an attempt.
        look_at: Requests a look.
        returns: The items that go back to the source.
        has_more: Whether the last attempt left items.
    """

    def __init__(
        self,
        waiters: Waiters[Item],
        ask: Callable[[], None],
        look_at: Callable[[], None],
        returns: Returns[Item],
    ) -> None:
        super().__init__()
        self.waiters: Waiters[Item] = waiters
        self.ask: Callable[[], None] = ask
        self.look_at: Callable[[], None] = look_at
        self.returns: Returns[Item] = returns
        self.has_more: bool = False

    def begin(self, most: int) -> Order:
        """Begin an attempt to take up to ``most`` items. Return how many to take."""
        self.returns.attempt_begins()
        return self.waiters.line.begin(self, self.waiters.now(), most)

    def end(self, items: Collection[Item], *, more: bool) -> None:
        """Report the items that the attempt brought, and whether it left more: then another attempt
        has to follow at once while callers want some.
        """
        self.has_more = more
        line = self.waiters.line
        line.end(self, len(items), more=more)
        self.put(line.number(items), more=more)

    def limits_found(self, *, is_held: bool, are_others: bool) -> None:
        """Report what :meth:`Line.limits_found` notes."""
        self.waiters.line.limits_found(
            self, self.waiters.now(), is_held=is_held, are_others=are_others
        )

    def fail(self, error: DelayqError) -> None:
        """Report that the attempt has failed. Callers that can wait stay for the next one."""
        self.waiters.line.over(self)
        self.look_failed(error)

    def over(self) -> None:
        """End the attempt, whatever its outcome."""
        self.returns.attempt_is_over()
        if self.attempt:
            self.waiters.line.over(self)
            self.waiters.settle()

    def looked(self, number: int, *, may_have_items: bool) -> None:
        """Report what a look of :meth:`Waiters.look` has found."""
        self.waiters.line.looked(self, number, may_have_items=may_have_items)
        self.waiters.settle()

    def look_failed(self, error: DelayqError) -> None:
        """Report that a look has failed, as :meth:`fail` does for an attempt."""
        self.waiters.line.fail(self, error)
        if isinstance(error, ServerRefused | ConfigurationError):
            self.waiters.fail(error)
        self.waiters.settle()

    def put(self, taken: list[Taken[Item]], *, more: bool = False) -> None:
        """Hand items of this source to the waiting callers, and the rest back to the server."""
        if before := self.returns.withdraw():
            # Items that wait to go back come before those that have just arrived.
            taken = sorted([*before, *taken])
        if left := self.waiters.hand_out(taken, more=more):
            self.returns.put(left)


class Waiters(Generic[Item]):
    """The callers of one queue, in order of arrival, and the items they take: payloads or leases.

    The client's tasks take on their behalf, from one or more sources. A cancelled caller thus
    leaves no half-read answer behind, and its items are handed to the next one, or go back.

    Attributes:
        line: Decides which caller gets what.
    """

    def __init__(
        self,
        services: EngineContext,
        *,
        ask: Callable[[bool], None],
        unwanted: Callable[[], None] = lambda: None,
        supply_of: Callable[[Item], int] = lambda _: 0,
        policy_of: Callable[[Item], Hashable] = lambda _: None,
    ) -> None:
        """Args:
        services: The services the queue is built from.
        ask: Requests attempts for a caller that has joined, unless its argument is False and no
            message is there yet.
        unwanted: Called when the last caller that waited for messages has left.
        supply_of: Returns the number of the source from which an item came.
        policy_of: Returns the policy of the callers that may have an item.
        """
        self._loop = asyncio.get_running_loop()
        self._services = services
        self._ask = ask
        self._unwanted = unwanted
        self._supply_of = supply_of
        self._policy_of = policy_of
        self.line: Line[Item] = Line()
        self._supplies: list[Supply[Item]] = []
        # Those that callers await, including those that have items but whose task has yet to run.
        self._awaited: set[_Waiter[Item]] = set()
        self._readers: dict[Reader[Item], None] = {}
        # Set when the queue is closed.
        self._last: LastCalls | None = None
        # When to look again whether a source holds up the others.
        self._alarm: tuple[float, Timeout] | None = None

    def add_source(
        self,
        name: str,
        ask: Callable[[], None],
        *,
        look_at: Callable[[], None] = lambda: None,
        hand_back: Callable[[Sequence[Item]], HandBack],
        size: Callable[[Item], int] = lambda _: 0,
        given_back: Callable[[Sequence[Item]], object] = lambda _: None,
        services: EngineContext | None = None,
    ) -> Supply[Item]:
        """Add a source, whose number is one higher than that of the last.

        ``ask`` requests an attempt to take from it, and ``look_at``, for one of several, a look;
        the other arguments are those of :class:`Returns`.
        """
        returns = Returns(
            name,
            services or self._services,
            hand_back=hand_back,
            size=size,
            given_back=given_back,
            hand_out=self.hand_out,
        )
        supply = Supply(self, ask, look_at, returns)
        self._supplies.append(supply)
        self.line.add(supply)
        return supply

    @property
    def waiting(self) -> bool:
        """Whether a caller waits for messages that are still to come."""
        return self.line.patient > 0

    @property
    def wanted(self) -> int:
        """Number of items the callers would take now."""
        return self.line.wanted

    @property
    def is_contested(self) -> bool:
        """Whether others would handle what is fetched ahead here."""
        until = self.line.contested_until
        return until > 0 and self.now() < until

    def now(self) -> float:
        """Return local seconds."""
        return self._loop.time()

    @property
    def is_idle(self) -> bool:
        """Whether no caller is taking and nothing is on its way back."""
        return (
            self.line.is_idle
            and not self._readers
            and all(supply.returns.is_idle for supply in self._supplies)
        )

    async def get(
        self, want: int, timeout: float | None, policy: Hashable = None
    ) -> list[Taken[Item]]:
        """Take one to ``want`` items, waiting at most ``timeout`` seconds (None: indefinitely).

        Raises:
            Closed: The queue is closed, or closes in the meantime.
            ServerUnavailable, OutcomeUnknown: Only with a timeout of 0: the server did not answer.
            ServerRefused: The server does not let us take.
        """
        if self._last is not None:
            raise Closed("the queue is closed")
        waiter = self._join(want, timeout, policy)
        self._awaited.add(waiter)
        try:
            taken = await waiter.future
        except BaseException:
            if waiter.items:
                self.give_back(waiter.take_items())
            raise
        finally:
            self._awaited.discard(waiter)
            self._leave(waiter)
        if not taken and self._last is not None:
            raise Closed("the queue is closed")
        return taken

    def _join(self, want: int, timeout: float | None, policy: Hashable) -> _Waiter[Item]:
        """Add a caller to the line. Remove it with :meth:`_leave`."""
        once = timeout is not None and timeout <= 0
        # Not _Waiter[Item](...): calling an alias costs more than everything else here.
        waiter: _Waiter[Item] = _Waiter(want, policy, once=once)
        waiter.future, waiter.limit, waiter.reader = self._loop.create_future(), None, None
        self.line.join(waiter)
        self._ask(once)
        if timeout is not None:
            waiter.limit = self._services.timer.new_timeout(
                lambda _: self._expired(waiter), ANSWER_WITHIN if once else timeout
            )
        return waiter

    def look(self, supplies: Sequence[Supply[Item]]) -> int:
        """Begin a look at sources, each to be ended with what it found, and return its number."""
        return self.line.look(supplies, self.now())

    def fail(self, error: DelayqError) -> None:
        """End all calls with an error."""
        for waiter in self._waiters:
            self._leave(waiter)
            waiter.fail(own_copy(error))

    def give_back(self, taken: Iterable[Taken[Item]], *, here: bool = True) -> None:
        """Hand items to the waiting callers, and the rest back to the server, in order; all of them
        if not ``here``.
        """
        for supply, some in self._by_supply(taken):
            if here:
                supply.put(some)
            else:
                supply.returns.put(some)

    def _by_supply(
        self, taken: Iterable[Taken[Item]]
    ) -> list[tuple[Supply[Item], list[Taken[Item]]]]:
        if len(self._supplies) == 1:
            return [(self._supplies[0], list(taken))]
        parts: dict[int, list[Taken[Item]]] = {}
        for each in taken:
            parts.setdefault(self._supply_of(each[1]), []).append(each)
        return [(self._supplies[number], some) for number, some in parts.items()]

    def hand_out(self, items: list[Taken[Item]], *, more: bool = False) -> list[Taken[Item]]:
        """Hand items to the waiting callers, and return those that are left."""
        if self.line.mixed:
            policies: dict[Hashable, list[Taken[Item]]] = {}
            for each in items:
                policies.setdefault(self._policy_of(each[1]), []).append(each)
            left = [
                each
                for policy, some in policies.items()
                for each in self.line.hand_out(some, policy, more=more)
            ]
        else:
            left = self.line.hand_out(items, None, more=more)
        self.settle(more=more)
        return left

    def settle(self, *, more: bool = False) -> None:
        """Serve the callers whose turn it is, and ask the sources that are still to be asked."""
        now = self.now()
        for waiter in self.line.settle(now, more=more):
            self._resolve(waiter)  # type: ignore[arg-type]  # only waiters join
        if len(self._supplies) > 1 and self._last is None:
            self.ask_supplies()
            self._set_alarm(now)

    def ask_supplies(self) -> None:
        """Ask some of several sources for what is wanted, and look at others where need be."""
        to_ask, to_look_at = self.line.next_sources(self.now())
        for source in to_ask:
            source.ask()  # type: ignore[attr-defined]  # each is a Supply
        for source in to_look_at:
            source.look_at()  # type: ignore[attr-defined]

    def _set_alarm(self, now: float) -> None:
        """Arrange to look again when a source has held up the others for too long."""
        if (moment := self.line.deadline(now)) is None:
            return
        if self._alarm is not None:
            at, timeout = self._alarm
            # One that rings too early does no harm, and setting it anew each time would cost more.
            if at <= moment:
                return
            timeout.cancel()
        timeout = self._services.timer.new_timeout(self._ring, max(0.0, moment - now))
        self._alarm = moment, timeout

    def _ring(self, _: Timeout) -> None:
        self._alarm = None
        self.settle()

    @property
    def _waiters(self) -> list[_Waiter[Item]]:
        return self.line.places  # type: ignore[return-value]  # only waiters join

    # Loops

    async def batches(
        self, reader: Reader[Item] | None = None, policy: Hashable = None
    ) -> AsyncGenerator[Batch[Taken[Item]], None]:
        """Yield batches until the queue closes: one to 100 items, as many as the reader handles in
        a moment.

        If batches are large, come back full and leave more, the next one is fetched while the
        current one is handled. The reader empties each batch. Items that it leaves there when it
        goes, or when the queue closes, go back; so do those that wait while one takes longer than
        a moment. A reader calls :meth:`return_if_late` when it comes for the next item more than a
        moment after the one before, because handlers that block the event loop are not seen here.
        """
        reader = reader or Reader()
        with self.at_hand(reader) as ahead:
            while await self._fill(reader, policy):
                count, started = len(ahead), self.now()
                if reader.fetching is None and self._fetches_more(reader, count, reader.batch):
                    reader.fetching = self._join(reader.batch, 0, policy)
                    # A reader that never awaits would keep the call from being sent.
                    for _ in range(_TURNS_TO_LEAVE):
                        await asyncio.sleep(0)
                ahead.waited, ahead.fetching = 0.0, reader.fetching is not None
                # The first one is handled at once, so it does not wait.
                reader.since, reader.waiting, reader.waited = started, count - 1, 0.0
                reader.returned, reader.pace = 0, prefetch.MOST
                if reader.watch is None and (count > 1 or ahead.fetching):
                    self._watch(reader, prefetch.WITHIN)
                yield ahead
                took = self.now() - started - ahead.waited
                following = next_batch(reader.batch, count - reader.returned, took)
                reader.batch = min(following, max(1, reader.pace))

    def _fetches_more(self, reader: Reader[Item], got: int, wanted: int) -> bool:
        return (
            fetches_more(reader.batch, got, wanted)
            and any(supply.has_more for supply in self._supplies)
            and not self.is_contested
        )

    def _watch(self, reader: Reader[Item], within: float) -> None:
        reader.watch = self._services.timer.new_timeout(lambda _: self._look_at(reader), within)

    def _look_at(self, reader: Reader[Item]) -> None:
        """Give back what waits in a reader's hand if it handles less than expected."""
        reader.watch = None
        ahead, fetching, now = reader.ahead, reader.fetching, self.now()
        if reader.awaited is not None or not (ahead or fetching):
            # It waits for a batch, and is watched again when it has one.
            return
        if (soon := reader.since + prefetch.WITHIN - now) <= 0:
            if not ahead.is_settling:
                held = len(ahead) + (0 if fetching is None else len(fetching.items))
                keep = to_keep(held, ended := reader.waiting - len(ahead))
                if keep < held or not ended:
                    self._return_ahead(reader, keep)
            reader.since, reader.waiting, soon = now, len(ahead), prefetch.WITHIN
        self._watch(reader, soon)

    def return_if_late(self, reader: Reader[Item], late: float) -> None:
        """Give back what a reader has in hand that comes for the next item ``late`` seconds later
        than a moment after the one before, unless it has waited for acknowledgements.
        """
        waited, reader.waited = reader.ahead.waited - reader.waited, reader.ahead.waited
        if late > waited:
            self._return_ahead(reader, 0)

    def _return_ahead(self, reader: Reader[Item], keep: int) -> None:
        """Give back what a reader has in hand and what it fetches, except for its next items."""
        kept = [reader.ahead.popleft() for _ in range(min(keep, len(reader.ahead)))]
        reader.returned += len(reader.ahead)
        reader.pace = min(reader.pace, keep)
        back = self._take_all(reader)
        reader.ahead.extend(kept)
        self.give_back(back)

    def abandon(self, reader: Reader[Item]) -> None:
        """Give back what a reader holds whose loop was left, if the event loop still runs."""
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - documented for libraries; it does not raise
            self.give_back(self._take_all(reader))

    @contextmanager
    def at_hand(self, reader: Reader[Item]) -> Iterator[Batch[Taken[Item]]]:
        """Give back what a reader holds at the end of the block, or when the queue closes."""
        self._readers[reader] = None
        try:
            yield reader.ahead
        finally:
            del self._readers[reader]
            if reader.watch is not None:
                reader.watch.cancel()
            # All at once, so that everything goes back in order.
            self.give_back(self._take_all(reader))

    def _take_all(self, reader: Reader[Item]) -> list[Taken[Item]]:
        """Remove and return all items that a reader has in hand or has fetched."""
        taken = list(reader.ahead)
        reader.ahead.clear()
        reader.ahead.fetching = False
        for waiter in (reader.awaited, reader.fetching):
            if waiter is not None:
                self._leave(waiter)
                taken += waiter.take_items()
                # Its result is not needed any more.
                waiter.future.cancel()
        reader.awaited = reader.fetching = None
        return taken

    async def _fill(self, reader: Reader[Item], policy: Hashable) -> bool:
        """Put the next items in front of a reader. Returns False if the queue has closed."""
        if (waiter := reader.fetching) is not None:
            reader.awaited, reader.fetching, waiter.reader = waiter, None, reader
            # Items that could not be fetched are requested again.
            with suppress(DelayqError):
                await waiter.future
            self._leave(waiter)
            reader.awaited = None
            reader.ahead.extend(waiter.take_items())
        if not reader.ahead:
            with suppress(Closed):
                want = 1 if self.is_contested else reader.batch
                reader.ahead.extend(await self.get(want, None, policy))
        return self._last is None

    # Closing

    def close(self, last: LastCalls) -> None:
        """End every waiting call, and write those that give back what reached no caller."""
        self._last = last
        if self._alarm is not None:
            self._alarm[1].cancel()
        back: list[Taken[Item]] = []
        for waiter in self._waiters:
            self._leave(waiter)
            back += waiter.take_items()
            waiter.fail(Closed("the queue is closed"))
        for waiter in self._awaited:
            back += waiter.take_items()
        for reader in self._readers:
            back += self._take_all(reader)
        parts = dict(self._by_supply(back))
        for supply in self._supplies:
            supply.returns.close(last, parts.get(supply, []))

    def _leave(self, waiter: _Waiter[Item]) -> None:
        if waiter.limit is not None:
            waiter.limit.cancel()
        if self.line.leave(waiter):
            self._unwanted()

    def _resolve(self, waiter: _Waiter[Item]) -> None:
        self._leave(waiter)
        if waiter.error is not None and not waiter.items:
            waiter.fail(own_copy(waiter.error))
        else:
            # Not a copy: until the caller has run, a close can still take the items out.
            waiter.future.set_result(waiter.items)
            reader = waiter.reader
            if reader is not None and self._fetches_more(reader, len(waiter.items), waiter.want):
                # The loop will handle these at once, so its next batch is called for right away.
                reader.fetching = self._join(reader.batch, 0, waiter.policy)

    def _expired(self, waiter: _Waiter[Item]) -> None:
        if waiter.future.done():
            return
        if waiter.once and not waiter.items:
            waiter.fail(
                waiter.error
                or ServerUnavailable(f"the server did not answer within {ANSWER_WITHIN:g} s")
            )
        else:
            waiter.future.set_result(waiter.items)
