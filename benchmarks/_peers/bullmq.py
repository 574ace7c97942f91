# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""BullMQ for Python: a sorted set, and a marker on which the worker blocks for whole seconds."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from bullmq import Queue, Worker

from benchmarks._peers.adapter import Notes, Offers, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def options(due: float) -> dict[str, Any]:
    return {"delay": max(1, math.ceil((due - time.time()) * 1000)), "removeOnComplete": True}


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    queue = Queue("benchmark", {"connection": url})

    async def offer_one(due: float) -> None:
        await queue.add("handle", payload(due), options(due))

    async def offer_many(dues: list[float]) -> None:
        for at in range(0, len(dues), 100):
            chunk = dues[at : at + 100]
            await queue.addBulk(
                [{"name": "handle", "data": payload(due), "opts": options(due)} for due in chunk]
            )

    yield Offers(offer_one, offer_many)
    await queue.close()


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()

    async def note(job: Any, _token: str) -> None:
        notes.add(job.data["due"])

    async def run() -> None:
        _worker = Worker(
            "benchmark", note, {"connection": url} | ({"concurrency": 100} if best else {})
        )
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
