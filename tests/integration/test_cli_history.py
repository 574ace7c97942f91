"""The commands ``history`` and ``workers``."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq import Backoff, Offer
from tests.support.command_line import Cli, cli
from tests.support.reliable import lists_work
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.usefixtures("_last_reports_arrive")
__all__ = ["cli"]

COUNTS = ("offered", "handled", "failed", "dead", "expired")


async def work(url: str) -> None:
    """Offer five messages, handle four, and let one fail once."""
    async with delayq.connect(url) as client:
        queue = client.reliable_queue("jobs", backoff=Backoff.fixed(60), keep=60)
        await queue.offer_many([Offer(i, id=f"job-{i}") for i in range(5)])
        first, *others = await queue.claim(5)
        for message in others:
            async with message:
                pass
        await first.nack(error="no such customer")


def test_history_has_lines_bars_and_attempts(cli: Cli) -> None:
    assert cli.plain("configure jobs --max-size 99 --create")[0] == 0
    assert cli.plain("history jobs --hours 5") == (1, "nothing happened in the last 5 h 0 min\n")
    asyncio.run(work(cli.url))
    status, lines = cli("history jobs --minutes 10")
    assert (status, len(lines)) == (0, 10)
    assert [sum(line[name] for line in lines) for name in COUNTS] == [5, 4, 1, 0, 0]
    assert {line["seconds"] for line in lines} == {60}
    (busy, *_) = [line for line in lines if line["handled"]]
    assert 0 < busy["handling_p50"] <= busy["handling_p99"]
    assert 0 < busy["lateness_p50"] <= busy["lateness_p99"]
    status, shown = cli.plain("history jobs --hours 48")
    assert status == 0
    rows = shown.splitlines()
    assert [row.split(":")[0] for row in rows[:3]] == ["offered", "handled", "failed"]
    assert "█" in rows[0]
    assert rows[3].split()[:6] == ["from", *COUNTS]
    assert len(rows) == 4 + 12
    # Of single messages.
    status, (facts,) = cli("history jobs --id job-0")
    assert (status, facts["id"], facts["state"]) == (0, "job-0", "delayed")
    assert [attempt["error"] for attempt in facts["attempts"]] == ["no such customer"]
    status, shown = cli.plain("history jobs --id job-1")
    assert (status, "done" in shown) == (0, True)
    assert cli.plain("history jobs --id none") == (1, "nothing is known about message 'none'\n")


@contextmanager
def handling(url: str, id: str) -> Iterator[None]:  # noqa: A002
    """Have a client in another thread handle a message during the block."""
    listed, over = threading.Event(), threading.Event()

    async def handle() -> None:
        async with delayq.connect(url, resync_interval=0.05) as client:
            queue = client.reliable_queue("jobs")
            await queue.offer("a payload", id=id)
            (message,) = await queue.claim()
            async with message:
                await until(partial(lists_work, client, "jobs"))
                listed.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(handle(),))
    thread.start()
    try:
        assert listed.wait(60)
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures("_workers_stay_listed")
def test_workers_are_listed(cli: Cli) -> None:
    with handling(cli.url, "long"):
        for line in ("workers", "workers jobs"):
            status, (worker,) = cli(line)
            assert (status, worker["queue"], worker["pid"]) == (0, "jobs", os.getpid())
            assert [each["id"] for each in worker["messages"]] == ["long"]
        status, shown = cli.plain("workers")
        assert status == 0
        assert socket.gethostname() in shown
        assert "long" in shown
        assert "a payload" not in shown
    assert cli.plain("workers") == (1, "no workers\n")
