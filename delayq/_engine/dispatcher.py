"""Hands messages that left the server to the local callers that wait for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from delayq._engine.caller_queue import CallerQueue, Numbered, QueuedCaller, Reservation, Source
from delayq._engine.return_queue import ReturnQueue
from delayq._redis.connection import own_copy
from delayq.errors import Closed, ConfigurationError, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._redis.return_calls import ReturnCall, ShutdownCalls
    from delayq._timer.wheel import Timeout

Item = TypeVar("Item")

# How long a caller that does not want to wait for messages waits for the server, in seconds.
NOWAIT_TIMEOUT = 5.0
# How long other clients may still wait for slots of a limit that have become free, in seconds.
_CONTESTED_FOR = 1.0


class WaitingCaller(QueuedCaller[Item]):
    """A caller.

    Attributes:
        future: Ends its call.
        timeout: Ends it without an item.
        on_served: Called when the caller gets items, before it runs.
    """

    __slots__ = ("future", "on_served", "timeout")

    future: asyncio.Future[list[Numbered[Item]]]
    timeout: Timeout | None
    on_served: Callable[[WaitingCaller[Item]], None] | None

    @property
    def is_open(self) -> bool:
        return not self.future.done()

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has ended already."""
        if not self.future.done():
            self.future.set_exception(error)


class Holder(Protocol[Item]):
    """Keeps items for a caller, until the queue is closed."""

    @property
    def ahead(self) -> Collection[Numbered[Item]]:
        """The items in hand."""
        ...

    def take_all(self) -> list[Numbered[Item]]:
        """Remove and return all items that it has, or has requested."""
        ...


