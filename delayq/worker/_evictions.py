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

    from delayq.client import Client
    from delayq.worker._handling import Source

_log = logging.getLogger("delayq.worker")

# How often a server is asked how many keys it has evicted, seconds: one call for all queues.
_LOOK_EVERY = 60.0


async def look_for_evictions(client: Client, sources: Sequence[Source]) -> None:
    """Warn if the server may evict keys, and put back what waits where no worker finds it: now, and
    whenever the server has evicted more.
    """
    infos = await _infos(client)
    _warn_of_policy(infos)
    while True:
        for source in sources:
            with suppress(DelayqError):
                await _mend(source)
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


async def _mend(source: Source) -> None:
    for store in await source.stores():
        if missing := await store.missing_keys():
            await store.mend()
            _log.error(
                "queue %r: %s, because the server has evicted keys. What waits was put back",
                source.name,
                missing,
                extra=about(source.name),
            )
