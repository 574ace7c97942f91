"""Finds out which partitions of a queue have something due, with one call to each server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from delayq._logging import about
from delayq.errors import DelayqError, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.dispatcher import Dispatcher
    from delayq._engine.scheduler import Scheduler
    from delayq._engine.store import NextDue
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings_cache import SettingsCache

_log = logging.getLogger("delayq")


class Probes:
    """Probes partitions of one queue. A server that does not answer holds up no other."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        services: EngineContext,
        dispatcher: Dispatcher[Claim],
        settings: SettingsCache,
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._services = services
        self._dispatcher = dispatcher
        self._settings = settings
        # The partitions to probe next, by server, and the servers to which a probe is under way.
        self._requested: dict[object, dict[Partition, None]] = {}
        self._probed_servers: set[object] = set()
        self._turn = 0

    def request(self, partitions: Sequence[Partition]) -> None:
        """Probe partitions now, or right after the probe that is under way."""
        # Each time, another one is the first to be asked for messages.
        self._turn += 1
        at = self._turn % len(partitions)
        for partition in (*partitions[at:], *partitions[:at]):
            server = self._server_of(partition)
            self._requested.setdefault(server, {})[partition] = None
        for server in self._requested:
            if server not in self._probed_servers:
                self._probed_servers.add(server)
                self._services.background.spawn(self._run(server), f"probe {self._name}")

    def _server_of(self, partition: Partition) -> object:
        try:
            return self._services.nodes.pool_of(partition.keys.wake)
        except ServerError:
            return partition

    async def _run(self, server: object) -> None:
        try:
            while partitions := self._requested.pop(server, None):
                await self._probe(partitions)
        finally:
            self._probed_servers.discard(server)

    async def _probe(self, partitions: Iterable[Partition]) -> None:
        pending = {partition: partition.wakeups.plan.invalidations for partition in partitions}
        number = self._dispatcher.begin_probe([partition.claims.source for partition in pending])

        def on_reply(partition: Partition, due_us: int, reply: NextDue) -> None:
            invalidations = pending.pop(partition)
            self._settings.on_epoch(partition.index, reply.epoch.decode(errors="replace"))
            if due_us:
                partition.wakeups.on_probe(due_us, invalidations)
            partition.claims.source.end_probe(number, may_have_items=not due_us)

        try:
            await self._scheduler.check(
                [(partition, partition.keys.recheck_keys) for partition in pending], on_reply
            )
        except Exception as error:  # noqa: BLE001 - partitions must not stay pending, whatever fails
            if isinstance(error, DelayqError):
                failure: DelayqError = error
            else:
                _log.exception("queue %r: a probe failed", self._name, extra=about(self._name))
                failure = ServerUnavailable(f"a probe failed: {type(error).__name__}")
            for partition in pending:
                partition.claims.source.fail_probe(failure)
                if self._dispatcher.caller_queue.has_patient_callers:
                    # Its own calls are repeated until one succeeds.
                    partition.wake()
