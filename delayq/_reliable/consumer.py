"""Takes messages for one handle of a reliable queue, and the port through which workers do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq._engine import prefetch
from delayq._engine.prefetch import AlwaysMore
from delayq._engine.reader import Reader
from delayq._generics import T
from delayq._reliable.batches import Batch
from delayq._reliable.claims import MOST_PER_CLAIM
from delayq._reliable.failures import RetryRules
from delayq._reliable.ids import AT_SIGN, is_occurrence
from delayq._reliable.message import Message
from delayq._reliable.message_context import MessageContext
from delayq._reliable.replies import Claim
from delayq.errors import Closed

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from delayq._engine.caller_queue import Numbered
    from delayq._engine.prefetch import Ahead
    from delayq._reliable.failures import Interrupted
    from delayq._reliable.offer_encoder import OfferEncoder
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import StoredMessage
    from delayq._reliable.settings import Policy
    from delayq._reliable.settings_cache import Declaration
    from delayq._reliable.store import ReliableStore
    from delayq.backoff import Backoff
    from delayq.codecs import Codec

M = TypeVar("M", bound=Message[Any])


def _never() -> bool:
    return False


class Consumer(Generic[M]):
    """Takes messages for one handle.

    Attributes:
        queue: The queue, as this client has it open.
        declaration: The settings of the queue that the handle declares.
        codec: Decodes the values.
        policy: The settings that go with each claim.
        backoff: Decides when a failed message is retried.
        encoder: Encodes the results of handlers, and the messages that follow.
        check_open: Raises an error if the queue is closed, or used in another event loop.
        is_stopping: Returns whether the handlers of messages are to end soon.
    """

    def __init__(
        self,
        queue: OpenReliableQueue,
        declaration: Declaration,
        codec: Codec[Any],
        policy: Policy,
        backoff: Backoff,
        encoder: OfferEncoder[Any],
        check_open: Callable[[], None],
        message_type: Callable[..., M],
    ) -> None:
        self.queue: OpenReliableQueue = queue
        self.declaration: Declaration = declaration
        self.codec: Codec[Any] = codec
        self.policy: Policy = policy
        self.backoff: Backoff = backoff
        self.encoder: OfferEncoder[Any] = encoder
        self.check_open: Callable[[], None] = check_open
        self.is_stopping: Callable[[], bool] = _never
        self._message_type = message_type
        self._hooks = queue.services.hooks
        # By partition: the messages of each share one.
        self._contexts: dict[int, MessageContext[Any]] = {}

    async def declare(self) -> OpenReliableQueue:
        """Check that the queue is open, declare the settings that the handle was given, and return
        the queue.
        """
        self.check_open()
        if not self.declaration.is_made:
            await self.declaration.make()
        return self.queue

    async def declare_and_flush(self) -> OpenReliableQueue:
        """Do as :meth:`declare`, and flush the acknowledgements that this client has not waited
        for, so that the next call sees their effect.
        """
        queue = await self.declare()
        await queue.flush()
        self.check_open()
        return queue

    async def claim(self, count: int, wait: float | None) -> Sequence[Numbered[Claim]]:
        """Claim up to ``count`` due messages, waiting at most ``wait`` seconds for the first one;
        without limit if that is None.

        Raises as :meth:`ReliableQueue.claim`.
        """
        self.check_open()
        if not self.declaration.is_made:
            try:
                wait = await self.declaration.make_within(wait)
            except TimeoutError:
                return ()
        queue, remaining = self.queue, wait
        deadline = None if wait is None else queue.loop.time() + wait
        while True:
            items = await queue.dispatcher.take(count, remaining, self.policy)
            for _, claim in items:
                # A call for each would cost more than the search for an "@".
                if AT_SIGN in claim.id and is_occurrence(claim.id):
                    break
            else:
                return items
            if items := await self._advance_schedules(items):
                return items
            if deadline is not None:
                remaining = max(0.0, deadline - queue.loop.time()) if wait else 0.0

    def batch(self, id: str) -> Batch:  # noqa: A002
        """Return the batch with an id."""
        return Batch(id, self.queue, self.codec)

    def wrap(self, claim: Claim, ahead: Ahead | None = None) -> M:
        """Count a claimed message as delivered, and return it as its handler gets it.

        ``ahead`` has the messages that are handled next.
        """
        context = self._contexts.get(claim.partition) or self._context_of(claim.partition)
        partition = context.partition
        partition.counters.delivered += 1
        lateness = context.reports.lateness
        lateness.skip -= 1
        if lateness.skip < 0:
            lateness.add(-partition.clock.seconds_from_now(claim.due_us))
        if self._hooks.delivered:
            late_s = max(0.0, -partition.clock.seconds_from_now(claim.due_us))
            self._hooks.notify_delivered(self.queue.name, late_s)
        # Positional arguments: keyword arguments would cost more than the rest of this function.
        return self._message_type(claim, context, "leased", ahead)

    def wrap_stored(self, partition: Partition, stored: StoredMessage) -> M:
        """Return a message that was read without being claimed."""
        # A message finds its facts in a claim. This one has no lease: its token is empty.
        claim = Claim(
            stored.id,
            b"",
            stored.body,
            stored.moment_us,
            0.0,
            None,
            partition.index,
            priority=stored.priority,
            attempt=stored.attempt,
            known_due_us=stored.moment_us,
        )
        context = self._context_of(partition.index)
        if stored.error is not None:
            claim.error = stored.error  # type: ignore[misc]  # a slot of its base
        return self._message_type(claim, context, stored.state)

    async def stream(self) -> AsyncIterator[M]:
        """Yield messages as :meth:`ReliableQueue.__aiter__` does."""
        self.check_open()
        try:
            if not self.declaration.is_made:
                await self.declaration.make_within(None)
        except Closed:
            return
        queue, now, wrap = self.queue, self.queue.loop.time, self.wrap
        cancelled, within = queue.notifications.cancelled, prefetch.WITHIN
        reader: Reader[Claim] = Reader()
        async with aclosing(reader.batches(queue.dispatcher, self.policy)) as batches:
            async for batch in batches:
                late = now() + within
                while batch:
                    moment = now()
                    if moment > late:
                        reader.return_if_late(moment - late)
                        late = moment + within
                        continue
                    late = moment + within
                    # Less than half of its lease remains: it has waited for a slow handler.
                    if moment > batch[0][1].fresh_until:
                        await self._drop_lost(batch)
                        late = now() + within
                        if not batch:
                            break
                    numbered = batch.popleft()
                    claim = numbered[1]
                    if cancelled and claim.lease_id in cancelled:
                        self._free_slots(claim)
                        continue
                    if AT_SIGN not in claim.id or await self._advance_schedules([numbered]):
                        yield wrap(claim, batch)

    async def _advance_schedules(self, items: list[Numbered[Claim]]) -> list[Numbered[Claim]]:
        """Put the next occurrences in place for messages that are about to be handed out.

        Returns the messages to hand out.
        """
        indices = {claim.partition for _, claim in items if is_occurrence(claim.id)}
        for index in indices:
            items = await self.queue.opened_partitions[index].recurrence.advance(items)
        return items

    def _context_of(self, number: int) -> MessageContext[Any]:
        if number not in self._contexts:
            queue = self.queue
            partition = queue.opened_partitions[number]
            self._contexts[number] = MessageContext(
                self.codec,
                partition,
                partition.acknowledger,
                RetryRules(self.policy.max_attempts, self.backoff),
                partition.keeper(self.policy.lease_us),
                queue.loop,
                queue.notifications.cancelled,
                self._hooks,
                queue.reports,
                self.encoder,
                self,
            )
        return self._contexts[number]

    async def _drop_lost(self, batch: deque[Numbered[Claim]]) -> None:
        """Drop messages that were claimed ahead and may have waited for a slow handler until
        another worker got them, or their time to live ended.
        """
        now = self.queue.loop.time()
        if expired := [item for item in batch if item[1].expires_at < now]:
            for item in expired:
                batch.remove(item)
            # The next claim expires them.
            self.queue.dispatcher.give_back(expired, to_callers=False)
            if not batch or now <= batch[0][1].fresh_until:
                return
        by_partition: dict[int, list[Claim]] = {}
        for _, claim in batch:
            by_partition.setdefault(claim.partition, []).append(claim)
        calls = (
            self._context_of(number).keeper.freshen(claims)
            for number, claims in by_partition.items()
        )
        lost_claims = {claim for claims in await asyncio.gather(*calls) for claim in claims}
        for item in [item for item in batch if item[1] in lost_claims]:
            batch.remove(item)
            self._free_slots(item[1])

    def _free_slots(self, claim: Claim) -> None:
        """Free the slots of a message that is gone before its handler began, if it has any."""
        self.queue.opened_partitions[claim.partition].acknowledger.free_slots(claim)


class WorkerMessage(Message[T]):
    """A message, as the worker sees it that handles it.

    ``begin()`` and ``end()`` are the parts of ``async with`` that need not await anything. The
    former begins the block, and returns the task in which it runs; it does nothing and returns None
    if something must be awaited first. The latter ends a block that raised nothing, and returns
    True; it returns False if something must be awaited for that.
    """

    __slots__ = ()

    # Not `def begin` and `def end`, which call these: each message would pay for them.
    begin = Message._begin  # noqa: SLF001
    end = Message._end  # noqa: SLF001

    @property
    def claim(self) -> Claim:
        """The facts known about the message."""
        return self._claim

    @property
    def has_options(self) -> bool:
        """Whether it has a header or an option of its own, as far as its value was decoded."""
        return self._parsed is not None

    @property
    def is_decoded(self) -> bool:
        """Whether its value was decoded."""
        return self._value is not None

    @property
    def is_expired(self) -> bool:
        """Whether its time to live has ended before it was begun."""
        return self.lives_for < 0

    @property
    def lives_for(self) -> float:
        """For how long it has not expired yet, in seconds; infinite without a time to live."""
        return self._claim.expires_at - self._context.loop.time()

    @property
    def is_lost(self) -> bool:
        """Whether its lease is lost."""
        return self._is_lost

    @property
    def is_done(self) -> bool:
        """Whether its handler has acknowledged it, or has given it back in one way or another."""
        return self._settled and not self._is_lost

    @property
    def counted_attempts(self) -> int:
        """The number of attempts that count towards its death."""
        return self._claim.attempt - self._claim.uncounted

    @property
    def backoff(self) -> Backoff:
        """Decides when it is retried, unless its error does."""
        return self._context.retry_rules.backoff

    def retry_by(self, rules: RetryRules) -> None:
        """Follow other rules than those of the queue handle."""
        self._context = self._context.with_rules(rules)

    async def give_back_unbegun(self) -> None:
        """Give it back before its handler has begun: a rate does not count it. Raises as
        :meth:`ack`.
        """
        await self._give_back(is_begun=False)

    def leave_to_lease(self) -> None:
        """Do nothing more about it: it is redelivered when its lease ends."""
        self._mark_settled()

    async def interrupt(self, interruption: Interrupted) -> None:
        """Give it back as its handler was interrupted. Raises as :meth:`ack`."""
        await self._interrupt(interruption)

    def report_failure(self, failure: BaseException) -> None:
        """Report a failure to the observers, because it does not leave the block."""
        if self._observation is not None:
            self._observation.fail(failure)

    def handler_outlives(self) -> None:
        """Note that its handler runs on after its block: if it is cancelled, it keeps its slots
        until :meth:`handler_ended`.
        """
        self._context.acknowledger.on_outlived(self._claim)

    def handler_ended(self) -> None:
        """Note that its handler has ended that has outlived its block."""
        self._context.acknowledger.on_handler_ended(self._claim)


class WorkerPort(Consumer[WorkerMessage[Any]]):
    """The part of a queue that a worker uses: it claims messages, and returns those that no
    handler has begun.

    Attributes:
        name: The queue's name.
        ahead: The messages that the worker handles next: a handled message does not wait for its
            acknowledgement, unless too many are in flight.
        give_back: Returns claimed messages as they were, without counting an attempt.
        quiet: Waits until no claim is in flight, and everything given back has arrived.
        flush: Waits for the replies to all acknowledgements sent before now.
    """

    def __init__(self, consumer: Consumer[Any], concurrency: int) -> None:
        super().__init__(
            consumer.queue,
            consumer.declaration,
            consumer.codec,
            consumer.policy,
            consumer.backoff,
            consumer.encoder,
            consumer.check_open,
            WorkerMessage,
        )
        queue = consumer.queue
        self.name: str = queue.name
        self.ahead: AlwaysMore = AlwaysMore(2 * concurrency)
        self.give_back: Callable[[Iterable[Numbered[Claim]]], None] = queue.dispatcher.give_back
        self.quiet: Callable[[float], Awaitable[None]] = queue.quiet
        self.flush: Callable[[], Awaitable[None]] = queue.flush
        self._concurrency = concurrency

    def set_max_attempts(self, max_attempts: int) -> None:
        """Have the server give up messages after this many attempts; 0 for no limit."""
        self.policy: Policy = replace(self.policy, max_attempts=max_attempts)

    @contextmanager
    def report_slots(self, free: Callable[[], int]) -> Iterator[None]:
        """Report, while the block runs, how many messages the worker handles at a time. ``free``
        returns how many more it could.
        """
        with self.queue.served(self._concurrency, free):
            yield

    async def stores(self) -> list[ReliableStore]:
        """Return the data of the queue's partitions, once earlier acknowledgements are answered."""
        queue = await self.declare_and_flush()
        return [partition.store for partition in queue.partitions]

    @property
    def most_at_once(self) -> int:
        """Maximum number of messages to claim at once."""
        return MOST_PER_CLAIM * len(self.queue.partitions)

    @property
    def unanswered(self) -> int:
        """Number of acknowledgements in flight."""
        return self.queue.acks_in_flight

    @property
    def is_contested(self) -> bool:
        """Whether other clients wait for slots of a limit."""
        return self.queue.dispatcher.is_contested

    async def is_limited(self) -> bool:
        """Return whether messages are due that a limit keeps back, after a claim that got none."""
        if (partitions := len(self.queue.partitions)) > 1:
            # Probing a partition does not tell what limits keep back there, as a claim does.
            self.queue.expect_messages_everywhere()
            if claimed := await self.claim(partitions, 0.0):
                self.give_back(claimed)
                return True
        return self.queue.dispatcher.is_limited
