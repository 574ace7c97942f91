"""delayq: limits of the queue or of each group, kept on the server."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import delayq
from benchmarks._peers.limits.adapter import Batch, Notes, Task, main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

NAME = "benchmark"


@asynccontextmanager
async def offers(url: str, task: Task) -> AsyncIterator[Callable[[Batch], Any]]:
    limit = None
    if task.concurrency is not None or task.rate is not None:
        limit = delayq.Limit(concurrency=task.concurrency, rate=task.rate)
    queue_limit, group_limit = (None, limit) if task.by_tenant else (limit, None)
    async with delayq.connect(url) as client:
        queue: delayq.ReliableQueue[int] = client.reliable_queue(
            NAME, limit=queue_limit, group_limit=group_limit
        )

        async def offer(batch: Batch) -> None:
            for number in batch.numbers() if task.keep else ():
                if task.keep == "first":
                    options: dict[str, Any] = {"unique_for": task.window, "on_duplicate": "ignore"}
                else:
                    options = {"delay": task.window, "on_duplicate": "replace"}
                await queue.offer(number, id=batch.tenant, **options)
            if task.keep:
                return
            group = batch.tenant if task.by_tenant else None
            await queue.offer_many(
                [delayq.Offer(number, group=group) for number in batch.numbers()]
            )

        yield offer


def handle(url: str, task: Task, notes: Notes) -> None:
    notes.by_thread()
    worker = delayq.Worker(url, concurrency=task.slots)

    @worker.listener(NAME)
    async def note(number: int) -> None:
        started = time.time()
        if task.handler:
            await asyncio.sleep(task.handler)
        notes.add(started, number)

    asyncio.run(worker.run())


if __name__ == "__main__":
    main(offers, handle)
