"""The dashboard of a cluster asks every master for its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import delayq
from tests.clusters import TestCluster
from tests.conftest import FOUND
from tests.integration.board import TOKEN, browse, field, links, log_in, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

# Redis 6.2 has no ADDSLOTSRANGE; its clusters answer the same way.
KINDS = [name for name in FOUND if name != "redis-6.2"]


@pytest.fixture(params=KINDS[:1])
def cluster(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    with TestCluster(FOUND[request.param]) as cluster:
        yield cluster


async def test_queues_of_all_masters_are_found_and_acted_on(cluster: TestCluster) -> None:
    async with delayq.connect(cluster.url) as client:
        for i in range(8):
            await client.reliable_queue(f"jobs-{i}").offer(i, 60, id="one")
            await client.delayed_queue(f"orders-{i}").offer(i, 60)
        parts = client.reliable_queue("parts", partitions=8)
        await parts.offer_many([delayq.Offer(i, delay=60) for i in range(64)])
        async with browse(delayq.dashboard(client, token=TOKEN)) as browser:
            await log_in(browser)
            shown = texts((await browser.get("/")).text)
            assert "Queues 17" in shown
            assert "parts reliable, 8 partitions 64 0 0 0" in shown
            for i in range(8):
                for address in (f"queue?kind=reliable&name=jobs-{i}", f"queue?kind=delayed&name=orders-{i}"):
                    (message,) = links((await browser.get(address)).text, "message?")
                    page = (await browser.get(message)).text
                    fields = {name: field(page, name) for name in ("word", "kind", "name", "at")}
                    assert "done=cancelled" in (await browser.post("act", data=fields | {"do": "cancel"})).headers["location"]
