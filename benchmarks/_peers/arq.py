# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""arq: polls a sorted set, 100 jobs at a time."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from benchmarks._peers.adapter import Notes, Offers, Payload, gathered, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    pool = await create_pool(RedisSettings.from_dsn(url))

    async def offer_one(due: float) -> None:
        await pool.enqueue_job(
            "handle", payload(due), _defer_until=datetime.fromtimestamp(due, UTC)
        )

    yield Offers(offer_one, lambda dues: gathered(offer_one, dues))


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    logging.disable()

    async def note(_context: Any, message: Payload) -> None:
        notes.add(message["due"])

    settings: dict[str, Any] = (
        {"poll_delay": 0.01, "max_jobs": 1000, "keep_result": 0} if best else {}
    )
    Worker(
        [func(note, name="handle")],
        redis_settings=RedisSettings.from_dsn(url),
        handle_signals=False,
        **settings,
    ).run()


if __name__ == "__main__":
    main(offers, handle)
