"""Measure what grows with queues, clients and schedules: ``python -m benchmarks.growth [options]``.

The work of a producer or a worker per second, and per message, should not grow with the number of
queues, groups, schedules, clients or workers. Each row measures a number of one of these: at rest,
and then with one message after the other, each offered 20 ms before it is due. Every sample is a
process of its own. With the defaults, all of it takes about ten minutes. ``--most 10000`` adds a
row of each kind, but none of 10,000 clients or workers: a machine has not as many processors.

"sent" are the commands that clients sent, and "all" those inside scripts as well, from the server's
``commandstats``; "CPU" is the processor time of the process, in ms. The figures per
second are of two re-checks at rest; those per message leave out the cost of the same time at rest.
Many clients of one process hear of each other too late: ``many_clients`` measures the cost per
message for them.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from redis import Redis

import delayq
from benchmarks._moves import SENT, address, measured_server
from benchmarks._report import Table, machine
from benchmarks._samples import be_sample, medians, new_parser, result, start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    # Brings about the message of this number. Its number is put into the queue when it is handled.
    Bring = Callable[[int], Awaitable[object]]
    Handled = asyncio.Queue[Any]

FAR, SOON = 3600.0, 0.02
# Two re-checks of every client.
AT_REST_S, SETTLE_S = 10.0, 6.0
MESSAGES = 50
# A client reports what it did with this many queues a second.
REPORTS = 250
# Opened or offered at a time.
CONCURRENCY = 100
WORK = ("sent", "all", "cpu")
# The most clients in one process: more would measure nothing but the process.
MOST_CLIENTS = 1_000
# One row may take this long, seconds.
PATIENCE = 600.0


async def run_concurrently(count: int, do: Callable[[int], Awaitable[object]]) -> None:
    """Do something ``count`` times, some at a time."""
    for first in range(0, count, CONCURRENCY):
        await asyncio.gather(*map(do, range(first, min(count, first + CONCURRENCY))))


class Scene:
    """The clients and tasks that a sample keeps open until its end."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url = url
        self.handled: Handled = asyncio.Queue()
        self._opened = opened
        self._working: list[asyncio.Task[None]] = []

    async def client(self) -> delayq.Client:
        return await self._opened.enter_async_context(delayq.connect(self.url))

    def spawn(self, work: Any) -> None:
        """Run something until the sample ends."""
        self._working.append(asyncio.create_task(work))

    def consume(self, queue: delayq.ReliableQueue[Any]) -> None:
        """Handle the messages of a queue."""
        self.spawn(self._consume(queue))

    async def _consume(self, queue: delayq.ReliableQueue[Any]) -> None:
        async for message in queue:
            async with message:
                self.handled.put_nowait(message.id)

    async def end(self) -> None:
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)


async def offered_queues(scene: Scene, count: int) -> Bring:
    client = await scene.client()
    await run_concurrently(count, lambda n: client.reliable_queue(f"q{n}").offer(n, FAR))

    async def bring(number: int) -> None:
        await client.reliable_queue(f"q{number % count}").offer(number, FAR)
        scene.handled.put_nowait(number)

    return bring


async def consumed_queues(scene: Scene, count: int) -> Bring:
    client, producer = await scene.client(), await scene.client()
    for n in range(count):
        scene.consume(client.reliable_queue(f"q{n}"))
        if n % CONCURRENCY == 0:
            await asyncio.sleep(0.01)
    return lambda number: producer.reliable_queue(f"q{number % count}").offer(number, SOON)


async def stored_queues(scene: Scene, count: int) -> Bring:
    async with delayq.connect(scene.url) as producer:
        await run_concurrently(count, lambda n: producer.reliable_queue(f"q{n}").offer(n, FAR))
    queue = (await scene.client()).reliable_queue("q0")
    scene.consume(queue)
    return lambda number: queue.offer(number, SOON)


async def waiting_clients(scene: Scene, count: int) -> None:
    async def wait(_: int) -> None:
        scene.consume((await scene.client()).reliable_queue("q"))

    await run_concurrently(count, wait)


async def workers(scene: Scene, count: int) -> None:
    async def work(_: int) -> None:
        worker = delayq.Worker(await scene.client(), concurrency=10)

        @worker.listener("q")
        async def handle(number: int) -> None:
            scene.handled.put_nowait(number)

        scene.spawn(worker.run())

    await run_concurrently(count, work)


