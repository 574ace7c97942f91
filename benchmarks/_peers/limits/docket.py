# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""docket: a worker reads a task from the stream, asks if it may run, and parks it if not."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from docket import ConcurrencyLimit, Cooldown, Debounce, Docket, RateLimit, Worker

from benchmarks._peers.limits.adapter import Batch, Notes, Task, main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

NAME = "benchmark"


def task_for(task: Task, notes: Notes | None = None) -> Any:
    async def note(number: int, tenant: str, limit: Any = None) -> None:  # noqa: ARG001
        assert notes is not None
        started = time.time()
        if task.handler:
            await asyncio.sleep(task.handler)
        notes.add(started, number)

    if task.concurrency is not None:
        by = {"argument_name": "tenant"} if task.by_tenant else {}
        note.__defaults__ = (ConcurrencyLimit(max_concurrent=task.concurrency, **by),)
    elif task.rate is not None:
        note.__defaults__ = (RateLimit(task.rate, per=timedelta(seconds=1)),)
    elif task.keep:
        kind = Cooldown if task.keep == "first" else Debounce
        note.__annotations__ |= {"number": int, "limit": Any}
        note.__annotations__["tenant"] = Annotated[str, kind(timedelta(seconds=task.window))]
    return note


@asynccontextmanager
async def offers(url: str, task: Task) -> AsyncIterator[Callable[[Batch], Any]]:
    note = task_for(task)
    async with Docket(NAME, url) as docket:
        docket.register(note)

        async def offer(batch: Batch) -> None:
            if task.keep:
                for number in batch.numbers():
                    await docket.add(note)(number=number, tenant=batch.tenant)
                return
            await docket.add_many(
                docket.call(note)(number=number, tenant=batch.tenant) for number in batch.numbers()
            )

        yield offer


def handle(url: str, task: Task, notes: Notes) -> None:
    notes.by_thread()
    logging.disable()

    async def run() -> None:
        # These are the settings with which docket does best in the benchmark of peers.
        fast = timedelta(milliseconds=10)
        intervals = {"minimum_check_interval": fast, "scheduling_resolution": fast}
        async with Docket(NAME, url, execution_ttl=timedelta(0)) as docket:
            docket.register(task_for(task, notes))
            async with Worker(docket, concurrency=task.slots, **intervals) as worker:
                await worker.run_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
