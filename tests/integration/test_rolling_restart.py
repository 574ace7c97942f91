"""A rolling restart of ``delayq worker`` under load, as Kubernetes makes it."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from redis.asyncio import Redis

import delayq
from tests.integration.test_demo import linux_only
from tests.integration.test_worker_command import PATIENCE, WORKER, app, command
from tests.support.reliable import depths
from tests.support.servers import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.test_worker_command import Command
    from tests.support.servers import PrivateServer

__all__ = ["app"]
pytestmark = [pytest.mark.gate, linux_only]

# Some handlers outlast every stop, and are cancelled.
APP = """
import asyncio, os
import delayq
from redis.asyncio import Redis

worker = delayq.Worker(os.environ["SERVER"], concurrency=10, shutdown_timeout=1)
log = Redis.from_url(os.environ["SERVER"])

@worker.listener("jobs")
async def handle(value: str, message: delayq.Message) -> None:
    await log.rpush("log", f"{value} begin {message.attempt}")
    await asyncio.sleep(0.1)
    while value.startswith("wait") and not await log.exists("go"):
        await asyncio.sleep(0.1)
    await log.rpush("log", f"{value} end {message.attempt}")
"""


class Pod:
    """A worker with its probes."""

    def __init__(self, it: Command, port: int) -> None:
        self._it = it
        self._browser = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)

    async def status(self, path: str) -> int:
        """Return the status of an answer; 0 if there is none."""
        try:
            return (await self._browser.get(path)).status_code
        except httpx.TransportError:
            return 0

    async def figures_are(self, **expected: int) -> bool:
        """Return whether the scaler sees these figures."""
        figures = (await self._browser.get("/scale/jobs?within=60")).json()
        return bool(expected.items() <= figures.items())

    async def stop(self) -> None:
        """Stop it as Kubernetes does. Until it has ended, its liveness probe must not fail."""
        ending = asyncio.create_task(self._it.end(signal.SIGTERM))
        seen = set[int]()
        while not ending.done():
            seen.add(await self.status("/livez"))
            await asyncio.sleep(0.05)
        assert seen <= {200, 0}
        status, errors = await ending
        assert status == 0, errors
        await self._browser.aclose()


async def test_a_rolling_restart_under_load_loses_nothing_and_spends_no_attempt(
    own_server: PrivateServer, app: Path
) -> None:
    (app / "shop" / "jobs.py").write_text(APP)
    long = [f"wait-{n}" for n in range(4)]
    offered = long[:]

    async def produce(jobs: delayq.ReliableQueue[str]) -> None:
        while True:
            values = [f"short-{len(offered)}-{n}" for n in range(10)]
            await jobs.offer_many([delayq.Offer(value, delay=0.2) for value in values])
            offered.extend(values)
            await asyncio.sleep(0.3)

    async with AsyncExitStack() as stack, delayq.connect(own_server.url) as client:

        @asynccontextmanager
        async def new_pod() -> AsyncIterator[Pod]:
            port = free_port()
            async with command(own_server, app, WORKER, "--health", f"127.0.0.1:{port}") as it:
                pod = Pod(it, port)
                await until(lambda: pod.status("/readyz"), PATIENCE, equals=200)
                yield pod

        jobs: Any = client.reliable_queue("jobs")
        old = [await stack.enter_async_context(new_pod()) for _ in range(2)]
        await jobs.offer_many(map(delayq.Offer, long))
        await until(lambda: old[0].figures_are(due=0, running=4), PATIENCE)
        producing = asyncio.create_task(produce(jobs))
        new: list[Pod] = []
        for pod in old:
            # The old one stops when the new one is ready.
            new.append(await stack.enter_async_context(new_pod()))
            await pod.stop()
        producing.cancel()
        await asyncio.wait((producing,))
        # The new ones have what the old ones gave back.
        await until(lambda: new[0].figures_are(waiting=0, running=4), PATIENCE)
        own_server.call("SET", "go", "1")
        await until(lambda: depths(jobs), PATIENCE, equals=(0, 0, 0, 0))
        await until(lambda: new[1].figures_are(waiting=0, running=0), PATIENCE)
        log = await _log(own_server)
        assert sorted(line for line in log if "end" in line) == sorted(
            f"{value} end 1" for value in offered
        )
        begun = Counter(line for line in log if "begin" in line)
        # The long ones have begun again, and all in their first attempt.
        assert {*begun} == {f"{value} begin 1" for value in offered}
        assert all(begun[f"{value} begin 1"] > 1 for value in long)
        for pod in new:
            await pod.stop()


async def _log(server: PrivateServer) -> list[str]:
    async with Redis.from_url(server.url, decode_responses=True, socket_timeout=60) as raw:
        return [str(line) for line in await raw.lrange("log", 0, -1)]
