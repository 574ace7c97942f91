"""Processes that a test kills or stops. Each writes what it was told, line by line."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

import delayq
from delayq import Offer
from tests.support.forks import FORKS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH = 2_000
"""How many messages a producer offers at once: ten calls to the server."""
LEASE = 1.0


def start(main: Callable[..., None], *args: Any) -> Any:
    """Start a process that runs this function. It ends with its parent."""
    process = FORKS.Process(target=main, args=args, daemon=True)
    process.start()
    return process


def words(path: Path) -> list[list[str]]:
    """Return what has been written so far."""
    return [line.split() for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def offer_batches(url: str, path: Path, number: int) -> None:
    """Offer forever, writing the number of each batch that is stored."""
    asyncio.run(_offer_batches(url, path, number))


async def _offer_batches(url: str, path: Path, number: int) -> None:
    note = _notes(path)
    async with delayq.connect(url) as client:
        for batch in itertools.count(number * 1_000):
            values = range(batch * BATCH, (batch + 1) * BATCH)
            offers = [Offer(value, id=f"m{value}") for value in values]
            await client.reliable_queue("jobs").offer_many(offers)
            note(batch)


def handle_slowly(url: str, path: Path) -> None:
    """Handle messages, each for a fifth of its lease, writing the outcome of each."""
    asyncio.run(_handle_slowly(url, path))


async def _handle_slowly(url: str, path: Path) -> None:
    note = _notes(path)
    async with delayq.connect(url) as client:
        jobs: delayq.ReliableQueue[int] = client.reliable_queue("jobs", lease=LEASE)
        async for message in jobs:
            note("began", message.value)
            try:
                await asyncio.sleep(LEASE / 5)
                await message.ack()
                note("done", message.value)
            except delayq.LeaseLost:
                note("lost", message.value)


def _notes(path: Path) -> Callable[..., None]:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return lambda *words: (os.write(file, (" ".join(map(str, words)) + "\n").encode()), None)[1]
