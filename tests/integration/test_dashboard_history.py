"""The dashboard's pages about what happened in a queue, and who works on it."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.workers import Work, facts_of
from tests.support.board import _templates_are_compiled_once, browse, links, page, texts
from tests.support.reliable import lists_work
from tests.support.waiting import until

if TYPE_CHECKING:
    from httpx import AsyncClient as Browser

    from delayq import Client
    from tests.support.servers import PrivateServer

__all__ = ["_templates_are_compiled_once"]
pytestmark = pytest.mark.usefixtures("_last_reports_arrive")

HISTORY = "history?kind=reliable&name=jobs"
HOSTILE = "<script>alert(1)</script>"
KEYS = ReliableKeys.of("jobs")


async def test_the_history_is_drawn(server: PrivateServer, reader: Browser) -> None:
    async with delayq.connect(server.url) as other:
        queue = other.reliable_queue("jobs")
        await queue.offer_many([Offer(i) for i in range(1200)])
        for message in await queue.claim(3):
            async with message:
                pass
    for span in ("hour", "day", "week", "month"):
        shown = await page(reader, f"{HISTORY}&span={span}")
        assert "Offered 1,200 at most 1,200" in texts(shown)
        assert "Handled 3 at most 3" in texts(shown)
        assert re.search(r"Handlers took, median \S+ ms", texts(shown))
        assert shown.count("<svg") == 9
        assert "UTC: 1,200</title>" in shown
        assert not re.search(r"style=|\son\w+=|<script>", shown)


@pytest.mark.usefixtures("_workers_stay_listed")
async def test_workers_are_listed_with_their_messages(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    async with delayq.connect(server.url, resync_interval=0.05) as theirs:
        queue = theirs.reliable_queue("jobs", partitions=2)
        await queue.offer("a payload", id=HOSTILE)
        for other in ("idle", "bad"):
            await theirs.reliable_queue(other).offer(1, 3600)
        server.call("SET", ReliableKeys.of("bad").workers, "x")
        refused = "bad : one of the queue's keys holds a value of the wrong type"
        (message,) = await queue.claim()
        async with message:
            await until(partial(lists_work, client, "jobs"))
            for address in ("workers", "workers?kind=reliable&name=jobs"):
                shown = await page(reader, address)
                assert "Workers 1" in texts(shown)
                assert "a payload" not in shown
                assert "<script>alert" not in shown
                (link,) = links(shown, "message")
                assert "a payload" in await page(reader, link)
            # One that cannot be read hides no other.
            for address in ("workers", "workers?kind=reliable&name=bad"):
                assert refused in texts(await page(reader, address))
            other = texts(await page(reader, "workers?kind=reliable&name=idle"))
            assert "No process works on this queue" in other
        # A queue that only has workers is shown.
        assert "jobs reliable, 2 partitions empty 0 0 0 0" in texts(await page(reader, "/"))
        # Where the queue is not shown, neither are its workers.
        async with browse(delayq.dashboard(client, queues=["reliable:other"])) as browser:
            assert "jobs" not in await page(browser, "workers")
    server.call("DEL", ReliableKeys.of("bad").workers)
    assert "No process works on a reliable queue" in await page(reader, "workers")


async def test_of_many_workers_the_first_are_shown(
    client: Client, reader: Browser, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.workers._MOST_SHOWN", 3)
    await client.reliable_queue("jobs").offer(1, 3600)
    now = (await client.server_time()).timestamp()
    for n in range(5):
        facts = facts_of(Work(1, 0, []), 100.0, 50.0, 60_000_000)
        facts = facts.replace(f'"pid":{os.getpid()}', f'"pid":{7000 + n}')
        await raw.zadd(KEYS.workers, {f"client-{n}": int((now + 60) * 1e6)})
        await raw.hset(KEYS.worker_facts, f"client-{n}", facts)
    shown = texts(await page(reader, "workers"))
    assert "Workers 5" in shown
    assert re.findall(r", (70\d\d) delayq", shown) == ["7000", "7001", "7002"]
    assert "There are 2 more" in shown


async def test_the_settings_page_shows_what_processes_declare_otherwise(
    client: Client, reader: Browser, raw: Any
) -> None:
    await client.reliable_queue("jobs", max_size=1000).offer(1, 3600)
    now = (await client.server_time()).timestamp()
    for n, size in enumerate(("500", "1000")):
        facts = facts_of(Work(1, 0, [], {"max_size": size}), 100.0, 50.0, 60_000_000)
        await raw.zadd(KEYS.workers, {f"client-{n}": int((now + 60) * 1e6)})
        await raw.hset(KEYS.worker_facts, f"client-{n}", facts)
    shown = texts(await page(reader, "settings?kind=reliable&name=jobs"))
    assert "max_size is 1000 on the server, and 500 in the code of" in shown
    assert "delayq configure jobs --max-size 500" in shown
    await client.reliable_queue("jobs").configure(max_size=500)
    shown = texts(await page(reader, "settings?kind=reliable&name=jobs"))
    assert "max_size is 500 on the server, and 1000 in the code of" in shown
