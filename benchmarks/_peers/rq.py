# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""RQ: a scheduler process polls a sorted set of whole seconds once a second; each job runs in its
own process.
"""

from __future__ import annotations

import logging
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from redis import Redis
from rq import Queue, SimpleWorker, Worker

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def note(message: Payload) -> None:
    # RQ imports this module by name, even in processes that end with the job.
    Notes(sys.argv[4]).at_once().add(message["due"])


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    server = Redis.from_url(url)
    queue = Queue(connection=server)
    function = "benchmarks._peers.rq.note"

    def offer_one(due: float) -> None:
        queue.enqueue_at(datetime.fromtimestamp(due, UTC), function, payload(due))

    def offer_many(dues: list[float]) -> None:
        for at in range(0, len(dues), 100):
            with server.pipeline() as calls:
                for due in dues[at : at + 100]:
                    queue.enqueue_at(
                        datetime.fromtimestamp(due, UTC), function, payload(due), pipeline=calls
                    )
                calls.execute()

    yield Offers(offer_one, offer_many)


def handle(url: str, best: bool, _notes: Notes) -> None:
    logging.disable()
    server = Redis.from_url(url)
    (SimpleWorker if best else Worker)([Queue(connection=server)], connection=server).work(
        with_scheduler=True
    )


if __name__ == "__main__":
    main(offers, handle)
