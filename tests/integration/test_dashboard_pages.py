"""The dashboard's pages for operators, as seen by a browser without scripts: search, dead letters,
bulk actions, groups, schedules, timelines, new messages.
"""

from __future__ import annotations

import html
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


# Dead letters


LETTERS = "dead?kind=reliable&name=jobs"


async def die(jobs: Jobs, reason: str, *errors: str) -> None:
    """Make messages dead letters, one for each error, with the ids dead-0, dead-1 and so on."""
    for error in errors:
        number = await jobs.dead.size()
        await jobs.offer({"n": number}, id=f"dead-{number}")
        await (await jobs.claim())[0].bury(reason, error)


async def dead_of_all_kinds(client: Client, partitions: int | None = None) -> Jobs:
    jobs = client.reliable_queue("jobs", partitions=partitions)
    await die(jobs, "attempts", *["TimeoutError: a"] * 2, "TimeoutError: b", "LookupError: Timeout")
    await die(jobs, "expired", "", "TimeoutError: a")
    return jobs


def confirmation(shown: str) -> dict[str, str]:
    """Return the form that applies an action to all letters that match."""
    (fields,) = re.findall(
        r'<form method="post"[^>]*class="card actions">(.*?)</form>', shown, re.DOTALL
    )
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', fields)
    return {name: html.unescape(value) for name, value in found}


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("error=timeout", {0, 1, 2, 3, 5}),
        ("reason=expired", {4, 5}),
        ("error=timeout&reason=expired", {5}),
        ("by=type&cause=TimeoutError", {0, 1, 2, 5}),
        ("by=error&cause=TimeoutError%3A+a", {0, 1, 5}),
        ("by=reason&cause=expired&error=timeout", {5}),
        ("older=0&unit=seconds", {0, 1, 2, 3, 4, 5}),
        ("older=1&unit=hours", set[int]()),
    ],
)
async def test_dead_letters_are_filtered(
    client: Client, reader: Browser, partitions: int | None, asked: str, ids: set[int]
) -> None:
    await dead_of_all_kinds(client, partitions)
    shown = await page(reader, f"{LETTERS}&{asked}")
    assert set(names(shown)) == {f"dead-{number}" for number in ids}
    assert f"{len(ids)} matching." in texts(shown) or f"{len(ids)} with the" in texts(shown)


async def test_dead_letters_are_counted_by_cause(client: Client, reader: Browser) -> None:
    await dead_of_all_kinds(client)
    shown = await page(reader, f"{LETTERS}&by=type")
    assert re.search(r"TimeoutError 4 .* LookupError 1 .* expired 1 ", texts(shown))
    (address,) = [each for each in links(shown, "dead?") if "TimeoutError" in each]
    assert len(names(await page(reader, address))) == 4
    shown = texts(await page(reader, f"{LETTERS}&by=error&reason=expired"))
    assert re.search(r"TimeoutError: a 1 .* expired 1 ", shown) or re.search(
        r"expired 1 .* TimeoutError: a 1 ", shown
    )
    await page(reader, f"{LETTERS}&by=moon", 404)


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize(("do", "note"), [("redrive", "messages re-queued"), ("purge", "dropped")])
async def test_an_action_applies_to_what_a_filter_shows(
    client: Client, admin: Browser, partitions: int | None, do: str, note: str
) -> None:
    jobs = await dead_of_all_kinds(client, partitions)
    fields = confirmation(
        await page(admin, f"{LETTERS}&by=type&cause=TimeoutError&reason=attempts")
    )
    # One that died after the visitor has looked stays.
    await die(jobs, "attempts", "TimeoutError: late")
    refused = await admin.post("act", data=fields | {"do": do})
    assert "confirm that the action" in await page(admin, refused.headers["location"])
    assert await jobs.dead.size() == 7
    done = await admin.post("act", data=fields | {"do": do, "sure": "1"})
    assert f"3 {note}" in texts(await page(admin, done.headers["location"])).replace(
        "dead letters dropped", "dropped"
    )
    assert {each.id for each in await jobs.dead.list()} == {"dead-3", "dead-4", "dead-5", "dead-6"}
    assert (await jobs.stats()).ready == (3 if do == "redrive" else 0)


async def test_conditions_that_cannot_be_are_told_beside_the_field(
    client: Client, reader: Browser
) -> None:
    await dead_of_all_kinds(client)
    for age in ("soon", "-1", "nan", "1e99"):
        shown = await page(reader, f"{LETTERS}&older={age}&unit=days&error=kept")
        assert 'aria-describedby="wrong_older"' in shown
        assert f'value="{age}"' in shown
        assert 'value="kept"' in shown
        assert "<option selected>days" in shown


async def test_a_malformed_filter_drops_nothing(client: Client, admin: Browser) -> None:
    jobs = await dead_of_all_kinds(client)
    fields = confirmation(await page(admin, f"{LETTERS}&error=timeout"))
    for change in ({"until": "now"}, {"by": "moon"}, {"until": "9" * 40}):
        answer = await admin.post("act", data=fields | {"do": "purge", "sure": "1"} | change)
        assert answer.status_code == 400
    assert await jobs.dead.size() == 6


async def test_a_filter_of_many_dead_letters_is_bounded(
    client: Client, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.dead._MOST", 300)
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many([Offer(i, id=f"m{i:03}") for i in range(500)])
    while messages := await jobs.claim(100):
        for message in messages:
            await message.bury("x", "Odd: 1" if message.value % 2 else "Even: 1")
    shown = await page(admin, f"{LETTERS}&by=type")
    assert "The oldest 300 of 500 dead letters are counted." in texts(shown)
    shown = await page(admin, f"{LETTERS}&error=odd")
    assert "150 matching, among the oldest 300 of 500." in texts(shown)
    address, seen = f"{LETTERS}&error=odd", list[str]()
    while address:
        shown = await page(admin, address)
        seen += names(shown)
        found = re.search(r'rel="next" href="([^"]+)"', shown)
        address = html.unescape(found[1]) if found else ""
    assert len(seen) == len({*seen}) == 250
    done = await admin.post("act", data=confirmation(shown) | {"do": "purge", "sure": "1"})
    assert "250 dead letters dropped." in await page(admin, done.headers["location"])
