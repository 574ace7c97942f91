# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""The scenarios of bullmq-bench with ChasquiMQ."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import chasquimq

from benchmarks._peers.bullmq_bench import Queue, Value, main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Queue]:
    async def work(concurrency: int, handled: Callable[[], Value]) -> None:
        async def handle(_job: Any) -> Value:
            return handled()

        await chasquimq.Worker(
            "benchmark", handle, redis_url=url, concurrency=concurrency, store_results=True
        ).run()

    async with chasquimq.Queue("benchmark", redis_url=url) as queue:
        yield Queue(
            lambda value: queue.add("test", value),
            lambda value, count: queue.add_bulk([{"name": "test", "data": value}] * count),
            work,
        )


if __name__ == "__main__":
    main(opened)
