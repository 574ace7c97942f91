"""The demo's consumer process: ``python -m delayq.cli.demo.consumer QUEUE``."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio

import delayq
from delayq.cli.demo.figures import latest_offset
from delayq.cli.demo.pipes import WARM_UP, run_child

if TYPE_CHECKING:
    from delayq.cli.demo.pipes import Parent

_EXCHANGES = 10
# The last estimate is dropped if the server takes longer than this, seconds: a dead server may be why the demo ends.
_PATIENCE = 2.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def consume(parent: Parent) -> None:
    """Report when each message arrives, until the parent ends this process. Compares the clocks before and after."""
    (name,) = sys.argv[1:]
    arrived: list[tuple[int, int]] = []
    async with delayq.connect() as client:
        parent.tell(offset_us=await _offset(client))
        async with parent.telling("arrived", arrived):
            async for message in client.delayed_queue(name):
                at_us = time.time_ns() // 1000
                if message["number"] == WARM_UP:
                    parent.tell(ready=True)
                else:
                    arrived.append((message["number"], at_us))
        with anyio.move_on_after(_PATIENCE), suppress(delayq.DelayqError):
            parent.tell(offset_us=await _offset(client))


async def _offset(client: delayq.Client) -> int:
    return latest_offset([await _exchange(client) for _ in range(_EXCHANGES)])


async def _exchange(client: delayq.Client) -> tuple[int, int]:
    sent_us = time.time_ns() // 1000
    return sent_us, (await client.server_time() - _EPOCH) // _MICROSECOND


if __name__ == "__main__":
    run_child(consume)