class ClaimSource(Source, Generic[Item]):
    """One of the sources of a :class:`Dispatcher`, and the claims from it.

    :meth:`begin_claim` comes first, :meth:`deliver` or :meth:`fail_claim` reports what the claim
    has brought, and :meth:`end_claim` must follow in any case.

    Attributes:
        dispatcher: Serves the callers.
        request_claim: Requests a claim.
        request_probe: Requests a probe.
        return_queue: The items that go back to the source.
        has_more: Whether the last claim left items.
        is_limited: Whether limits keep back items that are due, as far as is known.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Item],
        request_claim: Callable[[], None],
        request_probe: Callable[[], None],
        return_queue: ReturnQueue[Item],
    ) -> None:
        super().__init__()
        self.dispatcher: Dispatcher[Item] = dispatcher
        self.request_claim: Callable[[], None] = request_claim
        self.request_probe: Callable[[], None] = request_probe
        self.return_queue: ReturnQueue[Item] = return_queue
        self.has_more: bool = False
        self.is_limited: bool = False
        self._callers = dispatcher.caller_queue
        self._now = dispatcher.loop.time

    @property
    def is_wanted(self) -> bool:
        """Whether callers would take items of this source now."""
        return self._callers.wants_items

    def begin_claim(self, max_items: int) -> Reservation:
        """Begin to claim up to ``max_items``. Return how many to claim, and for which policy."""
        self.return_queue.suspend()
        return self._callers.begin_claim(self, self._now(), max_items)

    def deliver(self, items: Collection[Item], *, has_more: bool) -> None:
        """Hand the items that the claim has brought to the callers. If it ``has_more``, the claim
        has left some, and another one has to follow at once while callers have room.
        """
        self.has_more = has_more
        self.distribute(
            self._callers.record_claimed(self, items, has_more=has_more), has_more=has_more
        )

    def note_limits(self, *, is_limited: bool, are_others: bool) -> None:
        """Note whether limits keep back items of this source, and whether there are other clients
        that would handle what is fetched ahead here.
        """
        self.is_limited = is_limited
        if is_limited and are_others:
            self.dispatcher.contested_until = self._now() + _CONTESTED_FOR

    def fail_claim(self, error: DelayqError) -> None:
        """Report that the claim has failed. Callers that can wait stay for the next one."""
        self._callers.abort_claim(self)
        self.fail_probe(error)

    def end_claim(self) -> None:
        """End the claim, whatever its outcome."""
        self.return_queue.resume()
        if self.claim_number:
            self._callers.abort_claim(self)
            self.dispatcher.serve()

    def end_probe(self, number: int, *, may_have_items: bool) -> None:
        """Report the reply to a probe of :meth:`Dispatcher.begin_probe`."""
        self._callers.end_probe(self, number, may_have_items=may_have_items)
        self.dispatcher.serve()

    def fail_probe(self, error: DelayqError) -> None:
        """Report that a probe has failed, as :meth:`fail_claim` does for a claim."""
        self._callers.fail(self, error)
        if isinstance(error, ServerRefused | ConfigurationError):
            self.dispatcher.fail(error)
        self.dispatcher.serve()

    def distribute(self, items: list[Numbered[Item]], *, has_more: bool = False) -> None:
        """Hand items of this source to the waiting callers, and return the others to the server."""
        if self.return_queue.unsent:
            # Items that wait to go back come before those that have just arrived.
            items = sorted([*self.return_queue.withdraw(), *items])
        if remaining := self.dispatcher.hand_out(items, has_more=has_more):
            self.return_queue.add(remaining)


class Dispatcher(Generic[Item]):
    """Serves the callers of one queue with items: payloads or leases.

    The client's tasks claim on their behalf, from one or more sources. A cancelled caller thus
    leaves no half-read reply behind, and its items are handed to the next one, or go back.

    Attributes:
        loop: The event loop.
        services: The services the queue is built from.
        caller_queue: Decides which caller gets what.
        contested_until: How long others would handle what is fetched ahead here, in seconds.
    """

    def __init__(
        self,
        services: EngineContext,
        *,
        on_join: Callable[[bool], None],
        on_last_left: Callable[[], None] | None = None,
        source_of: Callable[[Item], int] = lambda _: 0,
        policy_of: Callable[[Item], Hashable] = lambda _: None,
    ) -> None:
        """Args:
        services: The services the queue is built from.
        on_join: Called when a caller has joined, to look for messages. The argument tells whether
            the caller does not wait: then the server is asked even if nothing is due as far as we
            know.
        on_last_left: Called when the last caller that waited for messages has left.
        source_of: Returns the index of the source from which an item came.
        policy_of: Returns the policy of the callers that may have an item.
        """
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.services: EngineContext = services
        self.caller_queue: CallerQueue[Item] = CallerQueue(policy_of)
        self.contested_until: float = 0.0
        self._on_join = on_join
        self._on_last_left = on_last_left
        self._source_of = source_of
        self._sources: list[ClaimSource[Item]] = []
        # Callers in :meth:`take`, including those that have items but whose task has yet to run.
        self._taking: set[WaitingCaller[Item]] = set()
        self._holders: dict[Holder[Item], None] = {}
        # Set when the queue is closed.
        self._shutdown_calls: ShutdownCalls | None = None
        # When callers get the items that they have gathered, and the timeout that serves them.
        self._gather_timeout: tuple[float, Timeout] | None = None

    def add_source(
        self,
        name: str,
        request_claim: Callable[[], None],
        *,
        request_probe: Callable[[], None] = lambda: None,
        return_call: Callable[[Sequence[Item]], ReturnCall],
        size: Callable[[Item], int] = lambda _: 0,
        on_returned: Callable[[Sequence[Item]], object] = lambda _: None,
        services: EngineContext | None = None,
    ) -> ClaimSource[Item]:
        """Add a source, whose index is one higher than that of the last.

        ``request_claim`` requests a claim from it, and ``request_probe``, for one of several, a
        probe; the other arguments are those of :class:`ReturnQueue`.
        """
        return_queue = ReturnQueue(
            name,
            services or self.services,
            return_call=return_call,
            size=size,
            on_returned=on_returned,
            hand_out=self.hand_out,
        )
        source = ClaimSource(self, request_claim, request_probe, return_queue)
        self._sources.append(source)
        self.caller_queue.add_source(source)
        return source

    @property
    def is_closed(self) -> bool:
        """Whether the queue was closed."""
        return self._shutdown_calls is not None

    @property
    def has_callers(self) -> bool:
        """Whether any caller waits, for items or only for a reply."""
        return bool(self.caller_queue.callers)

    @property
    def has_more(self) -> bool:
        """Whether the last claim from a source left items there."""
        return any(source.has_more for source in self._sources)

    @property
    def is_limited(self) -> bool:
        """Whether limits keep back items that are due, as far as is known."""
        return any(source.is_limited for source in self._sources)

    @property
    def is_contested(self) -> bool:
        """Whether others would handle what is fetched ahead here."""
        return self.contested_until > 0 and self.loop.time() < self.contested_until

    @property
    def is_idle(self) -> bool:
        """Whether no caller is taking and nothing is on its way back."""
        return (
            self.caller_queue.is_idle
            and not self._holders
            and all(source.return_queue.is_idle for source in self._sources)
        )

    async def take(
        self, max_items: int, timeout: float | None, policy: Hashable = None
    ) -> list[Numbered[Item]]:
        """Take one to ``max_items`` items, waiting at most ``timeout`` seconds (None:
        indefinitely).

        Raises:
            Closed: The queue is closed, or closes in the meantime.
            ServerUnavailable, OutcomeUnknown: Only with a timeout of 0: the server did not answer.
            ServerRefused: The server does not let us take.
        """
        if self._shutdown_calls is not None:
            raise Closed("the queue is closed")
        caller = self.join(max_items, timeout, policy)
        self._taking.add(caller)
        try:
            items = await caller.future
        except BaseException:
            if caller.items:
                self.give_back(caller.take_items())
            raise
        finally:
            self._taking.discard(caller)
            self.leave(caller)
        if not items and self._shutdown_calls is not None:
            raise Closed("the queue is closed")
        return items

    def join(self, max_items: int, timeout: float | None, policy: Hashable) -> WaitingCaller[Item]:
        """Add a caller to the queue. Remove it with :meth:`leave`."""
        nowait = timeout is not None and timeout <= 0
        # Not WaitingCaller[Item](...): calling an alias costs more than everything else here.
        caller: WaitingCaller[Item] = WaitingCaller(max_items, policy, nowait=nowait)
        caller.future, caller.timeout, caller.on_served = self.loop.create_future(), None, None
        self.caller_queue.join(caller)
        self._on_join(nowait)
        if timeout is not None:
            caller.timeout = self.services.timer.new_timeout(
                lambda _: self._expire(caller), NOWAIT_TIMEOUT if nowait else timeout
            )
        return caller

    def leave(self, caller: WaitingCaller[Item]) -> None:
        """Remove a caller, unless it was removed already."""
        if caller.timeout is not None:
            caller.timeout.cancel()
        if self.caller_queue.leave(caller) and self._on_last_left is not None:
            self._on_last_left()

    def add_holder(self, holder: Holder[Item]) -> None:
        """Give back what a holder has if the queue closes before :meth:`remove_holder`."""
        self._holders[holder] = None

    def remove_holder(self, holder: Holder[Item]) -> None:
        """Give back what a holder has, all at once, so that it goes back in order."""
        del self._holders[holder]
        self.give_back(holder.take_all())

    def begin_probe(self, sources: Sequence[ClaimSource[Item]]) -> int:
        """Begin to probe sources, each to be ended with its reply, and return the number of the
        probe.
        """
        return self.caller_queue.begin_probe(sources, self.loop.time())

    def fail(self, error: DelayqError) -> None:
        """End all calls with an error."""
        for caller in self._waiting_callers:
            self.leave(caller)
            caller.fail(own_copy(error))

    def give_back(self, items: Iterable[Numbered[Item]], *, to_callers: bool = True) -> None:
        """Hand items to the waiting callers, and return the others to the server, in order; return
        all of them if not ``to_callers``.
        """
        for source, its_items in self._by_source(items):
            if to_callers:
                source.distribute(its_items)
            else:
                source.return_queue.add(its_items)

    def _by_source(
        self, items: Iterable[Numbered[Item]]
    ) -> list[tuple[ClaimSource[Item], list[Numbered[Item]]]]:
        if len(self._sources) == 1:
            return [(self._sources[0], list(items))]
        by_index: dict[int, list[Numbered[Item]]] = {}
        for numbered in items:
            by_index.setdefault(self._source_of(numbered[1]), []).append(numbered)
        return [(self._sources[index], its_items) for index, its_items in by_index.items()]

    def hand_out(
        self, items: list[Numbered[Item]], *, has_more: bool = False
    ) -> list[Numbered[Item]]:
        """Hand items to the waiting callers, and return the remaining ones."""
        remaining = self.caller_queue.hand_out(items, has_more=has_more)
        self.serve(has_more=has_more)
        return remaining

    def serve(self, *, has_more: bool = False) -> None:
        """End the calls of callers whose wait is over, and request claims from other sources."""
        now = self.loop.time()
        caller: WaitingCaller[Item]
        for caller in self.caller_queue.served(now, has_more=has_more):  # type: ignore[assignment]  # no others join
            self.leave(caller)
            if caller.error is not None and not caller.items:
                caller.fail(own_copy(caller.error))
                continue
            # Not a copy: until the caller has run, a close can still take the items out.
            caller.future.set_result(caller.items)
            if caller.on_served is not None:
                caller.on_served(caller)
        if len(self._sources) > 1 and self._shutdown_calls is None:
            self.request_claims()
            self._set_gather_timeout(now)

    def request_claims(self) -> None:
        """Request claims from some of several sources for callers with room, and probe others where
        need be.
        """
        to_claim_from, to_probe = self.caller_queue.next_sources(self.loop.time())
        source: ClaimSource[Item]
        for source in to_claim_from:  # type: ignore[assignment]  # no others were added
            source.request_claim()
        for source in to_probe:  # type: ignore[assignment]
            source.request_probe()

    def _set_gather_timeout(self, now: float) -> None:
        """Serve callers again when a source has held up the others for too long."""
        if (deadline := self.caller_queue.deadline(now)) is None:
            return
        if self._gather_timeout is not None:
            earlier, timeout = self._gather_timeout
            # One that comes too early does no harm, and setting it anew each time would cost more.
            if earlier <= deadline:
                return
            timeout.cancel()
        timeout = self.services.timer.new_timeout(self._on_gather_timeout, max(0.0, deadline - now))
        self._gather_timeout = deadline, timeout

    def _on_gather_timeout(self, _: Timeout) -> None:
        self._gather_timeout = None
        self.serve()

    def close(self, shutdown_calls: ShutdownCalls) -> None:
        """End every waiting call, and write those that return what reached no caller."""
        self._shutdown_calls = shutdown_calls
        if self._gather_timeout is not None:
            self._gather_timeout[1].cancel()
        items: list[Numbered[Item]] = []
        for caller in self._waiting_callers:
            self.leave(caller)
            items += caller.take_items()
            caller.fail(Closed("the queue is closed"))
        for caller in self._taking:
            items += caller.take_items()
        for holder in self._holders:
            items += holder.take_all()
        by_source = dict(self._by_source(items))
        for source in self._sources:
            source.return_queue.close(shutdown_calls, by_source.get(source, []))

    @property
    def _waiting_callers(self) -> list[WaitingCaller[Item]]:
        return self.caller_queue.callers  # type: ignore[return-value]  # no others join

    def _expire(self, caller: WaitingCaller[Item]) -> None:
        if caller.future.done():
            return
        if caller.nowait and not caller.items:
            caller.fail(
                caller.error
                or ServerUnavailable(f"the server did not answer within {NOWAIT_TIMEOUT:g} s")
            )
        else:
            caller.future.set_result(caller.items)
