"""The dashboard's pages for operators, as seen by a browser without scripts: search, dead letters,
bulk actions, groups, schedules, timelines, new messages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from delayq import Offer
from delayq._delayed.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from tests.support.board import links, page, texts

if TYPE_CHECKING:
    from httpx import AsyncClient as Browser

    import delayq
    from delayq import Client
    from tests.support.servers import PrivateServer

    Jobs = delayq.ReliableQueue[Any]


def names(shown: str) -> list[str]:
    """Return the ids in the list on a page."""
    return re.findall(r"<code>([^<]+)</code></a>", shown)


# Search


async def mails(client: Client) -> Jobs:
    """Return a queue with messages in all states."""
    jobs = client.reliable_queue("mails", lease=60)
    await jobs.offer({"to": "ada"}, id="mail-dead")
    await (await jobs.claim())[0].bury("no such customer", "LookupError: 42")
    await jobs.offer({"to": "ada"}, id="mail-failed")
    await (await jobs.claim())[0].nack(600, error="TimeoutError: slow")
    await jobs.offer({"to": "Ada"}, id="mail-leased")
    await jobs.claim()
    await jobs.offer({"to": "Zoë"}, id="mail-ready", group="tenant-7", headers={"trace": "T-1"})
    await jobs.offer({"to": "bob"}, 600, id="mail-delayed")
    return jobs


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("q=ada", ["mail-failed", "mail-leased", "mail-dead"]),
        ("q=ada&state=dead", ["mail-dead"]),
        # Stored as an escape.
        ("q=zo%C3%AB", ["mail-ready"]),
        ("id=MAIL-D", ["mail-delayed", "mail-dead"]),
        # A whole id comes first, and once.
        ("id=mail-dead", ["mail-dead"]),
        ("error=timeout", ["mail-failed"]),
        ("error=42&q=ada", ["mail-dead"]),
        ("group=tenant", ["mail-ready"]),
        ("header=trace%3Dt-1", ["mail-ready"]),
        ("header=trace%3Dt-1&group=other", []),
    ],
)
async def test_a_search_looks_at_all_states(
    client: Client, reader: Browser, asked: str, found: list[str]
) -> None:
    await mails(client)
    shown = await page(reader, f"search?kind=reliable&name=mails&{asked}")
    assert names(shown) == found
    # The input is kept.
    for name, text in re.findall(r"(\w+)=([^&]+)", asked):
        assert f'value="{text.replace("%C3%AB", "ë").replace("%3D", "=")}"' in shown, name
    for address in links(shown, "message?"):
        await page(reader, address)


async def test_a_search_says_why_it_cannot_be(client: Client, reader: Browser) -> None:
    await mails(client)
    shown = await page(reader, "search?header=trace&q=ada")
    assert "The header must be NAME=TEXT." in shown
    assert 'value="trace"' in shown
    assert 'value="ada"' in shown
    assert "searched so far" not in shown
    await page(reader, "search?state=lost", 404)
    await page(reader, "search?kind=reliable&name=none", 404)


async def test_a_search_over_all_queues_goes_through_them_by_name(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    for name in ("b", "a", "C"):
        await client.reliable_queue(name).offer_many(
            [Offer(f"x{i}", id=f"{name}{i}") for i in "12"]
        )
    orders = client.delayed_queue("b")
    receipt = await orders.offer("x3", 60)
    await orders.aclose()
    server.call("SET", ReliableKeys.of("bad").dead, "x")
    shown = await page(reader, "search?q=x")
    assert names(shown) == ["C1", "C2", "a1", "a2", receipt.id, "b1", "b2"]
    assert "7 found. 7 messages searched so far." in texts(shown)
    # One that cannot be read hides none.
    assert "bad: one of the queue's keys holds a value of the wrong type" in texts(shown)
    # A delayed queue's messages have no groups.
    assert names(await page(reader, "search?q=x&group=g")) == []


async def test_a_search_is_bounded_and_goes_on(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.search._MOST", 50)
    offers = [Offer(i, delay=1000 + i, id=f"m{i:03}") for i in range(120)]
    await client.reliable_queue("one").offer_many(offers)
    await client.reliable_queue("parts", partitions=3).offer_many(offers)
    for name, times in (("&kind=reliable&name=one", 1), ("&kind=reliable&name=parts", 1), ("", 2)):
        address = f"search?q=7{name}"
        seen: list[str] = []
        told: list[int] = []
        while address:
            shown = await page(reader, address)
            seen += names(shown)
            (number,) = re.findall(r"([0-9]+) messages searched so far", texts(shown))
            told.append(int(number))
            found = links(shown, "search?")
            address = next((each for each in found if "seen=" in each), "")
        assert sorted(seen) == sorted(
            f"m{i:03}" for i in range(120) if "7" in str(i) for _ in range(times)
        )
        assert told[-1] == 120 * times
        assert all(after - before <= 50 for before, after in zip([0, *told], told, strict=False))


async def test_a_search_shows_a_page_of_what_it_finds(client: Client, reader: Browser) -> None:
    await client.reliable_queue("one").offer_many([Offer("x", id=f"m{i:03}") for i in range(60)])
    address, seen = "search?kind=reliable&name=one&q=x", list[str]()
    while address:
        shown = await page(reader, address)
        assert len(names(shown)) <= 25
        seen += names(shown)
        address = next((each for each in links(shown, "search?") if "seen=" in each), "")
    assert seen == [f"m{i:03}" for i in range(60)]


async def test_a_whole_id_is_found_beyond_the_bounds(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.search._MOST", 50)
    jobs = client.reliable_queue("one", partitions=2)
    await jobs.offer_many([Offer(i, delay=1000 + i, id=f"m{i:03}") for i in range(120)])
    address = "search?kind=reliable&name=one&id=m119"
    assert names(await page(reader, address)) == ["m119"]
    assert names(await page(reader, f"{address}&q=other")) == []


async def test_a_queue_leads_to_its_search(client: Client, reader: Browser) -> None:
    await client.delayed_queue("orders").offer({"order": 42}, 60)
    shown = await page(reader, "queue?kind=delayed&name=orders")
    assert '<input type="hidden" name="name" value="orders">' in shown
    assert "42" in texts(await page(reader, "search?kind=delayed&name=orders&q=42"))
    (wider,) = links(await page(reader, "search?kind=delayed&name=orders&q=42"), "search?q=42")
    assert len(links(await page(reader, wider), "message?")) == 1


async def test_payloads_that_are_no_text_are_searched_too(raw: Any, reader: Browser) -> None:
    keys = DelayedKeys.of("orders")
    await raw.rpush(keys.ready, b"\xff\x00needle", b'"\\ud800 needle"')
    await raw.rpush(keys.quarantine, b"needle")
    assert "3 found." in texts(await page(reader, "search?q=NEEDLE"))
