"""delayq's DelayedQueue, consumed with ``async for``."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import delayq
from benchmarks._peers.adapter import Notes, Offers, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    async with delayq.connect(url) as client:
        queue = client.delayed_queue("benchmark")

        async def offer_one(due: float) -> None:
            await queue.offer(payload(due), at=datetime.fromtimestamp(due, UTC))

        async def offer_many(dues: list[float]) -> None:
            now = time.time()
            await queue.offer_many([(payload(due), max(0.0, due - now)) for due in dues])

        yield Offers(offer_one, offer_many)


def handle(url: str, _best: bool, notes: Notes) -> None:
    notes.by_thread()

    async def run() -> None:
        async with delayq.connect(url) as client:
            async for message in client.delayed_queue("benchmark"):
                notes.add(message["due"])

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
