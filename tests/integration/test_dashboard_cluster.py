"""The dashboard of a cluster asks every master for its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import delayq
from tests.support.board import TOKEN, browse, form, links, log_in, texts

if TYPE_CHECKING:
    from tests.support.clusters import TestCluster


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
            assert "parts reliable, 8 partitions waiting 64 0 0 0" in shown
            for i in range(8):
                for address in (
                    f"queue?kind=reliable&name=jobs-{i}",
                    f"queue?kind=delayed&name=orders-{i}",
                ):
                    (message,) = links((await browser.get(address)).text, "message?")
                    fields = form((await browser.get(message)).text, "at") | {"do": "cancel"}
                    answer = await browser.post("act", data=fields)
                    assert "done=cancelled" in answer.headers["location"]
