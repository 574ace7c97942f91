"""The stored messages of a reliable queue: finds, changes, counts and drops them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Generic, Literal, get_args

from delayq._durations import Duration, seconds
from delayq._generics import T
from delayq._reliable.dead_letters import check_page, checked_ids, half_way
from delayq._reliable.ids import checked_id, home_of
from delayq._reliable.listing import live_page
from delayq._reliable.outcomes import Outcome, history_of
from delayq._reliable.replies import LIVE_STATES
from delayq._reliable.scripts import PAGE
from delayq.errors import (
    BadInput,
    MessageFailed,
    NoResult,
    ResultTimeout,
    ServerError,
    ServerRefused,
)
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from delayq._reliable.consumer import Consumer
    from delayq._reliable.message import Message
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import LiveState
    from delayq._reliable.store import ReliableStore

Purgeable = Literal["delayed", "ready", "all"]
PURGEABLE: tuple[Purgeable, ...] = get_args(Purgeable)


class StoredMessages(Generic[T]):
    """The stored messages of a queue, for one handle, whichever partition they lie in.

    Methods raise as the methods of :class:`ReliableQueue` that use them.
    """

    def __init__(self, consumer: Consumer[Message[T]]) -> None:
        self._consumer = consumer
        self._queue = consumer.queue

    async def change(
        self,
        ids: Iterable[str],
        call: Callable[[ReliableStore, Sequence[str]], Awaitable[list[bool]]],
    ) -> list[bool]:
        """Change messages wherever they lie, and return for each id whether ``call`` has changed
        its message.

        Raises:
            OutcomeUnknown: Some were changed, or may have been. With any other error, none was.
        """
        if (checked := checked_ids(ids)) is None:
            raise BadInput("ids must be a list of ids, not None")
        queue = await self._consumer.declare()
        changed: dict[str, bool] = dict.fromkeys(checked, False)
        try:
            while True:
                count = queue.settings.stored.partitions
                candidates = [queue.candidates(id) for id in changed]  # noqa: A001
                for partitions in zip_longest(*candidates):
                    parts: dict[Partition, list[str]] = {}
                    for id, partition in zip(changed, partitions, strict=True):  # noqa: A001
                        if partition is not None and not changed[id]:
                            parts.setdefault(partition, []).append(id)
                    for partition, part in parts.items():
                        for at in range(0, len(part), PAGE):
                            page = part[at : at + PAGE]
                            replies = await queue.settings.repeat(
                                partial(call, partition.store, page)
                            )
                            changed.update(zip(page, replies, strict=True))
                if all(changed.values()) or not await queue.has_other_partitions(count):
                    break
        except ServerError as error:
            raise half_way(error, sum(changed.values())) from error.__cause__
        return [changed[id] for id in checked]  # noqa: A001

    async def get(self, id: str) -> Message[T] | None:  # noqa: A002
        """Return a live message; None if there is no message with that id."""
        await self._consumer.declare_and_flush()
        queue, checked = self._queue, checked_id(id)

        async def read(partition: Partition) -> Message[T] | None:
            message = await partition.store.get(checked)
            return None if message is None else self._consumer.wrap_stored(partition, message)

        return await queue.search(lambda: queue.candidates(checked), read)

    async def result(self, id: str, timeout: Duration | None) -> bytes | None:  # noqa: A002
        """Return the encoded result of a message, as :meth:`ReliableQueue.result` does; None for no
        result.
        """
        checked = checked_id(id)
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        queue = await self._consumer.declare_and_flush()
        if timeout_s == 0:
            outcome = await self._read_outcome(checked, 0)
            if outcome.is_pending:
                raise ResultTimeout(checked, 0.0)
        else:
            for partition in queue.partitions:
                partition.listen()
            outcome = await queue.notifications.wait_for_outcome(
                checked, timeout_s, self._read_outcome
            )
        if outcome.death is not None and not outcome.is_live:
            raise MessageFailed(checked, outcome.death.reason, outcome.death.error)
        if outcome.record is None or not outcome.record.is_done or outcome.is_live:
            raise NoResult(checked, keeps=outcome.keeps)
        return outcome.record.payload

    async def _read_outcome(self, id: str, remember_us: int) -> Outcome:  # noqa: A002
        """Return the end of a message, or that it lives.

        The server remembers for ``remember_us`` that this client waits.
        """
        queue = self._queue
        while True:
            count, outcomes = queue.settings.stored.partitions, list[Outcome]()
            candidates = queue.candidates(id)
            for partitions in (candidates[:1], candidates[1:]):
                for partition in partitions:
                    outcome = await queue.settings.repeat(
                        partial(partition.store.await_end, id, remember_us)
                    )
                    if outcome.is_live:
                        return outcome
                    outcomes.append(outcome)
                newest = max(outcomes, key=lambda outcome: outcome.moment_us)
                if newest.moment_us:
                    return newest
            if not await queue.has_other_partitions(count):
                return newest

    async def history(self, id: str) -> MessageHistory | None:  # noqa: A002
        """Return what is known about a message, alive or not; None if that is nothing."""
        await self._consumer.declare_and_flush()
        queue, checked = self._queue, checked_id(id)
        histories: list[MessageHistory] = []
        # A partition that has only the record of an earlier message with that id is asked first.
        for partition in reversed(queue.candidates(checked)):
            outcome = await queue.settings.repeat(partial(partition.store.outcome, checked))
            history = history_of(checked, *outcome, self._consumer.codec)
            if history is not None:
                histories.append(history)
        live = [history for history in histories if history.is_live]
        return (live or histories)[-1] if histories else None

    async def depth(self) -> QueueDepth:
        """Return the number of messages in each state."""
        await self._consumer.declare_and_flush()
        return QueueDepth.total(
            await self._queue.for_each_partition(lambda partition: partition.store.depth())
        )

    async def list(self, state: LiveState, offset: int, limit: int) -> list[Message[T]]:
        """Return messages in one state, in the order in which they will come."""
        self._consumer.check_open()
        if state not in LIVE_STATES:
            raise BadInput(f'state must be "delayed", "ready" or "leased", not {state!r}')
        check_page(offset, limit)
        await self._consumer.declare_and_flush()

        async def page(partitions: Sequence[Partition]) -> list[Message[T]]:
            stores = [partition.store for partition in partitions]
            messages = (await live_page(stores, state, offset, limit)).messages
            return [
                self._consumer.wrap_stored(partitions[index], message)
                for index, message in messages
            ]

        return await self._queue.with_all_partitions(page)

    async def purge(self, state: Purgeable, progress: Callable[[int, int], None] | None) -> int:
        """Drop messages, and return how many."""
        self._consumer.check_open()
        if state not in PURGEABLE:
            raise BadInput(f'state must be "delayed", "ready" or "all", not {state!r}')
        await self._consumer.declare_and_flush()
        total = dropped = 0
        if progress is not None:
            depth = await self.depth()
            states = LIVE_STATES if state == "all" else (state,)
            total = sum(getattr(depth, name) for name in states)

        async def purge(partition: Partition) -> None:
            nonlocal dropped
            async for of_page in partition.store.purge_all(state):
                dropped += of_page
                if progress is not None:
                    # Other clients may add messages meanwhile.
                    progress(dropped, max(dropped, total))

        try:
            await self._queue.for_each_partition(purge)
        except ServerError as error:
            raise half_way(error, dropped) from error.__cause__
        return dropped

    async def pause(self) -> None:
        """Stop all claims until :meth:`resume`."""
        queue = await self._consumer.declare()
        # Partitions that a queue is given later would not be paused.
        await queue.settings.learn({}, set_partition_count=True)
        (await queue.settings.read()).check_not_moving(queue.name)
        await queue.for_each_partition(lambda partition: partition.store.pause())

    async def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        queue = await self._consumer.declare()
        (await queue.settings.read()).check_not_moving(queue.name)
        was_paused = False

        async def resume(partition: Partition) -> None:
            nonlocal was_paused
            was_paused |= await partition.store.resume()

        await queue.for_each_partition(resume)
        return was_paused

    # Groups and dead letters

    async def store_of_group(self, group: str) -> ReliableStore:
        """Return the data of the partition in which a group lies."""
        queue = await self._consumer.declare_and_flush()
        (await queue.settings.read()).check_at_rest(queue.name)
        return queue.home_of(group).store

    async def set_group(self, group: str, action: str, limit: str) -> bool:
        """Change a group where it lies."""
        queue = await self._consumer.declare_and_flush()
        return await queue.settings.write(
            partial(home_of, group),
            lambda index, count: queue.opened_partitions[index].store.set_group(
                count, group, action, limit
            ),
        )

    async def stores(self) -> Sequence[ReliableStore]:
        """Return the data of all partitions."""
        queue = await self._consumer.declare_and_flush()
        (await queue.settings.read()).check_at_rest(queue.name)
        return [partition.store for partition in queue.partitions]

    async def letters_by_store(
        self, ids: Sequence[str] | None
    ) -> Mapping[ReliableStore, Sequence[str] | None]:
        """Return the partitions in which dead letters with these ids may be, each with those ids;
        all partitions if it gets None.
        """
        queue = await self._consumer.declare()
        stored = await queue.settings.read()
        stored.check_at_rest(queue.name)
        if stored.drops_letters:
            # A user that may only look sees letters that are about to go.
            with suppress(ServerRefused):
                await queue.for_each_partition(lambda partition: partition.store.trim_dead())
        if ids is None:
            return dict.fromkeys(partition.store for partition in queue.partitions)
        ids_by_store: dict[ReliableStore, list[str]] = {}
        for id in ids:  # noqa: A001
            for partition in queue.candidates(id):
                ids_by_store.setdefault(partition.store, []).append(id)
        return ids_by_store
