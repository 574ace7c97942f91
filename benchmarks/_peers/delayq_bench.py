"""The scenarios of bullmq-bench with delayq's ReliableQueue and Worker."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import delayq
from benchmarks._peers.bullmq_bench import Queue, Value, main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Queue]:
    async def work(concurrency: int, handled: Callable[[], Value]) -> None:
        worker = delayq.Worker(url, concurrency=concurrency)

        @worker.listener("benchmark", keep=3600.0)
        async def handle(_job: Value) -> Value:
            return handled()

        await worker.run()

    async with delayq.connect(url) as client:
        queue = client.reliable_queue("benchmark")
        yield Queue(
            queue.offer,
            lambda value, count: queue.offer_many([delayq.Offer(value)] * count),
            work,
        )


if __name__ == "__main__":
    main(opened)
