"""Both kinds on one queue of a cluster, whose slot moves from master to master meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import delayq
from tests.interop.live import DEADLINE, Log, random_messages
from tests.interop.pairs import TEXT
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.interop.redisson import Redisson
    from tests.support.clusters import TestCluster

pytestmark = pytest.mark.java

MESSAGES = 2_000
MOST_MS = 4000
MOVES = 3


async def test_both_kinds_share_a_queue_of_a_cluster_while_its_slot_moves(
    cluster: TestCluster, redisson_of_cluster: Redisson, name: str
) -> None:
    log, half = Log(), MESSAGES // 2
    from_java, from_python = (
        random_messages(TEXT, half, most=MOST_MS),
        random_messages(TEXT, half, half, most=MOST_MS),
    )
    java = await redisson_of_cluster.open(name, TEXT.java)
    takes = [asyncio.create_task(java.consume()) for _ in range(2)]
    first = cluster.owner(name)
    async with delayq.connect(cluster.url) as client:
        queue = client.delayed_queue(name, codec=TEXT.codec)
        async with log.consuming(queue):
            offering = asyncio.gather(
                log.offer_by_java(java, from_java),
                log.offer_by_python(queue, from_python, at_once=100),
            )
            for n in range(MOVES):
                await asyncio.sleep(MOST_MS / 1000 / (MOVES + 1))
                await asyncio.to_thread(
                    cluster.move, name, cluster.nodes[(cluster.nodes.index(first) + n + 1) % 3]
                )
            await offering

            async def empty() -> bool:
                return await queue.pending.size() + await queue.ready.size() == 0

            await until(empty, DEADLINE)
            await java.stop()
            log.came_to_java(*await asyncio.gather(*takes))
            await until(lambda: not log.missing(), DEADLINE)
    by_java = sum(len(take.result()) for take in takes)
    await java.detach()
    log.check()
    assert 0 < by_java < MESSAGES
