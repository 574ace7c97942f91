"""Finds out which partitions of a queue have something due, before any of them is asked for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from delayq._logging import about
from delayq.errors import DelayqError, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delayq._engine.scheduler import Scheduler
    from delayq._engine.store import NextDue
    from delayq._reliable.open_queue import OpenReliableQueue
    from delayq._reliable.partition import Partition

_log = logging.getLogger("delayq")


class Probes:
    """Probes the partitions of one queue, with one call to each server.

    A server that does not answer holds up no other.
    """

    def __init__(self, queue: OpenReliableQueue, scheduler: Scheduler) -> None:
        self._queue = queue
        self._scheduler = scheduler
        # The partitions to look at next, by server, and the servers that are being asked.
        self._requested: dict[object, dict[Partition, None]] = {}
        self._asked: set[object] = set()
        self._turn = 0

    def request(self, partitions: list[Partition]) -> None:
        """Look at partitions now, or right after the look that is under way."""
        # Each time, another one is the first to be asked for messages.
        self._turn += 1
        at = self._turn % len(partitions)
        for partition in (*partitions[at:], *partitions[:at]):
            server = self._server_of(partition)
            self._requested.setdefault(server, {})[partition] = None
        services = self._queue.services
        for server in self._requested:
            if server not in self._asked:
                self._asked.add(server)
                services.background.spawn(self._run(server), f"look at {self._queue.name}")

    def _server_of(self, partition: Partition) -> object:
        try:
            return self._queue.services.nodes.of(partition.keys.wake)
        except ServerError:
            return partition

    async def _run(self, server: object) -> None:
        try:
            while partitions := self._requested.pop(server, None):
                await self._look(partitions)
        finally:
            self._asked.discard(server)

    async def _look(self, partitions: Iterable[Partition]) -> None:
        dispatcher = self._queue.dispatcher
        left = {partition: partition.wakeups.plan.knowledge for partition in partitions}
        number = dispatcher.begin_probe([partition.claims.source for partition in left])

        def found(partition: Partition, due_us: int, reply: NextDue) -> None:
            knowledge = left.pop(partition)
            self._queue.settings.on_epoch(partition.index, reply.epoch.decode(errors="replace"))
            if due_us:
                partition.wakeups.on_probe(due_us, knowledge)
            partition.claims.source.end_probe(number, may_have_items=not due_us)

        try:
            await self._scheduler.check(
                [(partition, partition.keys.re_checked) for partition in left], found
            )
        except Exception as error:  # noqa: BLE001 - partitions must not stay pending, whatever fails
            if isinstance(error, DelayqError):
                failure: DelayqError = error
            else:
                name = self._queue.name
                _log.exception("queue %r: a look failed", name, extra=about(name))
                failure = ServerUnavailable(f"a look failed: {type(error).__name__}")
            for partition in left:
                partition.claims.source.fail_probe(failure)
                if dispatcher.callers.are_waiting:
                    # Its own calls are repeated until one succeeds.
                    partition.wake()
