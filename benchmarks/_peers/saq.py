# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""SAQ: a task of the worker moves due jobs once a second; a lock on the server rules out shorter
intervals.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from saq import Queue, Worker

from benchmarks._peers.adapter import Notes, Offers, Payload, gathered, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    queue = Queue.from_url(url)
    await queue.connect()

    async def offer_one(due: float) -> None:
        await queue.enqueue("handle", message=payload(due), scheduled=due)

    yield Offers(offer_one, lambda dues: gathered(offer_one, dues))


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    logging.disable()

    async def note(_context: Any, *, message: Payload) -> None:
        notes.add(message["due"])

    async def run() -> None:
        queue = Queue.from_url(url, **({"max_concurrent_ops": 100} if best else {}))
        await Worker(queue, [("handle", note)], **({"concurrency": 100} if best else {})).start()

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
