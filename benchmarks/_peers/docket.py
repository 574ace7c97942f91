# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""docket: the worker polls a sorted set four times a second, and reads a stream."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from docket import Docket, Worker

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "benchmark"


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    async def note(_message: Payload) -> None:
        raise AssertionError("this process only offers")

    async with Docket(NAME, url) as docket:
        docket.register(note)

        async def offer_one(due: float) -> None:
            await docket.add(note, when=datetime.fromtimestamp(due, UTC))(payload(due))

        async def offer_many(dues: list[float]) -> None:
            await docket.add_many(
                docket.call(note, when=datetime.fromtimestamp(due, UTC))(payload(due))
                for due in dues
            )

        yield Offers(offer_one, offer_many)


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    logging.disable()

    async def note(message: Payload) -> None:
        notes.add(message["due"])

    async def run() -> None:
        # Keeping the state of finished tasks costs time and memory.
        ttl = {"execution_ttl": timedelta(0)} if best else {}
        fast = timedelta(milliseconds=10)
        # With a concurrency of 100, a worker that starts on a backlog leaves some messages behind.
        settings = (
            {"concurrency": 50, "minimum_check_interval": fast, "scheduling_resolution": fast}
            if best
            else {}
        )
        async with Docket(NAME, url, **ttl) as docket:
            docket.register(note)
            async with Worker(docket, **settings) as worker:
                await worker.run_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
