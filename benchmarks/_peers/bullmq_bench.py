"""The scenarios of bullmq-bench in Python.

Each library has a program that is run with the address of a server and a scenario, as JSON. It
prints the duration without the warm-up, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

Value = dict[str, Any]


@dataclass(frozen=True)
class Queue:
    """The queue of a library.

    Attributes:
        add_one: Adds a job with this data.
        add_many: Adds so many jobs with this data in one call.
        work: Runs a worker with this concurrency, whose handler makes the call and returns what it
            returns. The worker keeps these results, as BullMQ does.
    """

    add_one: Callable[[Value], Awaitable[object]]
    add_many: Callable[[Value, int], Awaitable[object]]
    work: Callable[[int, Callable[[], Value]], Awaitable[object]]


def sample(width: int, depth: int) -> Value:
    """Return that many objects, each with others nested in it, as bullmq-bench has them."""
    objects: Value = {}
    for _ in range(width):
        value: Value = {}
        for _ in range(depth - 1):
            value = {str(uuid.uuid4()): value}
        objects[str(uuid.uuid4())] = value
    return objects


async def add(queue: Queue, value: Value, count: int, bulk: int) -> None:
    if bulk:
        for at in range(0, count, bulk):
            await queue.add_many(value, min(bulk, count - at))
    else:
        for _ in range(count):
            await queue.add_one(value)


async def work(queue: Queue, value: Value, scenario: dict[str, Any]) -> float:
    """Start a worker on jobs that have been added. Return how long it took without the warm-up."""
    done = asyncio.get_running_loop().create_future()
    count, warm = 0, 0.0

    def handled() -> Value:
        nonlocal count, warm
        count += 1
        if count == scenario["warm_up"]:
            warm = time.perf_counter()
        elif count == scenario["warm_up"] + scenario["jobs"]:
            done.set_result(time.perf_counter() - warm)
        return value

    worker = asyncio.ensure_future(queue.work(scenario["concurrency"], handled))
    await asyncio.wait([worker, done], return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        worker.result()
        raise RuntimeError("the worker has ended before the last job")
    seconds: float = done.result()
    return seconds


async def _run(
    opened: Callable[[str], AbstractAsyncContextManager[Queue]], url: str, scenario: dict[str, Any]
) -> None:
    value = sample(scenario["width"], scenario["depth"])
    async with opened(url) as queue:
        if scenario["concurrency"]:
            await add(queue, value, scenario["warm_up"] + scenario["jobs"], 100)
            seconds = await work(queue, value, scenario)
        else:
            await add(queue, value, scenario["warm_up"], scenario["bulk"])
            started = time.perf_counter()
            await add(queue, value, scenario["jobs"], scenario["bulk"])
            seconds = time.perf_counter() - started
        print(seconds, flush=True)
        # The worker is still running.
        os._exit(0)


def main(opened: Callable[[str], AbstractAsyncContextManager[Queue]]) -> None:
    asyncio.run(_run(opened, sys.argv[1], json.loads(sys.argv[2])))
