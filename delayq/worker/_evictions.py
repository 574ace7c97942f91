"""What a worker does about a server that evicts keys when its memory is short."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from delayq._logging import about
from delayq._redis import server_info
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delayq._reliable.consumer import WorkerPort
    from delayq.client import Client

_log = logging.getLogger("delayq.worker")

# How often a server is asked how many keys it has evicted, seconds: one call for all queues.
_LOOK_EVERY = 60.0


async def look_for_evictions(client: Client, ports: Sequence[WorkerPort]) -> None:
    """Warn if the server may evict keys, and put back what waits where no worker finds it: now, and
    whenever the server has evicted more.
    """
    infos = await _infos(client)
    _warn_of_policy(infos)
    while True:
        for port in ports:
            with suppress(DelayqError):
                await _mend(port)
        if not infos:
            # Who may not ask is not told.
            return
        before = _evicted(infos)
        while _evicted(infos) == before:
            await asyncio.sleep(_LOOK_EVERY)
            infos = await _infos(client) or infos


async def _infos(client: Client) -> list[dict[str, str]]:
    with suppress(DelayqError):
        return await server_info.servers(client.session.server)
    return []


def _evicted(infos: Iterable[Mapping[str, str]]) -> list[str | None]:
    return [info.get("evicted_keys") for info in infos]


def _warn_of_policy(infos: Iterable[Mapping[str, str]]) -> None:
    for policy in {info.get("maxmemory_policy", "noeviction") for info in infos} - {"noeviction"}:
        _log.warning(
            "the server may drop messages when its memory is short: its maxmemory-policy is %s. Set"
            " it to noeviction: CONFIG SET maxmemory-policy noeviction, and in its configuration"
            " file",
            policy,
        )


async def _mend(port: WorkerPort) -> None:
    for store in await port.stores():
        if missing := await store.missing_keys():
            await store.mend()
            _log.error(
                "queue %r: %s, because the server has evicted keys. What waits was put back",
                port.name,
                missing,
                extra=about(port.name),
            )
