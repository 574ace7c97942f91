"""Measure the pages of the dashboard on a large queue: ``python -m benchmarks.dashboard [--json]
[--pending 1000000] [--dead 100000] [--failed 50000] [--runs 3]``.

The application is called directly, without a web server. The queue's messages are 100 bytes each:
99 in a hundred are delayed, the others are ready, and dead letters come on top. Some messages have
failed. Another queue keeps the records of handled messages, and has schedules. A page is opened
several times; an action runs once, since it changes the queue.

A block is the time of one command on the server, by its own measurement (SLOWLOG), which includes
the pauses of a busy machine: compare the longest block with the median of the command, or script,
that takes longest. Commands under 0.1 ms are left out, and so are the first calls of scripts, which
load them: once in the life of a server, that takes 1 to 3 ms. A median is one of three calls or
more. The longest call of an action is often one within which the server collects the garbage of its
scripts, once in fifty calls.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import re
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
from redis.asyncio import Redis

import delayq
from benchmarks._moves import add_server_option, address, measured_server
from benchmarks._report import Table, machine
from delayq import Offer
from delayq._reliable.keys import ReliableKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "http://localhost"
TOKEN = "of-the-benchmark"
NAME = "benchmark"
OF_QUEUE = f"kind=reliable&name={NAME}"
KEPT = "kept"
HANDLED = 2000
SCHEDULES = 50
VALUE = "x" * 98
BATCH = 1000
DAY = 86_400
# Fewer calls have no median: a pause of the machine would decide.
LEAST_CALLS = 3


def pages(pending: int, dead: int) -> dict[str, str]:
    """Return the addresses of all pages, by what they show."""
    deep = f"{OF_QUEUE}&offset="
    return {
        "all queues": "",
        "delayed, first page": f"queue?{OF_QUEUE}&state=delayed",
        "delayed, far page": f"queue?{deep}{pending * 9 // 10}&state=delayed",
        "ready, first page": f"queue?{OF_QUEUE}&state=ready",
        "ready, far page": f"queue?{deep}{pending // 200}&state=ready",
        "message": f"message?{OF_QUEUE}&at=//m5",
        "dead, first page": f"dead?{OF_QUEUE}",
        "dead, far page": f"dead?{deep}{dead * 9 // 10}",
        "dead, filter": f"letters?{OF_QUEUE}&error=nothing",
        "dead, by error": f"letters?{OF_QUEUE}&by=error",
        "all dead": "all-dead",
        "retries": f"retries?{OF_QUEUE}",
        "retries, one cause": f"retries?{OF_QUEUE}&by=type&cause=Even",
        "all retries": "all-retries",
        "handled": f"queue?kind=reliable&name={KEPT}&state=handled",
        "search, payload": f"search?{OF_QUEUE}&q=nothing",
        "search, payload, all": "search?q=nothing",
        "search, id": f"search?{OF_QUEUE}&id=m7",
        "groups": f"groups?{OF_QUEUE}",
        "schedules": f"schedules?{OF_QUEUE}",
        "all schedules": "all-schedules",
        "history": f"history?{OF_QUEUE}",
        "settings": f"settings?{OF_QUEUE}",
        "enqueue": f"enqueue?{OF_QUEUE}",
        "purge": f"purge?{OF_QUEUE}",
        "workers": "workers",
        "server": "server",
    }


def actions() -> dict[str, tuple[str, dict[str, str]]]:
    """Return actions on all messages of a list: where their form is, and its fields."""
    every = {"all": "1", "sure": "1"}
    letters = f"letters?{OF_QUEUE}"
    ready = every | {"state": "ready"}
    late = every | {"state": "delayed", "delay": "2", "unit": "days"}
    return {
        "cancel 10,000": (f"queue?{OF_QUEUE}&state=ready", ready | {"do": "cancel_many"}),
        "undo": ("", {"do": "undo"}),
        "reschedule 10,000": (f"queue?{OF_QUEUE}&state=delayed", late | {"do": "reschedule_many"}),
        "redrive matching": (f"{letters}&error=odd", every | {"do": "redrive_matching"}),
        "drop matching": (f"{letters}&error=even", every | {"do": "purge_matching"}),
        "purge delayed": (
            f"purge?{OF_QUEUE}",
            {"do": "purge_queue", "state": "delayed", "typed": NAME},
        ),
    }


async def fill(server: Any, client: delayq.Client, pending: int, dead: int, failed: int) -> None:
    """Offer messages, of which one in a hundred is ready, bury others of two errors, and let some
    fail.
    """
    queue = client.reliable_queue(NAME)
    await queue.offer_many([Offer(VALUE, id=f"dead-{n}") for n in range(2)])
    for error, message in zip(("Odd: one", "Even: two"), await queue.claim(2), strict=True):
        await message.bury("attempts", error)
    for start in range(0, pending, BATCH):
        numbers = range(start, min(start + BATCH, pending))
        await queue.offer_many(
            [Offer(VALUE, delay=DAY + n if n % 100 else 0, id=f"m{n}") for n in numbers]
        )
    # The others die as these did. To bury each of them would take minutes.
    keys = ReliableKeys.of(NAME)
    models = [await server.hget(keys.dead_messages, f"dead-{n}") for n in range(2)]
    died = await server.zscore(keys.dead, "dead-1")
    for start in range(2, dead, BATCH):
        numbers = range(start, min(start + BATCH, dead))
        await server.hset(keys.dead_messages, mapping={f"dead-{n}": models[n % 2] for n in numbers})
        await server.zadd(keys.dead, {f"dead-{n}": died + n for n in numbers})
    for start in range(0, min(failed, pending), BATCH):
        numbers = range(start, min(start + BATCH, failed, pending))
        errors = {f"m{n}": ("Odd: one", "Even: two")[n % 2] for n in numbers}
        await server.hset(keys.named("errors"), mapping=errors)


async def fill_kept(client: delayq.Client) -> None:
    """Handle messages of a queue that keeps their records, and give it schedules."""
    queue = client.reliable_queue(KEPT, keep=DAY)
    await queue.offer_many([Offer(VALUE) for _ in range(HANDLED)])
    while messages := await queue.claim(100):
        await asyncio.gather(*(message.ack() for message in messages))
    for number in range(SCHEDULES):
        await queue.schedule(f"schedule-{number}", value=VALUE, every=DAY)


async def last_logged(server: Any) -> int:
    """Return the id of the newest entry of the slow log; -1 if there is none.

    To empty the log instead would slow down the next command, by up to 45 ms.
    """
    return max((entry["id"] for entry in await server.slowlog_get(1)), default=-1)


async def blocks_ms(server: Any, after: int) -> tuple[float, float]:
    """Return how long commands have blocked the server since the entry of the slow log with the id
    ``after``: the median of the command, or script, that takes longest, and the longest of all.
    """
    durations: dict[bytes, list[int]] = {}
    for entry in await server.slowlog_get(-1):
        command, *arguments = entry["command"].split()[:2]
        if entry["id"] > after and command not in (b"SLOWLOG", b"CONFIG", b"EVAL"):
            kind = b" ".join([command, *arguments]) if command == b"EVALSHA" else command
            durations.setdefault(kind, []).append(entry["duration"])
    return (
        max(
            (median(kind) for kind in durations.values() if len(kind) >= LEAST_CALLS),
            default=0,
        )
        / 1000,
        max((max(kind) for kind in durations.values()), default=0) / 1000,
    )


async def open_pages(
    server: Any, client: delayq.Client, pending: int, dead: int, runs: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the figures of each page, and of each action."""
    transport = httpx.ASGITransport(delayq.dashboard(client, token=TOKEN))
    async with httpx.AsyncClient(
        transport=transport, base_url=f"{HOST}/", headers={"Origin": HOST}, timeout=600
    ) as browser:
        await browser.post("login", data={"token": TOKEN})
        for name, at in pages(pending, dead).items():
            logged = await last_logged(server)
            took = []
            for _ in range(runs):
                started = time.perf_counter()
                answer = await browser.get(at)
                took.append((time.perf_counter() - started) * 1000)
                answer.raise_for_status()
            yield row(name, took, await blocks_ms(server, logged))
        undo: dict[str, str] = {}
        for name, (at, fields) in actions().items():
            inputs = undo if at == "" else hidden((await browser.get(at)).text)
            logged = await last_logged(server)
            started = time.perf_counter()
            answer = await browser.post("act", data=inputs | fields)
            took = [(time.perf_counter() - started) * 1000]
            if answer.status_code != httpx.codes.SEE_OTHER:
                raise SystemExit(f"{name}: {answer.status_code} {answer.text}")
            yield row(name, took, await blocks_ms(server, logged))
            undo = hidden((await browser.get(answer.headers["location"])).text)


