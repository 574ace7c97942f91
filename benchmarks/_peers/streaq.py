# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""streaq: the worker polls a sorted set twice a second, and reads streams."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from streaq import Worker

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def worker_for(url: str, notes: Notes | None = None, **settings: Any) -> tuple[Any, Any]:
    worker = Worker(redis_url=url, **settings)

    @worker.task(name="handle")
    async def note(message: Payload) -> None:
        assert notes is not None
        notes.add(message["due"])

    return worker, note


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    worker, task = worker_for(url)
    async with worker:

        def call_of(due: float) -> Any:
            return task.enqueue(payload(due)).start(schedule=datetime.fromtimestamp(due, UTC))

        async def offer_one(due: float) -> None:
            await call_of(due)

        async def offer_many(dues: list[float]) -> None:
            for at in range(0, len(dues), 100):
                await worker.enqueue_many([call_of(due) for due in dues[at : at + 100]])

        yield Offers(offer_one, offer_many)


def handle(url: str, best: bool, notes: Notes) -> None:
    logging.disable()
    worker, _ = worker_for(url, notes.by_thread(), **({"concurrency": 100} if best else {}))
    worker.run_sync()


if __name__ == "__main__":
    main(offers, handle)
