"""The dashboard's pages for operators, as seen by a browser without scripts: search, dead letters,
bulk actions, groups, schedules, timelines, new messages.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
import time
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from delayq import (
    DuplicateMessage,
    LeaseLost,
    Limit,
    Offer,
    OutcomeUnknown,
    ReliableQueue,
    connect,
    dashboard,
)
from delayq._dashboard.listings import AT_A_TIME
from delayq._dashboard.pages import PAGES
from delayq._dashboard.rows import MessageRef
from delayq._dashboard.sources import DelayedSource, ReliableSource
from delayq._dashboard.undo import Undo, Undone, Undos
from delayq._redis.client import RedisClient
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.queue import MAX_PAYLOAD
from delayq._redisson.store import DelayedStore
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.report_format import Work, facts_of
from delayq._reliable.store import ReliableStore
from tests.support.board import (
    JOBS,
    ONE,
    ORDERS,
    SETTINGS,
    _templates_are_compiled_once,
    browse,
    field,
    fill_with_letters,
    form,
    links,
    on_all_pages,
    one,
    page,
    send,
    texts,
)
from tests.support.reliable import claim_all, lists_work
from tests.support.reliable_store import expire
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from httpx import AsyncClient as Browser

    import delayq
    from delayq import Client
    from tests.support.servers import PrivateServer

    Jobs = delayq.ReliableQueue[Any]


__all__ = ["_templates_are_compiled_once", "one"]
pytestmark = pytest.mark.usefixtures("_full_batches")


def names(shown: str) -> list[str]:
    """Return the ids in the list on a page."""
    return re.findall(r"<code>([^<]+)</code></a>", shown)


# Search


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page of a search take its time, so that none ends before it has looked at enough."""
    for name in ("pages.search", "pages.dead", "pages.retries", "counts"):
        monkeypatch.setattr(f"delayq._dashboard.{name}._SECONDS", 3600)
    # Nor is anything shown that was counted a moment ago.
    for name in ("_FRESH", "_SHARE"):
        monkeypatch.setattr(f"delayq._dashboard.counts.{name}", 0)
    monkeypatch.setattr("delayq._dashboard.queues._SHARE", 0)
    monkeypatch.setattr("delayq._dashboard.board._FRESH", 0)


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


async def test_a_search_looks_at_all_states(client: Client, reader: Browser) -> None:
    await mails(client)
    for asked, ids in (
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
    ):
        shown = await page(reader, f"search?kind=reliable&name=mails&{asked}")
        assert names(shown) == ids, asked
        for address in links(shown, "message?"):
            await page(reader, address)
    assert "The header must be NAME=TEXT." in await page(reader, "search?header=trace&q=ada")
    await page(reader, "search?state=lost", 404)
    await page(reader, "search?kind=reliable&name=none", 404)


