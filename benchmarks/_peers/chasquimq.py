# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""ChasquiMQ: a Rust engine that moves due jobs from a sorted set to a stream, and calls handlers in
Python.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from chasquimq import Queue, Worker

from benchmarks._peers.adapter import Notes, Offers, gathered, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    async with Queue("benchmark", redis_url=url) as queue:

        async def offer_one(due: float) -> None:
            await queue.add("handle", payload(due), delay_ms=datetime.fromtimestamp(due, UTC))

        # Its bulk call adds delayed jobs one after the other.
        yield Offers(offer_one, lambda dues: gathered(offer_one, dues))


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()

    async def note(job: Any) -> None:
        notes.add(job.data["due"])

    async def run() -> None:
        settings = {"events_enabled": False, "run_scheduler": False} if best else {}
        await Worker("benchmark", note, redis_url=url, **settings).run()

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
