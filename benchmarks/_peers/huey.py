# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""Huey: a thread polls a sorted set once a second, the shortest interval that it allows."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from huey import RedisHuey

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def huey_for(url: str, notes: Notes | None = None) -> tuple[Any, Any]:
    huey = RedisHuey("benchmark", url=url)

    @huey.task(name="handle")
    def note(message: Payload) -> None:
        assert notes is not None
        notes.add(message["due"])

    return huey, note


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    _, task = huey_for(url)

    def offer_one(due: float) -> None:
        # Not eta, because Huey drops its fractions of a second.
        task.schedule(args=(payload(due),), delay=due - time.time())

    yield Offers(offer_one)


def handle(url: str, best: bool, notes: Notes) -> None:
    logging.disable()
    huey, _ = huey_for(url, notes.by_thread())
    huey.create_consumer(
        **({"workers": 2, "initial_delay": 0.01, "max_delay": 0.01} if best else {})
    ).run()


if __name__ == "__main__":
    main(offers, handle)