async def schedules(scene: Scene, count: int) -> Bring:
    queue = (await scene.client()).reliable_queue("q")
    await run_concurrently(count, lambda n: queue.schedule(f"s{n}", every=FAR, value=n))
    scene.consume(queue)

    async def bring(_: int) -> None:
        (at_rest,) = [entry.id for entry in await queue.list("delayed", limit=1)]
        await queue.reschedule(at_rest, SOON)

    return bring


async def groups(scene: Scene, count: int) -> Bring:
    queue = (await scene.client()).reliable_queue("q", group_limit=delayq.Limit(concurrency=5))
    await run_concurrently(count, lambda n: queue.offer(n, FAR, group=f"g{n}"))
    scene.consume(queue)
    return lambda number: queue.offer(number, SOON, group=f"g{number % count}")


KINDS: dict[str, Callable[[Scene, int], Awaitable[Bring | None]]] = {
    "queues offered to": offered_queues,
    "queues consumed": consumed_queues,
    "queues on the server": stored_queues,
    "groups": groups,
    "schedules": schedules,
    "waiting clients": waiting_clients,
    "workers": workers,
}


def so_far(server: Any) -> dict[str, float]:
    """Return the commands and the processor time until now, and the moment."""
    stats = server.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in stats.items()}
    return {
        "at": time.monotonic(),
        "sent": sum(calls.get(name, 0) for name in SENT),
        "all": sum(calls.values()) - calls.get("info", 0),
        "cpu": time.process_time() * 1000,
    }


async def grow(url: str, kind: str, count: int) -> dict[str, float]:
    with Redis.from_url(url) as server:
        async with AsyncExitStack() as opened:
            scene = Scene(url, opened)
            bring = await KINDS[kind](scene, count)

            async def message(number: int) -> None:
                assert bring is not None, "there are no messages"
                await bring(number)
                await asyncio.wait_for(scene.handled.get(), 60)

            # The first ones have scripts to load, and clients to wait for.
            messages = 0 if bring is None else MESSAGES
            for number in range(min(3, messages)):
                await message(number)
            await asyncio.sleep(SETTLE_S + count / REPORTS)
            first = so_far(server)
            await asyncio.sleep(AT_REST_S)
            second = so_far(server)
            for number in range(messages):
                await message(number)
            third = so_far(server)
            await scene.end()
    seconds, took = second["at"] - first["at"], third["at"] - second["at"]
    figures = {}
    for name in ("sent", "all", "cpu"):
        at_rest = figures[f"{name}_per_s"] = (second[name] - first[name]) / seconds
        if messages:
            figures[f"{name}_each"] = (third[name] - second[name] - at_rest * took) / messages
    return figures


def main() -> None:
    parser = new_parser(__doc__, runs=1)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS, metavar="KIND")
    parser.add_argument("--most", type=int, default=1000, help="the largest number of each kind")
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, {"grow": grow})
        return
    counts = [count for count in (10, 100, 1_000, 10_000) if count <= options.most]
    columns = ("kind                 ", "  count", "  sent/s", "    all/s", "  CPU ms/s")
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": f"at rest for {AT_REST_S:g} s, then {MESSAGES} messages one by one;"
            f" medians of {options.runs} runs",
        }
        table = Table(
            about, (*columns, "  sent each", "  all each", "  CPU ms each"), as_json=options.json
        )
        for kind in options.kinds:
            for count in counts:
                if count > MOST_CLIENTS and KINDS[kind] in (waiting_clients, workers):
                    continue
                values = []
                for _ in range(options.runs):
                    server.execute_command("FLUSHALL", "SYNC")
                    sample = start("growth", role="grow", url=url, kind=kind, count=count)
                    values.append(result(sample, within=PATIENCE))
                row = medians(values)
                names = [f"{name}_{per}" for per in ("per_s", "each") for name in WORK]
                cells = [f"{row[name]:,.1f}" if name in row else "-" for name in names]
                table.add({"kind": kind, "count": count} | row, kind, f"{count:,}", *cells)
    table.end()


if __name__ == "__main__":
    main()
