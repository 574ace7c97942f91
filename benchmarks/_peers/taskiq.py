# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""taskiq: a separate scheduler reads one list per minute, once a minute; the worker reads a
stream.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from taskiq import TaskiqScheduler
from taskiq.api import run_receiver_task, run_scheduler_task
from taskiq_redis import ListRedisScheduleSource, RedisStreamBroker

from benchmarks._peers.adapter import Notes, Offers, Payload, gathered, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def broker_for(url: str, notes: Notes | None = None) -> Any:
    # From the beginning of the stream: the worker and the scheduler start at the same time.
    broker = RedisStreamBroker(url, consumer_id="0")

    @broker.task(task_name="handle")
    async def note(message: Payload) -> None:
        assert notes is not None
        notes.add(message["due"])

    return broker


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    source = ListRedisScheduleSource(url)
    await source.startup()
    task = broker_for(url).find_task("handle")

    async def offer_one(due: float) -> None:
        await task.schedule_by_time(source, datetime.fromtimestamp(due, UTC), payload(due))

    yield Offers(offer_one, lambda dues: gathered(offer_one, dues))


async def schedule(url: str, best: bool) -> None:
    broker = broker_for(url)
    await broker.startup()
    scheduler = TaskiqScheduler(broker, [ListRedisScheduleSource(url)])
    await run_scheduler_task(scheduler, interval=timedelta(seconds=1) if best else None)


async def receive(url: str, notes: Notes) -> None:
    broker = broker_for(url, notes)
    await broker.startup()
    await run_receiver_task(broker)


def handle(url: str, best: bool, notes: Notes) -> None:
    logging.disable()
    # Two programs: a worker, and the scheduler.
    subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks._peers.taskiq",
            "schedule",
            url,
            "best" if best else "default",
        ]
    )
    asyncio.run(receive(url, notes.by_thread()))


if __name__ == "__main__":
    if sys.argv[1] == "schedule":
        logging.disable()
        asyncio.run(schedule(sys.argv[2], sys.argv[3] == "best"))
    else:
        main(offers, handle)