async def test_a_search_over_all_queues_is_by_name(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    for name in ("b", "a", "C"):
        await client.reliable_queue(name).offer_many(
            [Offer(f"x{i}", id=f"{name}{i}") for i in "12"]
        )
    orders = client.delayed_queue("b")
    receipt = await orders.offer("x3", 3600)
    await orders.aclose()
    server.call("SET", ReliableKeys.of("bad").dead, "x")
    shown = await page(reader, "search?q=x")
    assert names(shown) == ["C1", "C2", "a1", "a2", receipt.id, "b1", "b2"]
    assert "7 found. 7 messages searched so far." in texts(shown)
    # One that cannot be read hides none.
    assert "bad: one of the queue's keys holds a value of the wrong type" in texts(shown)
    # A delayed queue's messages have no groups.
    assert names(await page(reader, "search?q=x&group=g")) == []


async def pages_of(browser: Browser, address: str) -> AsyncIterator[str]:
    """Yield the pages of a search."""
    while address:
        shown = await page(browser, address)
        yield shown
        address = next((link for link in links(shown, "search?") if "seen=" in link), "")


async def test_a_search_is_bounded_and_goes_on(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.search._MAX_EXAMINED", 50)
    offers = [Offer(i, delay=1000 + i, id=f"m{i:03}") for i in range(120)]
    await client.reliable_queue("one").offer_many(offers)
    await client.reliable_queue("parts", partitions=3).offer_many(offers)
    for name, times in (("&kind=reliable&name=one", 1), ("&kind=reliable&name=parts", 1), ("", 2)):
        seen: list[str] = []
        counts = [0]
        async for shown in pages_of(reader, f"search?q=7{name}"):
            seen += names(shown)
            (number,) = re.findall(r"([0-9]+) messages searched so far", texts(shown))
            counts.append(int(number))
        assert sorted(seen) == [
            f"m{i:03}" for i in range(120) if "7" in str(i) for _ in range(times)
        ]
        assert counts[-1] == 120 * times
        assert all(after - before <= 50 for before, after in pairwise(counts))
    # A whole id is found beyond the bounds.
    address = "search?kind=reliable&name=parts&id=m119"
    assert names(await page(reader, address)) == ["m119"]
    assert names(await page(reader, f"{address}&q=other")) == []


async def test_payloads_that_are_no_text_are_searched_too(raw: Any, reader: Browser) -> None:
    keys = DelayedKeys.of("orders")
    await raw.rpush(keys.ready, b"\xff\x00needle", b'"\\ud800 needle"')
    await raw.rpush(keys.quarantine, b"needle")
    assert "3 found." in texts(await page(reader, "search?q=NEEDLE"))


# Dead letters


LETTERS = "letters?kind=reliable&name=jobs"


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
    values = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', fields)
    return {name: html.unescape(value) for name, value in values}


@pytest.mark.parametrize("partitions", [None, 3])
async def test_dead_letters_are_filtered(
    client: Client, reader: Browser, partitions: int | None
) -> None:
    await dead_of_all_kinds(client, partitions)
    for asked, ids in (
        ("error=timeout", {0, 1, 2, 3, 5}),
        ("reason=expired", {4, 5}),
        ("error=timeout&reason=expired", {5}),
        ("by=type&cause=TimeoutError", {0, 1, 2, 5}),
        ("by=error&cause=TimeoutError%3A+a", {0, 1, 5}),
        ("by=reason&cause=expired&error=timeout", {5}),
        ("older=0&unit=seconds", {0, 1, 2, 3, 4, 5}),
        ("older=1&unit=hours", set[int]()),
    ):
        shown = await page(reader, f"{LETTERS}&{asked}")
        assert set(names(shown)) == {f"dead-{number}" for number in ids}, asked
        # The last death comes first.
        assert partitions or names(shown) == sorted(names(shown), reverse=True)
        assert "data-live" not in shown
        assert f"{len(ids)} matching." in texts(shown) or f"{len(ids)} with the" in texts(shown)


async def test_dead_letters_are_counted_by_cause(client: Client, reader: Browser) -> None:
    await dead_of_all_kinds(client)
    shown = await page(reader, f"{LETTERS}&by=type")
    assert "data-live" in shown
    # The last death comes first.
    assert re.search(r"TimeoutError 4 .* expired 1 .* LookupError 1 ", texts(shown))
    (address,) = [link for link in links(shown, "letters?") if "TimeoutError" in link]
    assert len(names(await page(reader, address))) == 4
    await page(reader, f"{LETTERS}&by=moon", 404)
    for age in ("soon", "-1", "nan", "1e99"):
        assert "wrong_older" in await page(reader, f"{LETTERS}&older={age}&unit=days")


@pytest.mark.parametrize(
    ("do", "note", "partitions"),
    [
        ("redrive_matching", "3 messages re-queued", None),
        ("purge_matching", "3 dead letters dropped", 3),
    ],
)
async def test_an_action_applies_to_what_a_filter_shows(
    client: Client, admin: Browser, do: str, note: str, partitions: int | None
) -> None:
    jobs = await dead_of_all_kinds(client, partitions)
    shown = await page(admin, f"{LETTERS}&by=type&cause=TimeoutError&reason=attempts")
    fields = confirmation(shown) | {"do": do}
    # One that died after the visitor has looked stays.
    await die(jobs, "attempts", "TimeoutError: late")
    again = await send(admin, fields)
    assert "confirm that the action" in again
    # The same letters are shown, and the same form is in the same place.
    assert confirmation(again).keys() == confirmation(shown).keys()
    assert confirmation(again)["cause"] == confirmation(shown)["cause"] == "TimeoutError"
    fields |= {"sure": "1"}
    for wrong in ({"until": "now"}, {"by": "moon"}, {"until": "9" * 40}, {"cause": ""}):
        await send(admin, fields | wrong, 400)
    assert await jobs.dead.size() == 7
    assert note in texts(await send(admin, fields))
    assert {letter.id for letter in await jobs.dead.list()} == {
        "dead-3",
        "dead-4",
        "dead-5",
        "dead-6",
    }
    assert (await jobs.stats()).ready == (3 if do == "redrive_matching" else 0)


async def test_a_cause_of_several_lines_or_without_a_type_is_acted_on_alone(
    client: Client, admin: Browser
) -> None:
    jobs = client.reliable_queue("jobs")
    await die(jobs, "two\nlines & 100 %", "")
    await die(jobs, "other", "KeyError: x", "::1 refused the connection")
    shown = await page(admin, f"{LETTERS}&by=reason")
    (address,) = [link for link in links(shown, "letters?") if "two" in link]
    fields = confirmation(await page(admin, address))
    # Browsers send line breaks as two characters.
    sent = {name: value.replace("\n", "\r\n") for name, value in fields.items()}
    await admin.post("act", data=sent | {"do": "redrive_matching", "sure": "1"})
    assert [letter.reason for letter in await jobs.dead.list()] == ["other"] * 2
    shown = await page(admin, "all-dead?by=type")
    nameless, _ = buttons(shown, "purge_matching")
    again = await press(admin, shown, nameless, "purge_matching")
    assert "1 dead letter dropped." in texts(again)
    assert [letter.error for letter in await jobs.dead.list()] == ["KeyError: x"]


async def test_an_action_applies_to_what_was_counted(
    client: Client, raw: Any, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = client.reliable_queue("jobs")
    await die(jobs, "attempts", "KeyError: x")
    addresses = ("all-dead?by=type", f"{LETTERS}&error=key")
    for address in addresses:
        await page(admin, address)
    # Each page that follows shows the first count, which is an hour old at most.
    monkeypatch.setattr("delayq._dashboard.counts._FRESH", 3600)
    await die(jobs, "attempts", "KeyError: late")
    shown, filtered = [await page(admin, address) for address in addresses]
    assert "The only dead letter is counted. " in texts(shown)
    (button,) = buttons(shown, "redrive_matching")
    fields = confirmation(filtered) | {"do": "redrive_matching", "sure": "1"}
    assert "1 message re-queued." in texts(await send(admin, fields))
    await press(admin, shown, button, "purge_matching")
    assert [letter.error for letter in await jobs.dead.list()] == ["KeyError: late"]
    # Nothing can be done about letters that are not counted yet.
    await fill_with_letters(raw, range(150))
    monkeypatch.setattr("delayq._dashboard.counts._SECONDS", -1)
    assert not buttons(await page(admin, "all-dead?by=reason"), "redrive_matching")


async def test_a_count_goes_on_from_page_to_page(
    client: Client, raw: Any, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One step for each page.
    monkeypatch.setattr("delayq._dashboard.counts._SECONDS", -1)
    await client.reliable_queue("jobs", partitions=2).stats()
    await fill_with_letters(raw, range(250), 2)
    shown = ""
    for address in (f"{LETTERS}&by=reason", "all-dead?by=reason&error=in", f"{LETTERS}&reason=in"):
        parts = [texts(await page(admin, address)) for _ in range(6)]
        assert re.search("100 of 250 (dead letters are|that are) counted so far", parts[0])
        assert not any("250 of 250" in part for part in parts)
        shown = parts[-1]
        assert "All 250 dead letters are counted." in shown or "250 matching." in shown
    monkeypatch.setattr("delayq._dashboard.pages.dead._MAX_EXAMINED", 100)
    seen = await on_all_pages(admin, f"{LETTERS}&reason=in", r"<code>([^<]+)</code></a>")
    assert len(seen) == len({*seen}) == 250
    monkeypatch.setattr("delayq._dashboard.counts._SECONDS", 3600)
    fields = confirmation(await page(admin, f"{LETTERS}&reason=in 1&offset=25"))
    answer = await send(admin, fields | {"do": "purge_matching", "sure": "1"})
    assert "125 dead letters dropped." in answer
    # The filter stays.
    assert 'value="in 1"' in answer


async def test_counts_of_many_queues_take_turns(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One step for each page.
    monkeypatch.setattr("delayq._dashboard.counts._SECONDS", -1)
    for name in "abcde":
        await die(client.reliable_queue(name), "attempts", "KeyError: x")
    for _ in range(4):
        assert "of 5 dead letters are counted so far." in texts(await page(reader, "all-dead"))
    assert "All 5 dead letters are counted." in texts(await page(reader, "all-dead"))


async def test_counts_that_were_used_last_are_kept(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.counts._FRESH", 3600)
    monkeypatch.setattr("delayq._dashboard.counts._MOST_KEPT", 2)
    jobs = client.reliable_queue("jobs")

    async def counted(error: str) -> str:
        shown = texts(await page(reader, f"all-dead?error={error}"))
        return shown.partition(" dead letters are counted.")[0].split()[-1]

    for _ in range(2):
        await die(jobs, "attempts", "x, y and z")
    assert [await counted(error) for error in "xyxz"] == ["2"] * 4
    await die(jobs, "attempts", "x, y and z")
    assert [await counted(error) for error in "xzy"] == ["2", "2", "3"]


def buttons(shown: str, do: str) -> list[str]:
    """Return where the buttons of a table of causes send their form."""
    return [
        html.unescape(address)
        for address in re.findall(rf'value="{do}" form="causes" formaction="([^"]+)"', shown)
    ]


async def press(browser: Browser, shown: str, address: str, do: str) -> str:
    """Press such a button, and return the page to which it leads."""
    fields = {"form_token": field(shown, "form_token"), "back": field(shown, "back"), "do": do}
    answer = await browser.post(address, data=fields)
    assert answer.status_code == 303, answer.text
    return await page(browser, answer.headers["location"])


async def test_dead_letters_of_all_queues_are_redriven_by_cause(
    client: Client, admin: Browser
) -> None:
    jobs = await dead_of_all_kinds(client)
    other = client.reliable_queue("other/ü 1%")
    await die(other, "attempts", "TimeoutError: c")
    address = "all-dead?by=type&error=timeout"
    shown = await page(admin, address)
    assert "All 7 dead letters are counted." in texts(shown)
    rows = re.findall(r"(\w+Error) (\S+(?: 1%)?) (\d) ", texts(shown).partition("counted.")[2])
    assert rows == [
        ("TimeoutError", "other/ü 1%", "1"),
        ("TimeoutError", "jobs", "4"),
        ("LookupError", "jobs", "1"),
    ]
    first, second, _ = buttons(shown, "redrive_matching")
    await die(jobs, "attempts", "TimeoutError: late")
    again = await press(admin, shown, first, "redrive_matching")
    assert "1 message re-queued. This cannot be undone." in texts(again)
    # The filter stays.
    assert 'value="timeout"' in again
    again = await press(admin, again, second, "purge_matching")
    assert "4 dead letters dropped." in texts(again)
    # What died after the page was read stays.
    assert {letter.error for letter in await jobs.dead.list()} == {
        "LookupError: Timeout",
        "",
        "TimeoutError: late",
    }
    assert (await other.stats()).ready == 1


async def test_a_queue_that_cannot_be_read_hides_no_causes_of_others(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    for name in ("jobs", "bad"):
        jobs = client.reliable_queue(name)
        await die(jobs, "attempts", "KeyError: x")
        await jobs.offer(1, id="fails")
        await (await jobs.claim())[0].nack(600, error="LookupError: y")
    letters, errors = ReliableKeys.of("bad").dead_messages, ReliableKeys.of("bad").named("errors")
    for key in (letters, errors, ReliableKeys.of("worse").dead):
        server.call("DEL", key)
        server.call("SET", key, "x")
    for address, cause, refused in (
        ("all-dead", "KeyError", ("bad", "worse")),
        ("all-retries", "LookupError", ("bad",)),
    ):
        shown = texts(await page(reader, address))
        assert f"{cause} jobs 1" in shown
        for name in refused:
            assert f"{name} : one of the queue's keys holds a value of the wrong type" in shown


# Retries


RETRIES = "retries?kind=reliable&name=jobs"


@pytest.mark.parametrize("partitions", [None, 3])
async def test_failed_messages_are_retried_and_cancelled_by_cause(
    client: Client, admin: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions, lease=3600)
    await jobs.offer_many([Offer(n, id=f"m{n}", max_attempts=7) for n in range(6)])
    assert "No message waits for another attempt." in texts(await page(admin, RETRIES))
    for message in sorted(await jobs.claim(6), key=lambda message: int(message.value)):
        error = "TimeoutError: no answer" if message.value < 4 else "LookupError: gone"
        await message.nack(3000 + message.value, error=f"Traceback\n  line\n{error}")
    await jobs.offer("another", 600)
    shown = await page(admin, RETRIES)
    assert names(shown) == [f"m{n}" for n in range(6)]
    assert "All 6 failed messages are counted." in texts(shown)
    assert "m0 TimeoutError: no answer 1 of 7 in 49 min" in texts(shown)
    address = next(link for link in links(shown, "retries?") if "LookupError" in link)
    assert names(await page(admin, address)) == ["m4", "m5"]

    shown = await page(admin, f"all-retries?by=error&x={partitions}")
    assert re.search("TimeoutError: no answer jobs 4 .* LookupError: gone jobs 2 ", texts(shown))
    timeouts, gone = buttons(shown, "retry_cause")
    again = await press(admin, shown, timeouts, "retry_cause")
    assert "4 messages rescheduled." in texts(again)
    assert {message.id for message in await jobs.list("ready")} == {"m0", "m1", "m2", "m3"}
    assert "4 messages are as before." in await undo(admin, again)
    assert (await jobs.stats()).ready == 0
    again = await press(admin, shown, gone, "cancel_cause")
    assert "2 messages cancelled." in texts(again)
    assert "Retries" in again
    for position in ("7", "0.99999999999999999999"):
        await page(admin, f"{RETRIES}&from={position}", 404)

    shown = await page(admin, RETRIES)
    fields = form(shown, "back", "state") | {
        "do": "run_now",
        "at": re.findall(r'name="at" value="([^"]+)"', shown)[:1],
    }
    assert "1 message rescheduled." in texts(await send(admin, fields))
    assert [message.id for message in await jobs.list("ready")] == ["m0"]


async def test_failed_messages_are_buried_and_brought_back(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", partitions=2, lease=3600)
    # An earlier message with the same id.
    await die(jobs, "earlier", "KeyError: 1")
    await jobs.offer_many([Offer(n, id=f"dead-{n}") for n in range(5)])
    for message in await claim_all(jobs):
        await message.nack(3000, error="LookupError: gone")
    await jobs.reschedule("dead-4", 0)
    await jobs.claim()
    due = {message.id: message.due_at for message in await jobs.list("delayed")}

    shown = await page(admin, "all-retries")
    again = await press(admin, shown, buttons(shown, "bury_cause")[0], "bury_cause")
    assert "4 messages are dead letters now. The others are gone, or a worker has" in texts(again)
    reasons = [letter.reason for letter in await jobs.dead.list()]
    assert reasons == ["earlier", *["buried by an operator"] * 4]
    assert "4 messages are restored, with all attempts." in await undo(admin, again)
    assert [letter.reason for letter in await jobs.dead.list()] == ["earlier"]
    assert {message.id: message.due_at for message in await jobs.list("delayed")} == due
    await jobs.reschedule_many(due, 0)
    for message in await claim_all(jobs):
        await message.nack(3000, error="LookupError: gone")

    shown = await page(admin, RETRIES)
    fields = form(shown, "back", "state") | {"do": "bury_selected"}
    assert "select messages first" in texts(await send(admin, fields))
    selected = fields | {"at": places(shown)[:2]}
    assert "2 messages are dead letters now." in texts(await send(admin, selected))
    shown = await page(admin, links(await page(admin, RETRIES), "message?")[0])
    fields = form(shown, "back", "at") | {"do": "bury"}
    assert "1 message is a dead letter now." in texts(await send(admin, fields))
    assert await jobs.dead.size() == 4


async def test_a_page_of_causes_names_as_many_messages_as_it_counted(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.counts._FRESH", 3600)
    jobs = client.reliable_queue("jobs")
    for number in (2, 1):
        await jobs.offer_many([Offer(n) for n in range(number)])
        for message in await jobs.claim(number):
            await message.nack(600, error="LookupError: gone")
        shown = texts(await page(reader, "all-retries"))
        assert "All 2 failed messages are counted." in shown
    shown = texts(await page(reader, "all-retries?offset=50"))
    assert "There are no causes on this page." in shown
    assert "No message waits" not in shown
    assert "of 1" not in shown


async def test_failed_messages_are_shown_and_counted_once(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(3)])
    for message in await jobs.claim(3):
        await message.nack(600 + message.value, error="LookupError: gone")
    # As if the server had made the hash smaller after the first step.
    steps = {"0": ("8", [b"m0", b"m1"]), "8": ("0", [b"m1", b"m2"])}

    async def failed(_: ReliableStore, cursor: str) -> tuple[str, dict[bytes, str]]:
        following, ids = steps[cursor]
        return following, dict.fromkeys(ids, "LookupError: gone")

    monkeypatch.setattr(ReliableStore, "failed", failed)
    shown = await page(reader, RETRIES)
    assert names(shown) == ["m0", "m1", "m2"]
    assert "All 3 failed messages are counted." in texts(shown)


async def test_an_update_of_causes_reads_no_messages(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer(1)
    await (await jobs.claim())[0].nack(600, error="LookupError: gone")
    monkeypatch.setattr("delayq._dashboard.live._STREAM_SECONDS", 0.1)
    monkeypatch.setattr(ReliableStore, "get_many", None)
    assert "LookupError" in await page(reader, "events?page=retries&kind=reliable&name=jobs")


async def test_a_list_of_failed_messages_reads_no_payloads(
    client: Client, raw: Any, reader: Browser
) -> None:
    jobs = client.reliable_queue("jobs")
    chain = Offer("x" * 500_000, id="large", max_attempts=7).then(Offer("next"))
    await jobs.offer_many([chain])
    await (await jobs.claim())[0].nack(600, error="LookupError: gone")
    sent = [(await raw.info("stats"))["total_net_output_bytes"]]
    shown = texts(await page(reader, RETRIES))
    sent.append((await raw.info("stats"))["total_net_output_bytes"])
    assert "large LookupError: gone 1 of 7" in shown
    assert sent[1] - sent[0] < 500_000


async def test_the_search_for_failed_messages_ends_in_time(
    client: Client, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.retries._SECONDS_TO_FIND", -1)
    jobs = client.reliable_queue("jobs", partitions=2)
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(20)])
    for message in await jobs.claim(20):
        await message.nack(600, error="LookupError: gone")
    shown = await page(admin, RETRIES)
    (gone,) = buttons(shown, "cancel_cause")
    again = await press(admin, shown, gone, "cancel_cause")
    assert "There may be more with this cause: use its button again." in texts(again)
    remaining = (await jobs.stats()).delayed
    assert 0 < remaining < 20, "those of the first partition were found"
    assert f"{20 - remaining} messages are restored, with all attempts." in await undo(admin, again)


@pytest.mark.parametrize(
    ("do", "note"),
    [
        ("retry_cause", "rescheduled."),
        ("cancel_cause", "cancelled."),
        ("bury_cause", "are dead letters now."),
    ],
)
async def test_an_action_on_a_cause_is_bounded_and_can_be_continued(
    client: Client, admin: Browser, monkeypatch: pytest.MonkeyPatch, do: str, note: str
) -> None:
    monkeypatch.setattr("delayq._dashboard.changes.MAX_MESSAGES", 25)
    jobs = client.reliable_queue("jobs", lease=3600)
    await jobs.offer_many([Offer(n) for n in range(40)])
    for message in await jobs.claim(40):
        await message.nack(3000, error="LookupError: gone")
    shown = await page(admin, RETRIES)
    (button,) = buttons(shown, do)
    more = " There may be more with this cause: use its button again."
    assert f"25 messages {note}{more}" in texts(await press(admin, shown, button, do))
    assert (await jobs.stats()).delayed == 15
    again = texts(await press(admin, shown, button, do))
    assert f"15 messages {note}" in again
    assert more not in again
    # A search that has come to the end was in time.
    monkeypatch.setattr("delayq._dashboard.pages.retries._SECONDS_TO_FIND", -1)
    assert "Nothing changed: " in texts(await press(admin, shown, button, do))


async def test_failed_messages_are_read_page_by_page(
    client: Client, raw: Any, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue, partitions in (("jobs", None), ("parts", 3)):
        jobs = client.reliable_queue(queue, partitions=partitions)
        await jobs.offer_many([Offer(n, delay=3000, id=f"m{n}") for n in range(2_000)])
        for number in range(partitions or 1):
            keys = ReliableKeys.of(queue, partition=number)
            ids = await raw.hkeys(keys.named("bodies"))
            await raw.hset(keys.named("errors"), mapping=dict.fromkeys(ids, f"Odd: {'x' * 99}"))
        address = f"retries?kind=reliable&name={queue}&by=type&cause=Odd"
        seen = await on_all_pages(reader, address, r"<code>(m[0-9]+)</code></a>")
        assert len(seen) == len({*seen}) == 2_000


# Messages that were handled


@pytest.mark.parametrize("partitions", [None, 3])
async def test_messages_that_fail_do_not_hide_handled_ones(
    client: Client, reader: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions, keep=3600)
    await jobs.offer_many([Offer(n, id=f"done{n}") for n in range(60)])
    for message in await jobs.claim(60):
        await message.ack()

    async def fail(count: int) -> str:
        await jobs.offer_many([Offer(n) for n in range(count)])
        while (await jobs.stats()).ready:
            failing = await jobs.claim(100)
            await asyncio.gather(*(message.nack(600, error="x") for message in failing))
        return await page(reader, f"{JOBS}&state=handled")

    assert len(names(await fail(30))) >= 25
    assert "None yet. The next page may have some." in texts(await fail(1_000))
    seen = await on_all_pages(reader, f"{JOBS}&state=handled", r"<code>(done[0-9]+)</code></a>")
    assert len(seen) == len({*seen}) == 60


@pytest.mark.parametrize("partitions", [None, 3])
async def test_handled_messages_are_listed_and_found(
    client: Client, admin: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions, keep=3600)
    for number in range(30):
        await jobs.offer(number, id=f"m{number}")
        if not number:
            assert "No message was handled" in await page(admin, f"{JOBS}&state=handled")
        (message,) = await jobs.claim()
        if number == 29:
            await message.nack(0, error="TimeoutError: slow")
            (message,) = await jobs.claim()
        await message.ack(result={"sum": number})
    # One that failed, and one that was cancelled after it had failed.
    for name in ("fails", "goes"):
        await jobs.offer(0, id=name)
        await (await jobs.claim())[0].nack(600, error="LookupError: gone")
    assert await jobs.cancel("goes")

    seen = await on_all_pages(admin, f"{JOBS}&state=handled", r"<code>(m[0-9]+)</code></a>")
    assert seen == [f"m{number}" for number in reversed(range(30))]
    for asked in ("id=m29", "q=29", "error=slow", "q=29&state=handled"):
        (address,) = links(await page(admin, f"search?kind=reliable&name=jobs&{asked}"), "message?")
        shown = texts(await page(admin, address))
        assert '"sum": 29' in shown
        assert re.search(r"Attempt 1 .* TimeoutError: slow Attempt 2 .* Handled ", shown)
    assert "cancelled or purged, or has expired" in await page(
        admin, address.replace("m29", "goes")
    )
    await page(admin, address.replace("m29", "unknown"), 404)


async def test_a_queue_opens_where_its_messages_are(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", lease=3600)
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(3)])
    await jobs.offer("later", 600, id="later")
    shown = await page(admin, JOBS)
    assert set(names(shown)) == {"m0", "m1", "m2"}
    # Live updates stay there.
    (address,) = re.findall(r'data-live="([^"]+)"', shown)
    assert "state=ready" in address


# Actions on several messages, and undoing them


def places(shown: str) -> list[str]:
    """Return the places of the messages that a page offers to select."""
    return [html.unescape(each) for each in re.findall(r'name="at" value="([^"]+)"', shown)]


async def select(browser: Browser, address: str, do: str, *chosen: int, **more: Any) -> str:
    """Submit the form about selected messages, and return the page to which it redirects."""
    shown = await page(browser, address)
    state = field(shown, "state")
    at = [places(shown)[number] for number in chosen]
    fields = form(shown) | {"state": state, "sure": "1", "do": do, "at": at}
    return await send(browser, fields | more)


async def undo(browser: Browser, shown: str) -> str:
    """Undo the action that a page reports."""
    fields = form(shown) | {"do": "undo", "undo": field(shown, "undo")}
    return texts(await send(browser, fields))


async def known(jobs: Jobs, about: Callable[[float], Any] = float) -> dict[str, tuple[Any, ...]]:
    """Return what matters of the waiting messages, by id."""
    waiting = await jobs.list("delayed") + await jobs.list("ready")
    return {
        each.id: (*(getattr(each, name) for name in MATTERS), about(each.due_at.timestamp()))
        for each in waiting
    }


MATTERS = ("value", "headers", "priority", "group", "state")
# An undo takes its time.
about = partial(pytest.approx, abs=60)


async def expiry(browser: Browser) -> str:
    """Return when m0 expires, in minutes."""
    (address,) = [link for link in links(await page(browser, JOBS), "message?") if "m0" in link]
    duration, *_ = re.findall(r"Expires in (\d+ h \d+ min)", texts(await page(browser, address)))
    return str(duration)


@pytest.mark.parametrize("partitions", [None, 3])
async def test_selected_messages_are_cancelled_and_brought_back(
    client: Client, admin: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions)
    await jobs.offer(
        {"n": 0}, 3000, id="m0", headers={"a": "é"}, priority=7, group="g/ 1", ttl=9000
    )
    await jobs.offer({"n": 1}, 4000, id="m1", max_attempts=2, timeout=30)
    await jobs.offer({"n": 2}, 5000, id="m2")
    before = await known(jobs, about)
    expires = await expiry(admin)
    # m2 stays. A message that is selected twice is one.
    order = names(await page(admin, JOBS))
    chosen = [order.index(each) for each in ("m0", "m0", "m1")]
    shown = await select(admin, JOBS, "cancel_many", *chosen)
    assert "2 messages cancelled." in texts(shown)
    assert set(await known(jobs)) == {"m2"}
    assert "2 messages are restored, with all attempts." in await undo(admin, shown)
    assert await known(jobs) == before
    assert await expiry(admin) == expires
    # Once.
    assert "Nothing changed: an action can be undone within a minute" in await undo(admin, shown)
    assert await known(jobs) == before


async def many_in_both(client: Client) -> Callable[[str], Awaitable[list[int]]]:
    """Offer 250 messages to a queue of each kind. Return a function that reads what is there."""
    jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
    await jobs.offer_many([Offer(n, delay=3000, id=f"m{n}") for n in range(250)])
    await orders.offer_many([(n, 3000) for n in range(250)])

    async def there(address: str) -> list[int]:
        if address == JOBS:
            return sorted(message.value for message in await jobs.list("delayed", limit=999))
        return sorted(value for value, _ in await orders.pending.entries())

    return there


@pytest.mark.parametrize(
    ("address", "where", "name", "told"),
    [
        # For a reliable queue, the undo also finds out what the failed step has done.
        (JOBS, ReliableQueue, "offer_many", ""),
        (ORDERS, DelayedSource, "find_live", ""),
        (ORDERS, DelayedStore, "send", f"{AT_A_TIME} messages may be back"),
    ],
)
async def test_an_undo_that_fails_can_be_repeated_and_doubles_no_message(
    client: Client,
    admin: Browser,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    where: Any,
    name: str,
    told: str,
) -> None:
    there = await many_in_both(client)
    shown = await select(admin, address, "cancel_many", all="1")
    failing(monkeypatch, where, name, 1)
    fields = form(shown) | {"do": "undo", "undo": field(shown, "undo")}
    assert told in texts(await send(admin, fields, 502))
    monkeypatch.undo()
    answer = await undo(admin, shown)
    assert f"{250 - AT_A_TIME * bool(told)} messages are " in answer
    assert ("and perhaps more" in answer) == bool(told)
    assert await there(address) == [*range(250)]


async def test_an_id_stays_taken_when_brought_back(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", dedup_window=7200)
    await jobs.offer("x", 3000, id="m1", unique_for=3600)
    await jobs.offer("x", 4000, id="m2")
    shown = await select(admin, JOBS, "cancel_many", 0, 1)
    # Another message with the id of the second one is handled meanwhile.
    await jobs.offer("y", id="m2")
    await (await jobs.claim())[0].ack()
    assert "1 message is as before. The others could not" in await undo(admin, shown)
    assert [message.id for message in await jobs.list("delayed")] == ["m1"]
    # The id stays taken as long as it was to be.
    (taken,) = await jobs.list("delayed")
    assert await jobs.cancel("m1")
    with pytest.raises(DuplicateMessage):
        await jobs.offer("z", id=taken.id)


async def test_the_memory_for_undoing_actions_is_bounded_in_size_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing() -> Undone:
        return Undone(0)

    undos = Undos()
    tokens = [undos.keep(Undo(nothing, 1, 10 * 1024 * 1024)) for _ in range(4)]
    assert [undos.find(token) is not None for token in tokens] == [False, True, True, True]
    assert not undos.keep(Undo(nothing, 1, 40 * 1024 * 1024))
    assert undos.find(tokens[3])
    now = time.monotonic()
    monkeypatch.setattr("delayq._dashboard.undo.time.monotonic", lambda: now + 61)
    assert undos.find(tokens[3]) is None


async def expired_in_front(jobs: Jobs, raw: Any, expired: int, live: int) -> list[str]:
    """Offer messages of which the first ones expire, and return the ids of the others."""
    await jobs.offer_many([Offer("x", id=f"gone-{n}", ttl=3600) for n in range(expired)])
    for keys in (ReliableKeys.of("jobs", partition=number) for number in range(3)):
        await expire(raw, keys)
    await jobs.offer_many([Offer("wanted", id=f"live-{n}") for n in range(live)])
    return sorted(f"live-{n}" for n in range(live))


@pytest.mark.parametrize(("partitions", "expired"), [(1, 2500), (3, 120)])
async def test_messages_behind_expired_ones_are_found_once(
    client: Client, raw: Any, admin: Browser, partitions: int, expired: int
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions)
    live = await expired_in_front(jobs, raw, expired, 120)
    ready = f"{JOBS}&state=ready"
    for address in (ready, f"search?{JOBS[6:]}&q=wanted"):
        assert sorted(await on_all_pages(admin, address, r"<code>(live-\d+)</code>")) == live
    assert (await jobs.stats()).ready == 120
    assert "25 of 120" in texts(await page(admin, ready))
    last = texts(await page(admin, f"{ready}&offset=100"))
    assert "120 of 120" in last
    assert "Next" not in last
    shown = await select(admin, ready, "cancel_many", all="1")
    assert "120 messages cancelled." in texts(shown)
    assert not await jobs.list("ready", limit=5000)
    assert "120 messages are restored, with all attempts." in await undo(admin, shown)
    assert len(await jobs.list("ready", limit=5000)) == 120


async def test_a_page_looks_at_a_bounded_number_of_expired_messages(
    client: Client, raw: Any, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.listings._FARTHEST", 300)
    jobs = client.reliable_queue("jobs", partitions=2)
    await expired_in_front(jobs, raw, 1000, 120)
    shown = await page(reader, f"{JOBS}&state=ready")
    assert "All messages that were looked at have expired." in texts(shown)
    assert "No page shows more than the first 300 ready messages" in texts(shown)
    assert 'rel="next"' not in shown


async def test_pages_end_where_their_rows_would_repeat(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.forms._FARTHEST_IN_PARTITIONS", 50)
    jobs = client.reliable_queue("jobs", partitions=2)
    await jobs.offer_many([Offer(n) for n in range(120)])
    for message in await jobs.claim(100):
        await message.bury("why")
    await jobs.offer_many([Offer(n) for n in range(100)])
    for address in (f"{JOBS}&state=ready", f"dead?{JOBS[6:]}"):
        assert 'rel="next"' in await page(reader, f"{address}&offset=25")
        shown = await page(reader, f"{address}&offset=50")
        assert "75 of 1" in texts(shown)
        assert 'rel="next"' not in shown


@pytest.mark.parametrize("partitions", [1, 3])
async def test_the_newest_letters_of_all_partitions_come_first_and_no_others_are_read(
    client: Client, raw: Any, reader: Browser, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    await client.reliable_queue("jobs", partitions=partitions).stats()
    await fill_with_letters(raw, range(6_000), partitions)
    bodies: list[int] = []
    command = RedisClient.command

    async def counted(self: Any, *parts: Any) -> Any:
        if parts[0] == "HMGET" and "dead" in parts[1]:
            bodies.append(len(parts) - 2)
        return await command(self, *parts)

    monkeypatch.setattr(RedisClient, "command", counted)
    shown = await page(reader, f"dead?{JOBS[6:]}&offset=5000")
    assert names(shown) == [f"d{n}" for n in range(999, 974, -1)]
    assert sum(bodies) == 25
    shown = await page(reader, f"dead?{JOBS[6:]}&offset=5990")
    assert names(shown) == [f"d{n}" for n in range(9, -1, -1)]


def failing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int) -> None:
    """Let one call of a method fail: the reply is lost, after the server did the work."""
    real, calls = getattr(where, name), count()

    async def call(self: Any, *args: Any, **more: Any) -> Any:
        reply = await real(self, *args, **more)
        if next(calls) == at:
            raise OutcomeUnknown("the reply was lost")
        return reply

    monkeypatch.setattr(where, name, call)


async def test_an_error_ends_no_reading_half_way(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def slow(*_: Any) -> list[None]:
        await may_end.wait()
        return [None]

    async def refused(*_: Any) -> list[None]:
        raise OutcomeUnknown("the reply was lost")

    monkeypatch.setattr(ReliableStore, "get_many", slow)
    monkeypatch.setattr(ReliableStore, "expiries", refused)
    source = ReliableSource(client.session, "jobs")
    reading = asyncio.ensure_future(source.find_live([MessageRef(b"m0")]))
    # What went on would read what the next action changes.
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    may_end.set()
    with pytest.raises(OutcomeUnknown):
        await reading


@pytest.mark.parametrize(
    ("address", "store", "at", "left"),
    [
        (JOBS, ReliableStore, 0, 240),
        (JOBS, ReliableStore, 1, 230),
        # Ten calls at once.
        (ORDERS, DelayedStore, 0, 240),
        (ORDERS, DelayedStore, 120, 120),
    ],
)
async def test_an_action_that_fails_half_way_can_be_undone(
    client: Client,
    admin: Browser,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    store: Any,
    at: int,
    left: int,
) -> None:
    there = await many_in_both(client)
    failing(monkeypatch, store, "cancel", at)
    shown = await select(admin, address, "cancel_many", all="1")
    assert "changed, and perhaps more: the server failed in between." in texts(shown)
    assert len(await there(address)) == left
    monkeypatch.undo()
    assert "messages are " in (after := await undo(admin, shown))
    assert "could not" not in after
    assert await there(address) == [*range(250)]


@pytest.mark.parametrize(
    ("do", "name", "changed"),
    [("bury_selected", "bury_waiting", "dead"), ("run_now", "reschedule", "ready")],
)
async def test_an_action_that_fails_in_one_partition_can_be_undone_in_the_others(
    client: Client,
    admin: Browser,
    monkeypatch: pytest.MonkeyPatch,
    do: str,
    name: str,
    changed: str,
) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(8)])
    for message in await claim_all(jobs):
        await message.nack(3000, error="LookupError: gone")
    # In the second partition.
    failing(monkeypatch, ReliableStore, name, 1)
    shown = await select(admin, RETRIES, do, *range(8))
    assert "changed, and perhaps more: the server failed in between." in texts(shown)
    assert getattr(await jobs.stats(), changed) == 8
    monkeypatch.undo()
    await undo(admin, shown)
    assert 0 < getattr(await jobs.stats(), changed) < 8


@pytest.mark.parametrize("partitions", [None, 3])
async def test_messages_are_run_now_and_set_back(
    client: Client, admin: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions, lease=3600)
    await jobs.offer_many([Offer(n, delay=3000 + 100 * n, id=f"m{n}") for n in range(4)])
    before = await known(jobs, about)
    shown = await select(admin, JOBS, "run_now", 1, 2)
    assert "2 messages rescheduled." in texts(shown)
    assert {message.id for message in await jobs.list("ready")} == {"m1", "m2"}
    assert "2 messages are as before." in await undo(admin, shown)
    assert await known(jobs) == before
    shown = await select(admin, JOBS, "run_now", all="1")
    assert (await jobs.stats()).ready == 4
    assert await jobs.claim()
    assert "3 messages are as before. The others could not" in await undo(admin, shown)
    # The running one is cancelled.
    shown = await select(admin, f"{JOBS}&state=leased", "cancel_many", 0)
    assert "1 message cancelled." in texts(shown)
    assert (await jobs.stats()).leased == 0
    assert "1 message is restored, with all attempts." in await undo(admin, shown)
    assert (await jobs.stats()).ready == 1


@pytest.mark.parametrize("do", ["run_now", "reschedule_many"])
async def test_another_message_is_not_set_back(client: Client, admin: Browser, do: str) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many([Offer(n, delay=3000, id=f"m{n}") for n in range(3)])
    shown = await select(admin, JOBS, do, all="1", delay="2", unit="days")
    for gone in ("m0", "m1"):
        assert await jobs.cancel(gone)
    await jobs.offer("new", 600, id="m1")
    assert "1 message is as before. The others could not" in await undo(admin, shown)
    due = {message.id: message.due_at for message in await jobs.list("delayed")}
    assert {*due} == {"m1", "m2"}
    assert 0 < (due["m1"] - await client.server_time()).total_seconds() <= 600


async def test_a_delayed_queue_has_the_same_actions(client: Client, admin: Browser) -> None:
    orders = client.delayed_queue("orders")
    await orders.offer_many([("a", 3000), ("b", 4000), ("c", 5000)])

    async def there() -> list[Any]:
        entries = await orders.pending.entries()
        return [(value, due_at.timestamp()) for value, due_at in entries]

    before = [(value, about(due_at)) for value, due_at in await there()]
    shown = await select(admin, ORDERS, "cancel_many", 0, 2)
    assert "2 messages cancelled." in texts(shown)
    assert [value for value, _ in await there()] == ["b"]
    assert "2 messages are as before." in await undo(admin, shown)
    assert await there() == before
    shown = await select(admin, ORDERS, "reschedule_many", all="1", delay="9", unit="hours")
    assert "3 messages rescheduled." in texts(shown)
    assert all(due_at > time.time() + 8 * 3600 for _, due_at in await there())
    assert "3 messages are as before." in await undo(admin, shown)
    assert await there() == before
    await select(admin, ORDERS, "run_now", 1)
    assert await orders.poll(5.0) == "b"


async def test_no_more_is_cancelled_than_an_undo_brings_back(
    client: Client, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.changes.MOST_BYTES", 40_000)
    jobs = client.reliable_queue("jobs")
    await jobs.offer_many([Offer(n, delay=3000, id=f"m{n}") for n in range(60)])
    shown = await select(admin, JOBS, "cancel_many", all="1")
    assert "messages cancelled, and not the others" in texts(shown)
    assert 20 < (await jobs.stats()).delayed < 30
    await undo(admin, shown)
    assert (await jobs.stats()).delayed == 60


async def test_an_action_on_a_state_is_bounded(
    client: Client, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.changes.MAX_MESSAGES", 25)
    for partitions in (None, 3):
        jobs = client.reliable_queue(f"jobs{partitions or ''}", partitions=partitions)
        await jobs.offer_many([Offer(n, delay=3000, id=f"m{n}") for n in range(40)])
        address = f"queue?kind=reliable&name={jobs.name}"
        shown = texts(await page(admin, address))
        assert "25 of 40 delayed messages" in shown
        assert ("The first 25" in shown) == (partitions is None)
        shown = await select(admin, address, "cancel_many", all="1")
        assert "25 messages cancelled." in texts(shown)
        assert (await jobs.stats()).delayed == 15


# Groups and limits


def form_about(shown: str, what: str, name: str) -> dict[str, str]:
    """Return the form about one group or one schedule."""
    assert f'name="{what}" value="{quote(name)}"' in shown
    return form(shown) | {what: quote(name)}


GROUPS = "groups?kind=reliable&name=jobs"


async def test_a_group_is_limited_paused_and_resumed(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs")
    name = "tenant/é 1"
    await jobs.offer_many([Offer(1, group=name), Offer(2, delay=3600, group=name)])
    shown = await page(admin, GROUPS)
    # Running, ready, and for how long the oldest of these has been due; and not due.
    assert re.search(rf"{name} 0 1 [\d.]+ m?s 1 ", texts(shown))
    assert "<button name" not in shown
    (link,) = [link for link in links(shown, "groups") if "q=" in link]
    shown = await page(admin, link)
    assert ">Unset" not in shown
    fields = form_about(shown, "group", name)
    shown = await send(admin, fields | {"do": "limit_group", "limit": "5,100/10m"})
    assert 'value="5,100/600s"' in shown
    assert (await jobs.groups.get(name)).limit == Limit(5, 100, 600)
    shown = await send(admin, fields | {"do": "limit_group", "limit": "five"}, 400)
    assert shown.count("must be how many run at a time") == 1
    assert 'value="five"' in shown
    assert (await jobs.groups.get(name)).limit == Limit(5, 100, 600)
    assert ">Unset" in shown
    shown = await send(admin, fields | {"do": "limit_group", "limit": "none"})
    assert "Nothing limits this group now" in texts(shown)
    shown = await send(admin, fields | {"do": "clear_limit"})
    assert "The queue's group limit applies again" in html.unescape(texts(shown))
    assert (await jobs.groups.get(name)).limit is None
    assert "paused" in texts(await send(admin, fields | {"do": "pause_group"}))
    assert (await jobs.groups.get(name)).paused
    await send(admin, fields | {"do": "resume_group"})
    assert not (await jobs.groups.get(name)).paused
    assert "the group is not paused" in await send(admin, fields | {"do": "resume_group"})
    # One that has no messages.
    new = form_about(await page(admin, f"{GROUPS}&q=later"), "group", "later")
    await send(admin, new | {"do": "limit_group", "limit": "ordered"})
    assert (await jobs.groups.get("later")).limit == Limit(ordered=True)
    assert "512 bytes" in await page(admin, f"{GROUPS}&q={'g' * 600}")


async def test_many_groups_have_pages(client: Client, reader: Browser) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    await jobs.offer_many([Offer(n, group=f"g{n:03}") for n in range(120)])
    seen = await on_all_pages(reader, GROUPS, r"<bdi>(g\d+)</bdi>")
    assert seen == [f"g{n:03}" for n in range(120)]
    assert "Group g007 " in texts(await page(reader, f"{GROUPS}&q=g007"))


# Batches

BATCHES = "batches?kind=reliable&name=jobs"


async def test_a_batch_is_shown_and_cancelled(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", lease=60)
    batch = await jobs.offer_batch([Offer(n) for n in range(5)])
    await (await jobs.claim())[0].ack()
    await (await jobs.claim())[0].bury("no such customer")
    (running,) = await jobs.claim()
    shown = texts(await page(admin, BATCHES))
    assert batch.id in shown
    # Waiting, running, handled, dead, cancelled.
    assert "2 of 5 2 1 1 1 0" in shown
    shown = await page(admin, links(await page(admin, BATCHES), "batches?")[-1])
    assert "Cancel the batch" in texts(shown)
    fields = form(shown) | {"do": "cancel_batch", "batch": batch.id}
    shown = texts(await send(admin, fields))
    assert "2 messages of the batch cancelled." in shown
    assert "4 of 5 0 1 1 1 2" in shown
    shown = texts(await send(admin, fields | {"running": "1"}))
    assert "1 message of the batch cancelled." in shown
    assert "5 of 5 0 0 1 1 3" in shown
    assert "Cancel the batch" not in shown
    with pytest.raises(LeaseLost):
        await running.ack()
    await send(admin, fields | {"batch": "1"})


async def test_a_message_leads_to_its_batch(client: Client, reader: Browser) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer(0)
    assert "There are no batches." in texts(await page(reader, BATCHES))
    batch = await jobs.offer_batch([Offer(1, id="one")])
    shown = await page(reader, "message?kind=reliable&name=jobs&at=//one")
    assert links(shown, "batches?")[-1] == f"batches?kind=reliable&name=jobs&q={batch.id}"
    unknown = texts(await page(reader, f"{BATCHES}&q=12"))
    assert "no batch" in unknown


# Schedules


SCHEDULES = "schedules?kind=reliable&name=jobs"


@pytest.mark.parametrize("partitions", [None, 3])
async def test_a_schedule_is_run_now_and_set_back(
    client: Client, admin: Browser, partitions: int | None
) -> None:
    jobs = client.reliable_queue("jobs", partitions=partitions)
    next_at = await jobs.schedule("often/é", every=3600, value=1)
    fields = form_about(await page(admin, SCHEDULES), "schedule", "often/é")
    shown = await send(admin, fields | {"do": "run_schedule"})
    assert "The next run is due now." in shown
    assert (await jobs.stats()).ready == 1
    before = await client.server_time()
    assert "1 message is as before." in await undo(admin, shown)
    took = await client.server_time() - before
    (waiting,) = await jobs.list("delayed")
    assert abs(waiting.due_at - next_at) <= took
    await send(admin, fields | {"do": "run_schedule"})
    (message,) = await jobs.claim()
    assert "a worker has its message" not in await send(admin, fields | {"do": "run_schedule"})
    await message.ack()
    # It does not come a second time.
    (schedule,) = await jobs.schedules()
    assert schedule.next_at is not None
    assert schedule.next_at > next_at


async def test_a_schedule_is_paused_resumed_and_removed(
    client: Client, raw: Any, admin: Browser
) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer("another", 3600)
    next_at = await jobs.schedule("often", every=3600, value=1)
    await raw.hset(ReliableKeys.of("jobs").schedules, "broken", "{}")
    shown = await page(admin, SCHEDULES)
    assert f"{next_at:%Y-%m-%d %H:%M:%S}" in shown
    assert "broken The record of this schedule cannot be read." in texts(shown)
    await raw.hdel(ReliableKeys.of("jobs").schedules, "broken")
    fields = form_about(shown, "schedule", "often")
    for do, notice, delayed in (
        ("pause_schedule", "Schedule paused.", 1),
        ("resume_schedule", "Schedule resumed.", 2),
        ("unschedule", "Schedule removed.", 1),
    ):
        assert notice in await send(admin, fields | {"do": do})
        assert (await jobs.stats()).delayed == delayed
    assert await jobs.schedules() == []
    for do in ("pause_schedule", "resume_schedule", "unschedule", "run_schedule"):
        assert "there is no such schedule" in await send(admin, fields | {"do": do})


async def test_the_schedules_of_all_queues_are_listed(client: Client, admin: Browser) -> None:
    for queue, every in (("jobs", 7200), ("mails", 3600)):
        await client.reliable_queue(queue).schedule("often", every=every, value=1)
    shown = await page(admin, "all-schedules?q=OFTEN")
    assert re.search("often mails every 1 h .* never .* often jobs every 2 h ", texts(shown))
    fields = form(shown, "back", "schedule") | {"do": "pause_schedule"}
    # The page stays, with what was searched for.
    shown = await send(admin, fields)
    assert "Schedule paused." in shown
    assert 'value="OFTEN"' in shown
    assert re.search("often jobs .* often mails every 1 h paused", texts(shown))
    assert "No schedule or queue has" in await page(admin, "all-schedules?q=rarely")


# A message's timeline


def events(shown: str) -> list[str]:
    """Return the entries of the timeline on a page."""
    (timeline,) = re.findall(r'<ol class="timeline">(.*?)</ol>', shown, re.DOTALL)
    return [texts(each) for each in re.findall(r"<li.*?</li>", timeline, re.DOTALL)]


async def test_a_timeline_has_each_recorded_attempt(client: Client, reader: Browser) -> None:
    jobs = client.reliable_queue("jobs", partitions=3, lease=3600, keep=3600)
    await jobs.offer("x", id="one", ttl=7200)
    for error in ("ValueError: first", "Traceback\n  line\nLookupError: second"):
        await (await jobs.claim())[0].nack(0, error=error)
    address = links(await page(reader, f"{JOBS}&state=ready"), "message?")[0]
    offered, first, second, *_ = found = events(await page(reader, address))
    assert offered.startswith("Offered ")
    assert re.match(r"Attempt 1 .* UTC took [\d.]+ m?s on \S+:\d+ ValueError: first$", first)
    assert re.match(r"Attempt 2 .* LookupError: second Traceback line LookupError: second$", second)
    assert any(each.startswith("Due ") for each in found)
    assert re.match("Expires in 1 h 59 min .* still to come", found[-1])
    await jobs.claim()
    found = events(await page(reader, address))
    assert "Attempt 3 is running A worker has the message." in found
    assert any(each.startswith("Lease ends in 59 min") for each in found)


# New messages


def new_message(shown: str, **more: str) -> dict[str, str]:
    names = re.findall(r'name="(\w+)"', shown[shown.index('id="payload"') :])
    return form(shown) | dict.fromkeys(names, "") | {"do": "enqueue", "format": "JSON"} | more


ENQUEUE = "enqueue?kind=reliable&name=jobs"


async def test_a_message_is_added_with_all_options(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", partitions=3)
    await jobs.offer(0, 3600)
    options = {"payload": '{"to":\r\n "é"}', "id": "mine", "group": "g 1", "priority": "7"}
    options |= {"delay": "2", "unit": "hours", "ttl": "3", "ttl_unit": "days", "max_attempts": "4"}
    shown = await page(admin, ENQUEUE)
    fields = new_message(shown, headers="trace=a=b\r\n tenant=é", **options)
    shown = texts(await send(admin, fields))
    for detail in ("mine delayed", "Expires in 2 d 23 h", "Due in 1 h 59 min", "Max attempts 4"):
        assert detail in shown
    message = await jobs.get("mine")
    assert message is not None
    assert (message.value, message.group, message.priority) == ({"to": "é"}, "g 1", 7)
    assert message.headers == {"trace": "a=b", "tenant": "é"}
    assert "This id is taken" in await send(admin, fields, 400)
    orders = client.delayed_queue("orders")
    await orders.offer(0, 7200)
    fields = new_message(await page(admin, "enqueue?kind=delayed&name=orders"), payload='{"n": 1}')
    assert "Due in 59 min" in texts(await send(admin, fields | {"delay": "1", "unit": "hours"}))
    fields |= {"at_time": "2099-01-31T12:00+05:00"}
    assert "2099-01-31 07:00:00" in await send(admin, fields)
    assert [value for value, _ in await orders.pending.entries()] == [{"n": 1}, 0, {"n": 1}]


async def test_a_wrong_message_is_told_beside_the_field(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", max_size=1)
    await jobs.offer(0, 3600)
    fields = new_message(await page(admin, ENQUEUE), payload="[1]", unit="seconds")
    cases: tuple[tuple[dict[str, str], str], ...] = (
        ({"payload": "{"}, "payload"),
        ({"delay": "soon"}, "delay"),
        ({"delay": "-1", "unit": "days"}, "delay"),
        ({"at_time": "0001-01-01T00:00+05:00"}, "at"),
        ({"id": "x" * 600}, "id"),
        ({"priority": "10"}, "priority"),
        ({"headers": "no value"}, "headers"),
        ({"ttl": "-1", "ttl_unit": "days"}, "ttl"),
        ({"ttl": "1", "ttl_unit": "hours", "delay": "7200"}, "ttl"),
        ({"max_attempts": "0"}, "max_attempts"),
    )
    for more, wrong in cases:
        assert f'id="wrong_{wrong}"' in await send(admin, fields | more, 400), more
    shown = html.unescape(await send(admin, fields | {"payload": '"kept"'}, 400))
    assert "The queue is full" in shown
    assert '"kept"' in shown
    assert (await jobs.stats()).delayed == 1


async def test_a_payload_may_be_as_large_as_other_offers(one: Jobs, admin: Browser) -> None:
    shown = await page(admin, ENQUEUE)
    fields = new_message(shown, format="text", delay="3600", unit="seconds")
    # The longest when encoded.
    answer = await admin.post("act", data=fields | {"payload": "\r\n" * MAX_PAYLOAD})
    assert answer.status_code == 303
    said = await send(admin, fields | {"payload": "{" * (MAX_PAYLOAD + 1)}, 400)
    assert "The payload is too large: the encoded value has 524289 bytes" in said
    assert 'id="wrong_payload"' in said
    await send(admin, fields | {"payload": "{" * 2**21}, 413)
    assert (await one.stats()).delayed == 2


# Purging


@pytest.mark.parametrize("kind", ["reliable", "delayed"])
async def test_a_queue_is_purged_by_its_name(client: Client, admin: Browser, kind: str) -> None:
    queue: Any = getattr(client, f"{kind}_queue")("jobs")
    await queue.offer_many(
        [(1, 3600), (2, 3600)] if kind == "delayed" else [Offer(1, delay=3600)] * 2
    )
    fields = form(await page(admin, f"purge?kind={kind}&name=jobs")) | {"do": "purge_queue"}
    for wrong in ({"typed": "job", "state": "all"}, {"typed": "jobs", "state": ""}, {}):
        assert "Delayed: 2" in await send(admin, fields | wrong, 400)
    for state, dropped in (("ready", 0), ("all", 2)):
        shown = texts(await send(admin, fields | {"typed": " jobs", "state": state}))
        assert f"{dropped} messages dropped. This cannot be undone." in shown
    assert "Delayed 0 Ready 0" in shown


async def test_readers_are_offered_no_action(client: Client, reader: Browser) -> None:
    jobs = await dead_of_all_kinds(client)
    await jobs.offer("x", 3600, id="one", group="g")
    await jobs.schedule("often", every=3600, value=1)
    for address in (
        *("/", JOBS, ONE, f"dead?{JOBS[6:]}", LETTERS, f"{LETTERS}&error=timeout"),
        *(GROUPS, SCHEDULES),
    ):
        shown = await page(reader, address)
        assert '<form method="post"' not in shown, address
        for offered in ("checkbox", "New message", "Purge", "Change settings"):
            assert offered not in shown, address
    for address in (ENQUEUE, f"purge?{JOBS[6:]}", SETTINGS):
        shown = await page(reader, address)
        assert "Log in as an operator" in shown
        assert '<form method="post"' not in shown
    fields = {
        "kind": "reliable",
        "name": "jobs",
        "form_token": "0" * 64,
        "sure": "1",
        "at": "//one",
    }
    for page_of in PAGES:
        for do in page_of.actions:
            await send(reader, fields | {"do": do}, 403)
    assert (await reader.post("login", data={"token": ""})).status_code == 403
    stats = await jobs.stats()
    assert (stats.delayed, stats.dead, stats.paused) == (2, 6, False)
    await client.delayed_queue("orders").offer(1, 3600)
    await page(reader, "groups?kind=delayed&name=orders", 404)


# History and workers


HISTORY = "history?kind=reliable&name=jobs"
HOSTILE = "<script>alert(1)</script>"
KEYS = ReliableKeys.of("jobs")
reports = pytest.mark.usefixtures("_last_reports_arrive")


def path_of(shown: str, mark: str) -> str:
    """Return the longest path of a mark: legends have short ones."""
    paths: list[str] = re.findall(rf'<path class="mark {mark}" d="([^"]*)"', shown)
    return max(paths, key=len)


async def test_the_history_is_drawn_with_gaps_and_written_as_a_table(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    # That is not reported.
    await client.reliable_queue("jobs").pause()
    assert "Nothing happened in this period" in texts(await page(reader, HISTORY))
    now = int(time.time())
    for ago, counts in ((30, "o=1200 h=900 f=90 d=10 l10=1 t20=1"), (28, "o=7 h=7 e=3 l12=1")):
        minute = now // 60 - ago
        server.call("HSET", KEYS.history, f"m{minute % 1440}", f"{minute} {counts}")
    hour = now // 3600
    counts = "o=1207 h=907 f=90 d=10 e=3"
    server.call("HSET", KEYS.history, f"h{hour % 720}", f"{hour} {counts}")
    for span in ("month", "week", "day", "hour"):
        shown = await page(reader, f"{HISTORY}&span={span}")
        legend = "Offered 1,207 Handled 907 Failed attempts 90 Dead 10 Expired 3"
        assert legend in texts(shown), span
        assert not re.search(r"style=|\son\w+=|<script>", shown)
    assert "9.9 % of all attempts failed." in texts(shown)
    table = texts(shown[shown.index("<table") :])
    assert "UTC 1,200 900 90 10 0 2.7 ms 2.7 ms 86 ms 86 ms" in table
    assert table.count("UTC – – – – – – – – –") >= 56  # noqa: RUF001
    # A bar for each of the two minutes, and lines with a gap in between.
    marks = ("handled", "failed", "dead", "expired", "offered", "p50", "recorded")
    assert [path_of(shown, mark).count("M") for mark in marks] == [2, 1, 1, 1, 2, 2, 2]
    # The axis goes from 1,500 down to 0, and the larger bar ends at 900.
    ticks = re.findall(r'<text x="44" y="([\d.]+)" dy=".35em">([\d,]+)<', shown)
    at = {label: float(y) for y, label in reversed(ticks[:5])}
    top = float(path_of(shown, "handled").split()[1].partition("h")[0])
    assert (at["0"] - top) / (at["0"] - at["1,000"]) == pytest.approx(0.9, abs=0.01)
    server.call("HSET", KEYS.history, f"m{minute % 1440}", f"{minute} f=300000")
    assert "100 % of all attempts failed." in texts(await page(reader, HISTORY))


@reports
async def test_the_start_page_names_a_wave_of_failures_and_its_cause(
    server: PrivateServer, reader: Browser
) -> None:
    async with connect(server.url) as other:
        await other.reliable_queue("calm").offer_many([Offer(1), Offer(2, delay=600)])
        jobs = other.reliable_queue("jobs")
        await jobs.offer_many([Offer(i) for i in range(40)])
        for number, message in enumerate(await jobs.claim(40)):
            if number < 10:
                await message.ack()
            else:
                error = "KeyError: 'id'" if number % 3 == 0 else "ConnectionError: refused"
                await message.nack(600, error=error)
        wrong = other.reliable_queue("wrong")
        await wrong.offer("before the wave")
        await (await wrong.claim())[0].nack(600, error="TimeoutError: slow")
        await wrong.offer_many([Offer(i) for i in range(20)])
        for message in await wrong.claim(20):
            await message.bury("rejected", "ValueError: no such plan")
    shown = texts(await page(reader, "/"))
    for expected in (
        r"2 failing .* jobs reliable failing 1?\d retries a minute: ConnectionError 30 ",
        (
            r"10 handled 30 failed ≤ [\d.]+ m?s late wrong reliable failing dead letters 1?\d dead"
            r" letters a minute: ValueError 1 .* calm reliable working"
        ),
    ):
        assert re.search(expected, shown), shown
    assert "failing" in texts(await page(reader, JOBS))


async def test_a_queue_that_is_held_back_is_not_without_consumers(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.admin.states.LATE", 0)
    jobs = client.reliable_queue("jobs")
    await jobs.groups.pause("acme")
    await jobs.offer(1, group="acme")
    await client.reliable_queue("alone").offer(1)
    shown = texts(await page(reader, ""))
    assert "1 no consumers 1 late" in shown
    assert "jobs reliable late group 'acme', with 1 ready, is paused" in shown
    assert "no consumers" not in await page(reader, JOBS)


async def test_the_start_page_follows_the_last_minutes_of_each_hour(
    server: PrivateServer, client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.live._MINUTES_COUNT_FOR", 0)
    await client.reliable_queue("jobs").pause()

    def remember(minute: int, handled: int) -> None:
        server.call("HSET", KEYS.history, f"m{minute % 1440}", f"{minute} h={handled} l59=1")

    now = int(time.time()) // 60
    remember(now - 50, 100)
    for handled in (7, 9):
        remember(now, handled)
        shown = await page(reader, "/")
        assert f"{100 + handled} handled 0 failed ≤ " in texts(shown)
        assert "paused for " in texts(shown)
        assert path_of(shown, "handled").count("M") == 2


@reports
@pytest.mark.usefixtures("_workers_stay_listed")
async def test_workers_are_listed_with_their_messages(
    server: PrivateServer, client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(server.url, resync_interval=0.05) as theirs:
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
                assert "silent" not in shown
                assert "a payload" not in shown
                assert "<script>alert" not in shown
                (link,) = links(shown, "message")
                assert "a payload" in await page(reader, link)
            # One that cannot be read hides no other.
            for address in ("workers", "workers?kind=reliable&name=bad"):
                assert refused in texts(await page(reader, address))
            other = texts(await page(reader, "workers?kind=reliable&name=idle"))
            assert "No process works on this queue" in other
            monkeypatch.setattr("delayq.stats._SILENT_AFTER", 0)
            assert "silent for" in await page(reader, "workers")
        # A queue that only has workers is shown.
        assert "jobs reliable, 2 partitions empty 0 0 0 0" in texts(await page(reader, "/"))
        # Where the queue is not shown, neither are its workers.
        async with browse(dashboard(client, queues=["reliable:other"])) as browser:
            assert "jobs" not in await page(browser, "workers")
    server.call("DEL", ReliableKeys.of("bad").workers)
    assert "No process works on a reliable queue" in await page(reader, "workers")


async def test_a_page_of_many_workers_shows_the_first_ones(
    client: Client, reader: Browser, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.server._MAX_SHOWN", 3)
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