def row(name: str, took: list[float], blocks: tuple[float, float]) -> dict[str, Any]:
    return {
        "request": name,
        "median_ms": median(took),
        "slowest_ms": max(took),
        "block_median_ms": blocks[0],
        "block_longest_ms": blocks[1],
    }


def hidden(page: str) -> dict[str, str]:
    """Return the fields that the forms of a page send unseen."""
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page)
    return {name: html.unescape(value) for name, value in inputs}


async def measure(url: str, options: argparse.Namespace, table: Table) -> None:
    async with Redis.from_url(url) as server, delayq.connect(url) as client:
        await fill(server, client, options.pending, options.dead, options.failed)
        await fill_kept(client)
        await server.config_set("slowlog-max-len", 100_000)
        await server.config_set("slowlog-log-slower-than", 100)
        async for row in open_pages(server, client, options.pending, options.dead, options.runs):
            figures = [f"{value:.1f}" for name, value in row.items() if name != "request"]
            table.add(row, row["request"], *figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_server_option(parser)
    parser.add_argument("--pending", type=int, default=1_000_000, help="number of messages")
    parser.add_argument("--dead", type=int, default=100_000, help="number of dead letters")
    parser.add_argument("--failed", type=int, default=50_000, help="number of failed messages")
    parser.add_argument("--runs", type=int, default=3, help="how often to open each page")
    options = parser.parse_args()
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": f"{options.pending:,} messages of 100 bytes, of which {options.failed:,}"
            f" have failed, {options.dead:,} dead letters",
        }
        columns = ("request             ", "median ms", " slowest ms", " block median", " longest")
        table = Table(about, columns, as_json=options.json)
        asyncio.run(measure(address(server, options.server), options, table))
    table.end()


if __name__ == "__main__":
    main()
