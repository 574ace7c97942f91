"""delayq's Worker: a function that listens to a ReliableQueue."""

from __future__ import annotations

import asyncio
from typing import Any

import delayq
from benchmarks._peers.adapter import Notes, main
from benchmarks._peers.delayq_reliable import offers


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    worker = delayq.Worker(url, concurrency=1000 if best else 100)

    @worker.listener("benchmark")
    async def note(message: dict[str, Any]) -> None:
        notes.add(message["due"])

    asyncio.run(worker.run())


if __name__ == "__main__":
    main(offers, handle)
