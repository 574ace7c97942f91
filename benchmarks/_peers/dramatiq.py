# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""Dramatiq: a list of delayed messages, which the worker takes into its memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def broker_for(url: str, notes: Notes | None = None) -> tuple[Any, Any]:
    broker = RedisBroker(url=url)
    dramatiq.set_broker(broker)

    @dramatiq.actor(actor_name="handle")
    def note(message: Payload) -> None:
        assert notes is not None
        notes.add(message["due"])

    return broker, note


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    _, actor = broker_for(url)

    def offer_one(due: float) -> None:
        actor.send_with_options(
            args=(payload(due),), delay=max(1, math.ceil((due - time.time()) * 1000))
        )

    yield Offers(offer_one)


def handle(url: str, best: bool, notes: Notes) -> None:
    logging.disable()
    broker, _ = broker_for(url, notes.by_thread())
    dramatiq.Worker(broker, **({"worker_timeout": 10, "worker_threads": 4} if best else {})).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(offers, handle)
