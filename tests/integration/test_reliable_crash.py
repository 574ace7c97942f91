"""Workers and the server are killed again and again: nothing is lost, and nothing is handled twice
without a cause.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from delayq import Offer
from tests.support import crash_worker
from tests.support.crash_log import DOWN, KILLED, UP, Log, Offers, check, read
from tests.support.crash_worker import LEASE
from tests.support.depth import thorough
from tests.support.forks import FORKS
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

WORKERS = 4
KILL_EVERY = 0.3
# Messages come in bursts, so that workers are killed while they hold as many as they can.
BURST = 400
BURST_EVERY = 0.4
# The server is killed once this many messages are at work.
BUSY = 40


class Killer:
    """Keeps four workers running, and kills one after another."""

    def __init__(self, url: str, folder: Path, log: Log, way: str) -> None:
        self._url = url
        self._way = way
        self._folder = folder
        self._log = log
        self._names = (f"worker-{number}" for number in itertools.count(1))
        self._workers: list[tuple[str, Any]] = []
        self.kills: int = 0

    def start(self) -> None:
        name = next(self._names)
        process = FORKS.Process(
            target=crash_worker.main,
            args=(self._url, self._folder / name, name, self._way),
            daemon=True,
        )
        process.start()
        self._workers.append((name, process))

    def kill(self) -> None:
        """Kill the worker that has lived longest."""
        name, process = self._workers.pop(0)
        # Write this first, because its messages may reach other workers at once.
        self._log.write(KILLED, who=name)
        process.kill()
        process.join()
        self.kills += 1

    def close(self) -> None:
        while self._workers:
            self.kill()


async def offer_all(queue: delayq.ReliableQueue[int], offers: Offers, count: int) -> None:
    chance = random.Random(11)

    async def offer(some: list[Offer[int]]) -> None:
        ids = {str(one.id) for one in some}
        try:
            offers.stored |= set(await queue.offer_many(some))
        except delayq.OutcomeUnknown as error:
            offers.stored |= set(error.stored)
            offers.unknown |= ids - set(error.stored)
        except delayq.ServerUnavailable:
            offers.refused |= ids

    for start in range(0, count, BURST):
        burst = [
            Offer(value=chance.randint(0, 50), id=f"m{place:05}", delay=chance.random() * 0.1)
            for place in range(start, min(start + BURST, count))
        ]
        # Many callers at once, some with one message and some with several.
        cuts = sorted(chance.sample(range(1, len(burst)), 20))
        parts = [burst[at:to] for at, to in zip([0, *cuts], [*cuts, len(burst)], strict=True)]
        await asyncio.gather(*(offer(part) for part in parts), asyncio.sleep(BURST_EVERY))


@pytest.mark.parametrize(
    ("way", "count", "restarts"),
    [
        ("worker", 3_000, 1),
        thorough("loop", 20_000, 3),
        thorough("worker", 20_000, 3),
    ],
)
async def test_crashes_lose_nothing_and_double_nothing_without_a_cause(
    own_server: PrivateServer, tmp_path: Path, way: str, count: int, restarts: int
) -> None:
    server, offers, log = own_server, Offers(), Log(tmp_path / "driver")
    killer = Killer(server.unix_url, tmp_path, log, way)
    done = asyncio.Event()

    async def kill_workers() -> None:
        while not done.is_set():
            await asyncio.sleep(KILL_EVERY)
            killer.start()
            await asyncio.to_thread(killer.kill)

    async def kill_the_server(
        queue: delayq.ReliableQueue[int], offering: asyncio.Task[None]
    ) -> None:
        async def busy() -> bool:
            return offering.done() or (await queue.stats()).leased >= BUSY

        for restart in range(1, restarts + 1):
            # Spread the restarts over the time of the offers.
            share = count * restart // (restarts + 1)
            await until(lambda share=share: len(offers.stored) >= share or offering.done(), 100)  # type: ignore[misc]
            await until(busy)
            log.write(DOWN)
            server.kill()
            if restart == restarts:
                # The last time, the server stays down until an offer has been given up; leases end
                # in the meantime.
                await until(lambda: offers.unknown or offers.refused, 60)
            else:
                await asyncio.sleep(0.2)
            await asyncio.to_thread(server.start)
            log.write(UP)

    try:
        for _ in range(WORKERS):
            killer.start()
        async with (
            delayq.connect(server.unix_url) as client,
            Redis.from_url(server.unix_url, retry_on_error=[ConnectionError]) as raw,
        ):
            queue: delayq.ReliableQueue[int] = client.reliable_queue("jobs")
            offering = asyncio.create_task(offer_all(queue, offers, count))
            killing = [
                asyncio.create_task(kill_workers()),
                asyncio.create_task(kill_the_server(queue, offering)),
            ]
            await offering
            await killing[1]

            async def empty() -> bool:
                stats = await queue.stats()
                return not (stats.delayed or stats.ready or stats.leased)

            await until(empty, 100)
            done.set()
            await killing[0]
            await queue.aclose()
            # The settings remain, and records of repeated calls for a while.
            left = [key for key in await raw.keys("*") if b":settings" not in key]
            assert [key for key in left if b":call:" not in key or await raw.ttl(key) < 0] == []
    finally:
        done.set()
        await asyncio.to_thread(killer.close)
        log.close()
    verdict = check(read(tmp_path.iterdir()), offers, LEASE)
    told = {
        "stored": len(offers.stored),
        "unknown": len(offers.unknown),
        "refused": len(offers.refused),
    }
    print(
        server.kind.name,
        told,
        "handled",
        verdict.handled,
        "again",
        dict(verdict.again),
        "killed",
        killer.kills,
    )
    assert verdict.problems == []
    assert sum(told.values()) == count
    # Without redeliveries after a death, the test would prove nothing.
    assert verdict.again["died"] > 0
