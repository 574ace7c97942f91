# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""taskito: a Rust engine that polls its store, here Redis, and calls handlers in Python."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from taskito import Queue

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    queue = Queue(backend="redis", db_url=url)

    async def offer_many(dues: list[float]) -> None:
        now = time.time()
        await queue.aenqueue_many(
            task_name="handle",
            args_list=[(payload(due),) for due in dues],
            delay_list=[max(0.0, due - now) for due in dues],
        )

    async def offer_one(due: float) -> None:
        # Its only call to offer that can be awaited takes lists.
        await offer_many([due])

    yield Offers(offer_one, offer_many)
    queue.close()


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    logging.disable()
    settings: dict[str, Any] = (
        {"scheduler_poll_interval_ms": 5, "scheduler_batch_size": 500} if best else {}
    )
    queue = Queue(backend="redis", db_url=url, **settings)

    @queue.task(name="handle")
    async def note(message: Payload) -> None:
        notes.add(message["due"])

    queue.run_worker()


if __name__ == "__main__":
    main(offers, handle)
