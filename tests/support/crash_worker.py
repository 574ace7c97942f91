"""The worker of the crash test: it handles messages, logs its actions and expects to be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from typing import TYPE_CHECKING

import delayq
from tests.support.crash_log import ACKED, HANDLED, LOST, STARTED, UNSETTLED, Log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LEASE = 2.0
CONCURRENCY = 64


def main(url: str, log: Path, name: str, way: str) -> None:
    """Handle messages in a "loop" or a "worker" until killed.

    The value of a message is its handling time in milliseconds.
    """
    asyncio.run(_work(url, Log(log, name), _by_worker if way == "worker" else _by_loop))


async def _work(url: str, log: Log, way: Callable[[delayq.Client, Log], Awaitable[None]]) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        # With the parent gone, no process would kill this one.
        asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)
    async with delayq.connect(url, resync_interval=0.5) as client:
        await way(client, log)


async def _by_worker(client: delayq.Client, log: Log) -> None:
    """Handle messages with a worker, which acknowledges after the handler has ended and does not
    report it.
    """
    worker = delayq.Worker(client, concurrency=CONCURRENCY)

    @worker.listener("jobs", lease=LEASE, max_attempts=None)
    async def handle(milliseconds: int, message: delayq.Message[int]) -> None:
        log.write(STARTED, message.id, message.attempt)
        try:
            await asyncio.sleep(milliseconds / 1000)
        except asyncio.CancelledError:
            log.write(LOST, message.id, message.attempt)
            raise
        log.write(HANDLED, message.id, message.attempt)

    await worker.run()


async def _by_loop(client: delayq.Client, log: Log) -> None:
    async def handle(queue: delayq.ReliableQueue[int]) -> None:
        async for message in queue:
            try:
                async with message:
                    log.write(STARTED, message.id, message.attempt)
                    await asyncio.sleep(message.value / 1000)
                    log.write(HANDLED, message.id, message.attempt)
                    if int(message.id[-1]) % 2:
                        # Otherwise leaving the block acknowledges it, perhaps without waiting for
                        # the reply.
                        await message.ack()
                        log.write(ACKED, message.id, message.attempt)
            except delayq.LeaseLost:
                log.write(LOST, message.id, message.attempt)
            except delayq.ServerError:
                # The message comes again when its lease ends, unless the ack was carried out.
                log.write(UNSETTLED, message.id, message.attempt)

    queue = client.reliable_queue("jobs", lease=LEASE, max_attempts=None)
    await asyncio.gather(*(handle(queue) for _ in range(CONCURRENCY)))
