# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""Celery: each worker has a rate limit of its own, and a pool whose size is its concurrency."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery

from benchmarks._peers.limits.adapter import Batch, Notes, Task, main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MOST_CHILDREN = 5


def app_for(url: str, task: Task, notes: Notes | None = None) -> tuple[Any, Any]:
    app = Celery("benchmark", broker=url)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)

    @app.task(name="handle", rate_limit=f"{task.rate}/s" if task.rate else None)
    def note(number: int) -> None:
        assert notes is not None
        started = time.time()
        if task.handler:
            time.sleep(task.handler)
        notes.add(started, number)

    return app, note


@asynccontextmanager
async def offers(url: str, task: Task) -> AsyncIterator[Callable[[Batch], Any]]:
    app, note = app_for(url, task)

    def offer(batch: Batch) -> None:
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            for number in batch.numbers():
                note.apply_async((number,), producer=producer)

    yield offer


def handle(url: str, task: Task, notes: Notes) -> None:
    # The default pool, of child processes: with threads, a rate limit passes a few tasks a second.
    app, _ = app_for(url, task, notes.at_once())
    pool = f"--concurrency={min(MOST_CHILDREN, task.concurrency or MOST_CHILDREN)}"
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", pool, *quiet])


if __name__ == "__main__":
    main(offers, handle)
