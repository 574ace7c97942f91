"""The dashboard, as seen by a browser without scripts."""

from __future__ import annotations

import asyncio
import gc
import html
import json
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import delayq
from delayq import Offer
from delayq._dashboard import live, rendering, security
from delayq._dashboard.queues import Queues
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import acl_rules
from delayq.admin.catalog import find_queues
from tests.integration.test_acl import granted
from tests.support.board import (
    HOST,
    JOBS,
    ONE,
    ORDERS,
    SETTINGS,
    TOKEN,
    _templates_are_compiled_once,
    act,
    browse,
    field,
    fill_with_letters,
    form,
    form_token,
    links,
    log_in,
    one,
    page,
    send,
    texts,
)
from tests.support.browser import AGE, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from httpx import AsyncClient as Browser
    from starlette.requests import HTTPConnection

    from delayq import Client
    from tests.support.servers import PrivateServer

    Jobs = delayq.ReliableQueue[Any]

__all__ = ["_templates_are_compiled_once", "one"]
pytestmark = pytest.mark.usefixtures("_full_batches")

DEAD = "dead?kind=reliable&name=jobs"
RETRIES = "retries?kind=reliable&name=jobs"
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
CANCEL_ONE = {"kind": "reliable", "name": "jobs", "at": "//one", "do": "cancel"}


async def bury(queue: Jobs, count: int = 1) -> None:
    await queue.offer_many([Offer(i, id=f"dead-{i}") for i in range(count)])
    for message in await queue.claim(count):
        await message.bury("no such customer", "Traceback\nLookupError: 42")


# Reading


FIGURE = re.compile(r'class="figure" href="([^"]+)">(\d+)<')


async def test_the_overview_shows_queues_of_every_kind(
    client: Client, reader: Browser, raw: Any
) -> None:
    await client.delayed_queue("orders").offer_many([(i, 60) for i in range(3)])
    jobs = client.reliable_queue("jobs", lease=60)
    await jobs.offer(1, 3600)
    await jobs.offer_many([Offer(i) for i in range(3)])
    await jobs.claim()
    await jobs.pause()
    parts = client.reliable_queue("parts", partitions=4)
    await parts.offer_many([Offer(i, delay=3600) for i in range(40)])
    shown = await page(reader, "/")
    assert re.search(r"jobs reliable paused for \S+ m?s 1 2 1 0 \S+ m?s ago", texts(shown))
    assert "orders delayed waiting 3 0 0 0" in texts(shown)
    assert "parts reliable, 4 partitions waiting 40 0 0 0" in texts(shown)
    assert "All 3 queues 44 2 1 0" in texts(shown)
    assert queues_of(await page(reader, "/?q=OR")) == ["orders"]
    # Each figure leads to its messages, 25 on a page.
    for address, count in FIGURE.findall(shown):
        rows = (await page(reader, html.unescape(address))).count("<tr data-key=")
        assert rows == min(int(count), 25), address
    # Looking takes no part: other clients transfer what is due.
    await raw.zadd(DelayedKeys.of("due").timeout, {pack(b"12345678", b"1", 8): 1000})
    assert "ago" in texts(await page(reader, "queue?kind=delayed&name=due"))
    assert await raw.zcard(DelayedKeys.of("due").timeout) == 1


def queues_of(shown: str) -> list[str]:
    return re.findall(r'<tr data-key="\w+ ([^"]+)">', shown)


async def test_queues_in_trouble_are_listed_first(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    await client.reliable_queue("a-working-one").offer(1)
    paused = client.reliable_queue("c-paused-one")
    await paused.offer(1, 3600)
    await paused.pause()
    await bury(client.reliable_queue("d-dead-letters"), 2)
    for name, number in (("e-late-one", 3), ("f-unattended-one", 5)):
        await client.reliable_queue(name, lease=60).offer_many([Offer(i) for i in range(number)])
        server.call("EVAL", AGE, "1", ReliableKeys.of(name).waiting[0], "100000000")
    await client.reliable_queue("e-late-one").claim()
    server.call("SET", ReliableKeys.of("z-bad").dead, "x")
    shown = await page(reader, "/")
    by_trouble = ["z-bad", "f-unattended-one", "e-late-one", "d-dead-letters"]
    by_trouble += ["c-paused-one", "a-working-one"]
    assert queues_of(shown) == by_trouble
    # One that cannot be read hides no other.
    refused = "reliable unreadable one of the queue's keys holds a value of the wrong type"
    assert refused in texts(shown)
    await page(reader, "queue?kind=reliable&name=z-bad", 502)
    # Columns are sorted by the server.
    by_ready = queues_of(await page(reader, "/?sort=ready"))
    assert by_ready[:3] == ["f-unattended-one", "e-late-one", "a-working-one"]
    by_name = queues_of(await page(reader, "/?sort=name&order=reversed"))
    assert by_name == sorted(by_name, reverse=True)
    assert queues_of(await page(reader, "/?sort=nonsense")) == by_trouble
    # Each kind of trouble leads to the queues that it counts.
    (address,) = (link for link in links(shown, "./?state=") if "consumers" in link)
    assert queues_of(await page(reader, address)) == ["f-unattended-one"]


async def test_the_dashboard_counts_only_the_queues_of_one_page(
    client: Client, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.overview._MAX_RANKED", 3)
    monkeypatch.setattr("delayq._dashboard.pages.overview._PER_PAGE", 2)
    for name in "dcba":
        await client.reliable_queue(name).offer(1)
    shown = await page(reader, "/?sort=ready")
    assert queues_of(shown) == ["a", "b"]
    assert "The 2 queues of this page 0 2 0 0" in texts(shown)
    assert "1–2 of 4" in texts(shown)  # noqa: RUF001
    assert "aria-sort" in shown
    assert "./?sort=" not in shown


async def test_a_queue_has_counts_due_times_and_lists(client: Client, reader: Browser) -> None:
    jobs = client.reliable_queue("jobs", lease=60, partitions=2)
    delays = (30, 40, 7200, 200_000, 0, 0)
    await jobs.offer_many([Offer({"n": delay}, delay=delay) for delay in delays])
    await jobs.offer_many([Offer(n, delay=30, group=f"g{n}") for n in range(3)])
    await jobs.offer_many([Offer(n, delay=1800, priority=n) for n in range(4)])
    (held,) = await jobs.claim()
    shown = texts(await page(reader, JOBS))
    assert "Delayed 11 Ready 1 Leased 1 Dead letters 0" in shown
    # The end of a lease does not count as a due time.
    assert "next minute 5 next hour 4 next day 1 later 1" in shown
    assert '{"n":30}' in shown
    assert held.id in await page(reader, f"{JOBS}&state=leased")
    assert '{"n":0}' in texts(await page(reader, f"{JOBS}&state=ready"))


async def test_all_states_of_a_delayed_queue(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    async with client.delayed_queue("orders") as orders:
        receipt = await orders.offer({"order": 42}, 90)
    keys = DelayedKeys.of("orders")
    server.call("RPUSH", keys.ready, '{"order": 1}')
    server.call("RPUSH", keys.quarantine, "no record")
    server.call("ZADD", keys.leases, "9e12", "t")
    server.call("HSET", keys.leased, "t", '{"order": 2}')
    shown = await page(reader, ORDERS)
    assert "Delayed 1 Ready 1 Leased 1 Unreadable 1" in texts(shown)
    shown_in = {"ready": '{"order": 1}', "leased": '{"order": 2}', "unreadable": "no record"}
    for state, text in shown_in.items():
        assert text in texts(await page(reader, f"{ORDERS}&state={state}"))
    (address,) = links(shown, "message?")
    message = texts(await page(reader, address))
    assert '{ "order": 42 }' in message
    assert receipt.id in message


async def test_a_message_of_many_that_are_due_at_once_is_found(raw: Any, admin: Browser) -> None:
    timeout = DelayedKeys.of("orders").timeout
    records = {pack(n.to_bytes(8, "big"), b"%d" % n, 8): 4e12 for n in range(500)}
    await raw.zadd(timeout, records)
    shown = await page(admin, f"{ORDERS}&offset=475")
    for address, number in zip(links(shown, "message?"), range(475, 500), strict=True):
        assert f">{number}</pre>" in await page(admin, address)
    assert "Message cancelled" in texts(await act(admin, links(shown, "message?")[7], "cancel"))
    left = await raw.zrange(timeout, 0, -1)
    assert {int(each[17:]) for each in left} == {*range(500)} - {482}


async def test_every_text_on_a_page_is_escaped(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    jobs = client.reliable_queue(HOSTILE)
    await jobs.offer(HOSTILE, 3600, id=HOSTILE, headers={HOSTILE: HOSTILE})
    await jobs.offer(HOSTILE, id="dies")
    await (await jobs.claim())[0].bury(HOSTILE, HOSTILE)
    await jobs.offer(HOSTILE, id="fails")
    await (await jobs.claim())[0].nack(600, error=HOSTILE)
    orders = client.delayed_queue(HOSTILE)
    await orders.offer(HOSTILE, 3600)
    await orders.aclose()
    server.call("RPUSH", DelayedKeys.of(HOSTILE).quarantine, HOSTILE)
    seen: set[str] = set()
    waiting = ["/"]
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        shown = await page(reader, address)
        # The only script is the dashboard's own, and no foreign text starts an element.
        assert re.findall(r"<script[^>]*>", shown) == ['<script src="static/board.js" defer>']
        assert "<img src=x" not in shown
        assert not re.search(r"\son\w+=|style=|javascript:", re.sub(r"&[^;]+;[^<]*", "", shown))
        kinds = ("queue?", "message?", "dead?", "retries?", "all-")
        waiting += [link for kind in kinds for link in links(shown, kind)]
    # Wherever the visitor has come from.
    messages = {each.partition("&back=")[0] for each in seen if each.startswith("message?")}
    assert len(messages) == 4
    assert "&lt;script&gt;" in await page(reader, "/?q=" + "%3Cscript%3E")


def test_any_payload_can_be_shown() -> None:
    for payload, shown in (
        (b"\xff\x00\x01abc", "000000  ff 00 01 61 62 63"),
        (b"plain text", "plain text"),
        (b"a\x1b[31mb", "1b 5b"),
        (b'"\\ud800"', "\\ud800"),
        (b"[" * 100_000, "[[[["),
        (b"[" * 500 + b"]" * 500, "truncated"),
        (b"1" * 5000, "1111"),
        # Payloads too large to be parsed whole.
        (b'{"a":' * 1_000_000, '{"a":{"a":'),
        ("é".encode() * 2_000_000, "éé"),
        (b"\xff" * 5_000_000, "000000  ff ff"),
        (b"", ""),
    ):
        text, _ = rendering.pretty(payload)
        assert shown in text
        assert len(text) <= rendering.MAX_SHOWN + 20
        text.encode()
        rendering.preview(payload).encode()
    # A large payload is not read as a whole.
    assert rendering.pretty(b"[" + b"1," * 100_000 + b"1]")[1] == "JSON"
    assert rendering.pretty(b"[" + b"1," * 2_000_000 + b"1]")[1] == "text"


async def test_what_a_handler_has_saved_is_shown(client: Client, reader: Browser) -> None:
    jobs = client.reliable_queue("jobs")
    await jobs.offer(1)
    (message,) = await jobs.claim(1)
    await message.save({"row": 7})
    await message.step("charge", str, "receipt 4")
    with pytest.raises(delayq.Interrupted):
        await message.sleep(3600)
    (message,) = await jobs.list("delayed")
    for listed in (JOBS, DEAD):
        (address,) = links(await page(reader, listed), "message?")
        shown = texts(await page(reader, address))
        assert re.search(r'Sleep ends .* "row": 7 .* charge "receipt 4"', shown)
        if listed == JOBS:
            await jobs.reschedule(message.id, 0)
            await (await jobs.claim(1))[0].bury("no good")


async def test_ids_that_are_no_text_and_broken_bodies_are_shown(raw: Any, admin: Browser) -> None:
    keys = ReliableKeys.of("jobs")
    await raw.zadd(keys.waiting[0], {b"\xff/\x00": 4e15})
    await raw.hset(keys.named("bodies"), b"\xff/\x00", b"broken")
    await raw.zadd(keys.dead, {b"\xfe": 1})
    await raw.hset(keys.dead_messages, b"\xfe", b"broken")
    (address,) = links(await page(admin, JOBS), "message?")
    assert "broken" in await page(admin, address)
    assert "unreadable" in texts(await page(admin, DEAD))
    assert "Message cancelled" in await act(admin, address, "cancel")
    (address,) = links(await page(admin, DEAD), "message?")
    assert "1 dead letter dropped." in await act(admin, address, "purge")
    assert not await raw.exists(keys.waiting[0], keys.dead)


async def test_a_page_about_something_deleted_is_not_found(
    server: PrivateServer, client: Client, reader: Browser
) -> None:
    server.call("RPUSH", "secrets", "a password")
    wrong = ("queue", "queue?kind=x&name=y", "dead?kind=delayed&name=orders")
    for address in (*wrong, "queue?kind=delayed&name=secrets&state=ready"):
        assert "a password" not in await page(reader, address, 404)
    await client.delayed_queue("orders").offer(1, 3600)
    assert "Settings" not in await page(reader, ORDERS)
    await page(reader, "settings?kind=delayed&name=orders", 404)
    # Only pages with live parts can be viewed live.
    await page(reader, "events?page=search&q=x", 404)
    await page(reader, "events?page=nonsense", 404)
    await client.reliable_queue("jobs").offer(1)
    for at in ("", "//gone", "3//gone", "x", "//", "9999999//x", "/nan/x"):
        shown = await page(reader, f"message?kind=reliable&name=jobs&at={at}", 404)
        assert "no longer exists" in texts(shown), at


# Rights


async def test_wrong_tokens_of_an_address_are_answered_late_and_right_ones_never_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.pages.login.LATE", 0)
    app = delayq.dashboard(client, token=TOKEN)

    async def login_from(address: str, token: str = TOKEN) -> int:
        transport = httpx.ASGITransport(app=app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as browser:
            answer = await browser.post("/login", data={"token": token}, headers={"origin": HOST})
            # Only the right token gets a cookie.
            assert ("set-cookie" in answer.headers) == (answer.status_code == 303)
            return answer.status_code

    for wrong, guessing, other in (
        (["192.0.2.1"] * 12, "192.0.2.1", "192.0.2.2"),
        # The addresses of one IPv6 network count as one.
        ([f"2001:db8::{n:x}" for n in range(12)], "2001:db8::ff", "2001:db8:0:1::1"),
    ):
        statuses = [await login_from(address, "wrong-wrong-wrong") for address in wrong]
        assert statuses == [403] * 10 + [429] * 2
        assert await login_from(other, "wrong-wrong-wrong") == 403
        # Behind a proxy, those who guess and those who know may share an address.
        assert (await login_from(guessing), await login_from(other)) == (303, 303)
    # The addresses that are remembered are bounded.
    monkeypatch.setattr("delayq._dashboard.security._MOST_ADDRESSES", 3)
    guard = security.Guard(TOKEN)
    for place in range(50):
        guard.login_with("wrong", f"192.0.2.{place}")
    assert len(guard._wrong) == 3


async def test_live_views_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayq._dashboard.live._MOST_STREAMS", 5)
    await client.reliable_queue("jobs").offer("x", delay=50)
    monkeypatch.setattr("delayq._dashboard.live._MOST_OF_VIEWERS", 4)
    monkeypatch.setattr("delayq._dashboard.live._MOST_OF_LOGIN", 3)
    app = delayq.dashboard(client, token=TOKEN)
    viewers: list[Viewer] = []

    async def open_(count: int, cookie: str = "") -> list[int]:
        some = [Viewer(app, cookie=cookie) for _ in range(count)]
        viewers.extend(some)
        await until(lambda: all(viewer.status for viewer in some))
        return sorted(viewer.status for viewer in some)

    async with browse(app) as browser:
        cookies = []
        for _ in range(2):
            await log_in(browser)
            cookies.append(f"{security.COOKIE}={browser.cookies[security.COOKIE]}")
            browser.cookies.clear()
    for _ in range(2):
        # Those who only read leave some for operators.
        assert await open_(12) == [200] * 4 + [503] * 8
        assert await open_(2, cookies[0]) == [200, 503]
        # When the earlier views have ended, others may start; each login has a bound of its own.
        await asyncio.gather(*(viewer.leave() for viewer in viewers))
        assert await open_(5, cookies[0]) == [200] * 3 + [503] * 2
        assert await open_(5, cookies[1]) == [200] * 2 + [503] * 3
        await asyncio.gather(*(viewer.leave() for viewer in viewers))


async def test_a_cookie_is_for_this_site_and_worthless_once_changed_or_old(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = delayq.dashboard(client, token=TOKEN)
    for base, secure in ((f"{HOST}/", False), ("https://board.test/", True)):
        async with browse(app, base) as browser:
            cookie = (await browser.post("login", data={"token": TOKEN})).headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict"} <= {*re.split("; ?", cookie)}
        assert ("Secure" in cookie) == secure
        assert TOKEN not in cookie
    async with browse(app) as browser:
        await log_in(browser)
        assert "Operator" in await page(browser, "/")
        cookie = browser.cookies[security.COOKIE]
        browser.cookies.clear()

        async def counts(cookie: str) -> bool:
            header = {b"Cookie": f"{security.COOKIE}={cookie}".encode()}
            return "Operator" in (await browser.get("/", headers=header)).text

        assert await counts(cookie)
        # Not its last character: in base64, some of that one's bits mean nothing.
        changed = f"{cookie[:-5]}{'1' if cookie[-5] == '0' else '0'}{cookie[-4:]}"
        for wrong in (changed, f"9{cookie}", "", "é.x"):
            assert not await counts(wrong), wrong
        later = time.time() + 13 * 3600
        monkeypatch.setattr("delayq._dashboard.security.time.time", lambda: later)
        assert not await counts(cookie)


async def test_a_forged_form_does_nothing(one: Jobs, admin: Browser) -> None:
    right = {"form_token": form_token(await page(admin, "/"))}
    foreign = {"Origin": "https://evil.test"}
    for wrong in ({}, {"form_token": "x" * 64}, {"form_token": "é"}):
        await send(admin, CANCEL_ONE | wrong, 403)
    for origin in (foreign["Origin"], "null", "", f"{HOST}.evil.test", "http://["):
        sent = await admin.post("act", data=CANCEL_ONE | right, headers={"Origin": origin})
        assert sent.status_code == 403
    assert (await admin.post("login", data={"token": TOKEN}, headers=foreign)).status_code == 403
    assert (await admin.post("logout", data=right, headers=foreign)).status_code == 403
    assert (await admin.get("act")).status_code == 405
    assert await one.get("one")
    # Behind a proxy that passes on the original host.
    proxied = {"Origin": "https://public.test", "X-Forwarded-Host": "public.test"}
    answer = await admin.post("act", data=CANCEL_ONE | right, headers=proxied)
    assert answer.status_code == 303


async def test_options_that_cannot_be_are_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any
    for options, words in (
        ({"token": ""}, "16 characters"),
        ({"token": "x" * 15}, "16 characters"),
        ({"read_token": "short"}, "16 characters"),
        ({"token": TOKEN, "read_token": TOKEN}, "differ"),
        ({"token": TOKEN, "authenticate": fails}, "not both"),
    ):
        with pytest.raises(delayq.ConfigurationError, match=words):
            delayq.dashboard(client, **options)
    for queues in ("reliable:jobs", ["jobs"], ["a:jobs"], ["reliable:"], ["delayed:delayq:{x"]):
        with pytest.raises(ValueError, match=r"."):
            delayq.dashboard(client, queues=queues)
    monkeypatch.setattr("delayq._dashboard.find_spec", lambda name: None)
    with pytest.raises(delayq.ConfigurationError, match=r"pip install 'delayq\[dashboard\]'"):
        delayq.dashboard(client)


@pytest.fixture
async def private(client: Client) -> AsyncIterator[Browser]:
    async with browse(delayq.dashboard(client, token=TOKEN, read_token=READ_TOKEN)) as browser:
        yield browser


READ_TOKEN = "look-look-look-look"
PAGES = (
    "/",
    JOBS,
    SETTINGS,
    ONE,
    DEAD,
    "events?kind=reliable&name=jobs",
    "queue?kind=reliable&name=nobody",
)


async def test_a_dashboard_with_a_read_token_refuses_everybody_else(
    client: Client, private: Browser
) -> None:
    await client.reliable_queue("jobs").offer("a payload", 3600, id="one")
    for address in PAGES:
        answer = await private.get(address)
        assert (answer.status_code, answer.text) == (303, "")
        assert re.fullmatch(r"login(\?next=[^:]+)?", answer.headers["location"])
    assert (await private.get("login")).status_code == 200
    assert (await private.get("static/board.css")).status_code == 200
    assert "jobs" not in await page(private, "no-such-page", 404)
    refused = await private.post("act", data={"kind": "reliable", "name": "jobs", "do": "pause"})
    assert refused.status_code == 403


async def test_a_link_survives_the_login(one: Jobs, private: Browser) -> None:
    address = f"{JOBS}&state=ready&offset=25"
    answer = await private.get(address)
    wanted = field(await page(private, answer.headers["location"]), "next")
    assert wanted == address
    # Also after a wrong token.
    answer = await private.post("login", data={"token": "x" * 20, "next": wanted})
    assert field(answer.text, "next") == wanted
    answer = await private.post("login", data={"token": TOKEN, "next": wanted})
    assert answer.headers["location"] == f"{address}&done=loggedin"
    assert one.name in texts(await page(private, answer.headers["location"]))
    answer = await private.post("login", data={"token": TOKEN, "next": "./?sort=ready"})
    assert answer.headers["location"] == "./?sort=ready&done=loggedin"
    # A login leads to pages of the dashboard only.
    for address in (
        *("https://evil.test/", "//evil.test/", "/\\evil.test", "\\\\evil.test"),
        *("javascript:alert(1)", "../", "./..//evil.test", "queue/../../x"),
        *("logout", "act", "events", "static/board.js", " queue", "\x00queue"),
        *("queue?a=b\r\nSet-Cookie: x=y", "?" + "a=b&" * 50),
    ):
        answer = await private.post("login", data={"token": TOKEN, "next": address})
        there = answer.headers["location"]
        assert re.fullmatch(r"(\./|queue)\?[\w%.&=+-]+", there), (address, there)


async def test_the_dashboard_knows_the_users_of_its_host_application(
    client: Client, one: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    def role(connection: HTTPConnection) -> Any:
        return connection.headers.get("X-Role")

    async def role_soon(connection: HTTPConnection) -> Any:
        await asyncio.sleep(0)
        return role(connection)

    app = delayq.dashboard(client, authenticate=role_soon)
    async with browse(app) as browser:
        for address in ("/", JOBS, "events?kind=reliable&name=jobs"):
            assert "jobs" not in await page(browser, address, 403)
        browser.headers["X-Role"] = "viewer"
        shown = await page(browser, ONE)
        assert "Read-only" in texts(shown)
        assert "Cancel message" not in shown
        await send(browser, CANCEL_ONE, 403)
        browser.headers["X-Role"] = "operator"
        fields = form(await page(browser, ONE), "at") | {"do": "cancel"}
        away = {"Origin": "https://evil.test"}
        assert (await browser.post("act", data=fields, headers=away)).status_code == 403
        # The token belongs to this browser.
        async with browse(app) as other:
            other.headers["X-Role"] = "operator"
            await page(other, ONE)
            await send(other, fields, 403)
        assert await one.get("one")
        # Other processes of the application find the token valid as well.
        async with browse(delayq.dashboard(client, authenticate=role)) as browser_there:
            browser_there.headers["X-Role"] = "operator"
            browser_there.cookies = browser.cookies
            await send(browser_there, fields)
    assert await one.get("one") is None
    # A hook that errs admits nobody.
    hook: Any
    for hook in (fails, lambda _: "admin", lambda _: True, lambda _: ["viewer"]):
        caplog.clear()
        async with browse(delayq.dashboard(client, authenticate=hook)) as browser:
            assert "no access" in await page(browser, "/", 403)
        assert "access refused" in caplog.text


def fails(connection: Any) -> Any:
    raise LookupError("no such user")


async def test_serving_payloads_to_everyone_is_warned_about(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    cases: Any = (
        ("192.0.2.7", {}, True),
        ("192.0.2.7", {"token": TOKEN}, True),
        ("192.0.2.7", {"read_token": TOKEN}, False),
        ("192.0.2.7", {"authenticate": lambda _: "viewer"}, False),
        *((address, {}, False) for address in ("127.0.0.1", "::1", "/run/board.sock")),
    )
    for address, options, warned in cases:
        caplog.clear()
        app = delayq.dashboard(client, **options)
        server = (address, None if address[0] == "/" else 80)
        async with browse(lambda scope, *io: app(scope | {"server": server}, *io)) as browser:  # noqa: B023
            for _ in range(2):
                shown = texts((await browser.get("/", follow_redirects=True)).text)
                assert ("can read all payloads" in shown) is warned, (address, options)
        assert caplog.text.count("can read all payloads") == warned


async def test_the_server_has_a_page(client: Client, reader: Browser) -> None:
    await bury(client.reliable_queue("jobs"))
    shown = texts(await page(reader, "server"))
    assert "Persistence snapshots only Role master Replicas 0 Clients" in shown
    assert "1 dead: 1 LookupError → see why: delayq dead list jobs --group-by error;" in shown


async def test_the_read_token_is_for_looking_only(one: Jobs, private: Browser) -> None:
    await log_in(private, READ_TOKEN)
    for address in PAGES[:4]:
        shown = await page(private, address)
        assert "jobs" in shown
        assert 'action="act"' not in shown
    # The form token of this login is good for logging out, and for nothing else.
    said = form_token(await page(private, "/"))
    assert (await private.post("act", data=CANCEL_ONE | {"form_token": said})).status_code == 403
    assert await one.get("one")
    copied = private.cookies[security.COOKIE]
    answer = await private.post("logout", data={"form_token": said})
    assert (answer.status_code, answer.headers["location"]) == (303, "login?done=loggedout")
    for cookie in ("", f"{security.COOKIE}={copied}"):
        # A copy of the cookie is as worthless as none.
        assert (await private.get("/", headers={"Cookie": cookie})).status_code == 303
    await log_in(private)
    assert "Message cancelled" in await act(private, ONE, "cancel")


async def test_a_login_counts_for_its_tokens_only(client: Client) -> None:
    async with browse(delayq.dashboard(client, read_token=READ_TOKEN)) as browser:
        assert (await browser.get("/")).status_code == 303
        await log_in(browser, READ_TOKEN)
        assert "There are no queues" in await page(browser, "/")
    tokens: Any
    for tokens, token in (
        ({"token": "x" * 16}, "x" * 16),
        ({"token": TOKEN, "read_token": READ_TOKEN}, READ_TOKEN),
    ):
        async with (
            browse(delayq.dashboard(client, **tokens)) as browser,
            browse(delayq.dashboard(client, token=TOKEN)) as other,
        ):
            await log_in(browser, token)
            other.cookies = browser.cookies
            assert "Operator" not in await page(other, "/")


async def test_every_answer_has_the_headers(reader: Browser) -> None:
    files = ("board.css", "board.js", "icon.svg", "../app.py")
    for address in ("/", "login", "queue", "no-such-page", *(f"static/{file}" for file in files)):
        answer = await reader.get(address)
        for name, value in security.HEADERS.items():
            assert answer.headers[name] == value
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert (await reader.get("/")).headers["Cache-Control"] == "no-store"
    kept = await reader.get("static/board.css")
    assert kept.headers["Cache-Control"] == "no-cache"
    again = await reader.get("static/board.css", headers={"If-None-Match": kept.headers["ETag"]})
    assert (again.status_code, again.headers["Cache-Control"]) == (304, "no-cache")


# Actions


async def test_reschedule_pause_and_cancel(
    client: Client, one: Jobs, admin: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delayq")
    shown = await act(admin, ONE, "reschedule", delay="1.5", unit="days")
    assert "Message rescheduled. " in texts(shown)
    message = await one.get("one")
    assert message is not None
    assert 1.49 < (message.due_at - await client.server_time()).total_seconds() / 86400 < 1.51
    fields = form(await page(admin, ONE), "at") | {"do": "reschedule"}
    for delay, date in (("nan", ""), ("inf", ""), ("-1", ""), ("", ""), ("1", "2099-01-31T12:00")):
        await send(admin, fields | {"delay": delay, "unit": "days", "at_time": date}, 400)
    for date in ("2001-01-31T12:00", "soon"):
        assert date in await send(admin, fields | {"at_time": date}, 400)
    await act(admin, ONE, "reschedule", at_time="2099-01-31T12:00")
    message = await one.get("one")
    assert message is not None
    assert message.due_at == datetime(2099, 1, 31, 12, tzinfo=UTC)
    await one.offer(1)
    assert "Queue paused" in await act(admin, JOBS, "pause")
    assert await one.claim() == []
    assert "Queue resumed" in await act(admin, JOBS, "resume")
    assert len(await one.claim()) == 1
    orders = client.delayed_queue("orders")
    await orders.offer(7, 3600)
    (at,) = links(await page(admin, ORDERS), "message?")
    assert "Due in 2 h" in texts(await act(admin, at, "reschedule", delay="2.5", unit="hours"))
    (at,) = links(await page(admin, ORDERS), "message?")
    assert "Message cancelled" in texts(await act(admin, at, "cancel"))
    assert await orders.pending.size() == 0
    # Who did what is in the log; what was refused is not.
    asked = "queue 'jobs': an operator at 127.0.0.1 asked the dashboard for "
    actions = [text.removeprefix(asked) for text in caplog.messages if text.startswith(asked)]
    assert [action.partition(":")[0] for action in actions] == [
        "reschedule of 'one'",
        "reschedule of 'one'",
        "pause",
        "resume",
    ]


def settings_form(shown: str) -> dict[str, str]:
    """Return the fields of both forms, as a visitor sends them who changes nothing."""
    names = re.findall(r'name="was_(\w+)"', shown)
    fields = form(shown, *(f"was_{name}" for name in names))
    return fields | {name: fields[f"was_{name}"] for name in names} | {"do": "configure"}


async def test_settings_are_changed_for_all_clients(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", dedup_window=5400, lease=60)
    await jobs.offer_many([Offer(n, group="g") for n in range(3)])
    fields = settings_form(await page(admin, SETTINGS))
    assert (fields["dedup_window"], fields["keep_dead"]) == ("90m", "none")

    async def change(**more: str) -> str:
        return texts(await send(admin, fields | more))

    assert "already has these settings" in await change()
    assert "Settings changed." in await change(max_size="1", expired="dead", group_limit="2")
    with pytest.raises(delayq.QueueFull):
        await jobs.offer(2)
    assert len(await jobs.claim(5)) == 2
    # A form that was open meanwhile changes only what its visitor has changed.
    await change(dedup_window="2d", limit="50")
    now = await jobs.settings()
    assert (now.max_size, now.expired, now.dedup_window) == (1, "dead", 2 * 86400.0)
    assert (now.limit, now.group_limit) == (delayq.Limit(50), delayq.Limit(2))
    fields = settings_form(await page(admin, SETTINGS))
    await change(max_size="", dedup_window="none", limit="none", group_limit="none")
    await change(keep_dead="36h", max_dead="9", keep="1d12h", max_kept="8")
    assert await jobs.settings() == delayq.QueueSettings(1, None, "dead", 0.0, 129600, 9, 129600, 8)
    wrong = fields | {"keep": "long", "max_kept": "none", "expired": "kept", "max_dead": "0"}
    refused = texts(await send(admin, wrong, 400))
    for words in ("Keep results must be a duration", "Max results must be a number from 1 up, not"):
        assert words in refused
    assert "Nothing changed: confirm" in await change(partitions="3")
    refused = await send(admin, fields | {"partitions": "3", "sure": "1"}, 400)
    assert "delayq repartition jobs --to 3" in texts(refused)
    await jobs.purge()
    assert "jobs reliable, 3 partitions" in await change(partitions="3", sure="1")


async def test_dead_letters_are_redriven_and_purged(client: Client, admin: Browser) -> None:
    jobs = client.reliable_queue("jobs", lease=3600)
    await bury(jobs, 6)
    shown = await page(admin, DEAD)
    assert "Traceback\nLookupError: 42" in await page(admin, links(shown, "message?")[0])
    assert "select messages" in await act(admin, DEAD, "redrive")
    assert "select messages" in await act(admin, DEAD, "purge", all="1")
    assert "2 messages re-queued." in await act(admin, DEAD, "redrive", at=["//dead-0", "//dead-3"])
    assert "1 dead letter dropped." in await act(admin, DEAD, "purge", at=["//dead-1"])
    dead_2 = "message?kind=reliable&name=jobs&dead=1&at=//dead-2"
    assert "1 message re-queued." in await act(admin, dead_2, "redrive")
    for message in await jobs.claim(9):
        await message.ack()
    # Letters that came after a visitor had looked are left alone.
    for do, notice in (("purge", "2 dead letters dropped."), ("redrive", "1 message re-queued.")):
        fields = form(await page(admin, DEAD), "until") | {"all": "1", "sure": "1", "do": do}
        await jobs.offer("x", id=do)
        await (await jobs.claim())[0].bury("too late")
        await send(admin, fields | {"until": "now"}, 400)
        assert notice in await send(admin, fields)
        assert [letter.id for letter in await jobs.dead.list()] == [do]
    assert (await jobs.stats()).ready == 1


async def test_a_malformed_form_is_refused(client: Client, admin: Browser) -> None:
    await client.reliable_queue("jobs").offer(1)
    await client.delayed_queue("orders").offer(1, 3600)
    said = {"form_token": form_token(await page(admin, "/"))}
    jobs = {"kind": "reliable", "name": "jobs"} | said
    orders = {"kind": "delayed", "name": "orders"} | said
    for fields, status in (
        (jobs | {"do": "explode"}, 400),
        (jobs | {"do": "cancel", "at": "7//x"}, 400),
        (jobs | {"do": "redrive", "at": "7//x"}, 303),
        (jobs | {"do": "purge", "at": "7//x"}, 303),
        (jobs | {"do": "cancel", "at": ""}, 400),
        (orders | {"do": "pause"}, 400),
        (orders | {"do": "cancel", "at": "//x"}, 400),
        (orders | {"do": "cancel", "at": "/1_0/x"}, 400),
        (orders | {"do": "cancel", "at": "/%201/x"}, 400),
        (orders | {"do": "cancel", "at": "/%D9%A1/x"}, 400),
        (orders | {"do": "cancel", "at": "/1767225600000.5/x"}, 303),
        (said | {"do": "pause", "kind": "reliable", "name": "none"}, 404),
        (jobs | {"do": "pause", "more": "x" * 4_000_000}, 413),
    ):
        assert (await admin.post("act", data=fields)).status_code == status, fields
    assert (await admin.post("act", content=b"a=1&" * 2000)).status_code == 400
    # Forms of other visitors are small.
    async with browse(delayq.dashboard(client, token=TOKEN)) as visitor:
        for to in ("login", "act"):
            answer = await visitor.post(to, data={"token": "x" * 70_000})
            assert answer.status_code == 413


# Mounting, servers and queue names


@pytest.mark.usefixtures("one")
async def test_the_dashboard_is_mounted_below_any_prefix(client: Client) -> None:
    app = Starlette(routes=[Mount("/admin/queues", delayq.dashboard(client, token=TOKEN))])
    async with browse(app, f"{HOST}/admin/queues/") as browser:
        await log_in(browser)
        shown = await page(browser, "")
        assert 'href="/' not in shown
        assert 'action="/' not in shown
        assert (await browser.get("static/board.css")).status_code == 200
        address, *_ = links(shown, "queue?")
        (message,) = links(await page(browser, address), "message?")
        assert "Message cancelled" in await act(browser, message, "cancel")
    async with browse(app, HOST) as browser:
        answer = await browser.get("/admin/queues")
        assert (answer.status_code, answer.headers["location"]) == (307, f"{HOST}/admin/queues/")
        # An absolute address would be built from the host that the request claims.
        for address in ("queue/", "login/", "static", "//evil.test/", "static//evil.test/.."):
            there = f"{HOST}/admin/queues/{address}"
            answer = await browser.get(there, headers={"Host": "evil.test"})
            assert (answer.status_code, answer.headers.get("location")) == (404, None)


async def test_given_names_need_no_scan(server: PrivateServer, client: Client, one: Jobs) -> None:
    await client.reliable_queue("hidden").offer(1)
    rules = acl_rules("dashboard", delayed=["orders"], reliable=["jobs"])
    async with granted(server, rules) as url, delayq.connect(url) as limited:
        async with browse(delayq.dashboard(limited)) as browser:
            assert "pass the queue names" in texts(await page(browser, "/", 502))
        app = delayq.dashboard(limited, queues=["delayed:orders", "reliable:jobs"], token=TOKEN)
        async with browse(app) as browser:
            await log_in(browser)
            shown = texts(await page(browser, "/"))
            assert "Queues 2" in shown
            assert "hidden" not in shown
            for address in (ORDERS, JOBS, f"{JOBS}&state=handled", DEAD, RETRIES, "all-retries"):
                await page(browser, address)
            fields = form(await page(browser, ONE), "at")
            refused = await browser.post("act", data=fields | {"do": "cancel"})
            assert refused.status_code == 502
            assert "The server refused" in texts(refused.text)
    assert await one.get("one")
    # Who may scan as well needs no names.
    rules = [*acl_rules("dashboard", reliable=["jobs"]), "+scan"]
    async with (
        granted(server, rules) as url,
        delayq.connect(url) as limited,
        browse(delayq.dashboard(limited)) as browser,
    ):
        assert "jobs reliable waiting 1 0 0 0" in texts(await page(browser, "/"))


# Every page of a large queue, and where it is in its lists.
BIG_PAGES = {
    "/": 0,
    JOBS: 0,
    f"{JOBS}&offset=": 0.9,
    ORDERS: 0,
    f"{ORDERS}&offset=": 0.9,
    DEAD: 0,
    f"{DEAD}&offset=": 0.09,
    "message?kind=reliable&name=jobs&at=//m5": 0,
    "message?kind=reliable&name=jobs&at=//d5&dead=1": 0,
    SETTINGS: 0,
    "server": 0,
}


async def test_pages_of_large_queues_take_no_more_work(
    server: PrivateServer, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in commands nor in what they return: all that they read is bounded."""
    # Whatever else falls between two pages would count: a search, a look, a probe of a slow
    # connection, a re-check, which closes connections as well, and a ping.
    monkeypatch.setattr(Queues._find_cached, "__defaults__", (600,))
    monkeypatch.setattr("delayq._dashboard.live._FRESH", 600)
    monkeypatch.setattr("delayq._redis.connection.DOUBT_AFTER", 600)

    async def work_so_far() -> tuple[int, int]:
        """Return how many commands there were, those in scripts included, and how many bytes."""
        commands = await raw.info("commandstats")
        size = (await raw.info("stats"))["total_net_output_bytes"]
        return sum(command["calls"] for command in commands.values()), size

    works: dict[str, list[list[int]]] = {path: [] for path in BIG_PAGES}
    for begin, end in ((0, 1_000), (1_000, 20_000)):
        async with delayq.connect(server.url) as client:
            jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
            await jobs.offer_many([Offer(n, delay=6000, id=f"m{n}") for n in range(begin, end)])
            await orders.offer_many([(n, 6000) for n in range(begin, end)])
        await fill_with_letters(raw, range(begin // 10, end // 10))
        async with (
            delayq.connect(server.url, resync_interval=3600) as client,
            browse(delayq.dashboard(client)) as browser,
        ):
            for path, share in BIG_PAGES.items():
                address = f"{path}{share * end:.0f}" if share else path
                # The search for queues is shared by all pages.
                await page(browser, address)
                before, again = await work_so_far(), await work_so_far()
                await page(browser, address)
                own = [now - then for now, then in zip(again, before, strict=True)]
                done = zip(await work_so_far(), again, own, strict=True)
                works[path].append([now - then - more for now, then, more in done])
    for path, ((calls, size), (calls_later, size_later)) in works.items():
        assert calls_later <= calls + 2, path
        assert size_later <= size * 1.5 + 1000, path


# Live views


class Viewer:
    """Watches a queue live by making the calls that a web server would make, without a server."""

    def __init__(
        self, app: Any, query: bytes = b"kind=reliable&name=jobs", cookie: str = ""
    ) -> None:
        self.seen: asyncio.Queue[dict[str, Any] | str] = asyncio.Queue()
        self.status = 0
        self._gone = asyncio.Event()
        about: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET"}
        about |= {"headers": [(b"cookie", cookie.encode())] if cookie else []}
        scope = about | {"path": "/events", "query_string": query}
        self.serving: asyncio.Task[None] = asyncio.create_task(
            app(scope, self._receive, self._send)
        )
        self._asked = False

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("data: "):
                self.seen.put_nowait(json.loads(line[6:]))

    async def said(self) -> dict[str, Any] | str:
        """Return the live parts, or what the trouble is."""
        return await asyncio.wait_for(self.seen.get(), 60)

    async def next(self) -> str:
        """Return the text of the live parts."""
        parts = await self.said()
        assert isinstance(parts, dict), parts
        return texts(" ".join(parts.values()))

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.serving, 60)


async def test_figures_come_once_a_second_and_say_what_is_taken(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Count what was taken between two figures, however far apart they are.
    monkeypatch.setattr(live, "_STALE_AFTER", 3600)
    jobs = client.reliable_queue("jobs", lease=60)
    await jobs.offer_many([Offer(i) for i in range(50)])
    began = time.monotonic()
    app = delayq.dashboard(client)
    # Others, who view all queues, take nothing from it.
    everything = Viewer(app, b"page=overview")
    await everything.next()
    viewer = Viewer(app)
    assert "Ready 50 Leased 0" in await viewer.next()
    await jobs.claim(40)
    figures = await viewer.next()
    assert "Ready 10 Leased 40" in figures
    taken = re.compile(r"Deliveries per second \(at least\) (\S+) ")
    # All 40 are counted. No more time has passed between the figures; their rate is rounded.
    assert (float(taken.findall(figures)[0]) + 0.1) * (time.monotonic() - began) >= 40
    # A period without changes is reported as well.
    assert taken.findall(await viewer.next()) == ["0"]
    await asyncio.gather(everything.leave(), viewer.leave())


@pytest.mark.usefixtures("one")
async def test_a_queue_deleted_meanwhile_is_reported_as_trouble(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_INTERVAL", 0.2)
    monkeypatch.setattr(live, "_FRESH", 0.18)
    app = delayq.dashboard(client)
    viewer = Viewer(app)
    await viewer.next()

    async def no_source(self: Any, kind: str, name: str) -> None: ...

    monkeypatch.setattr("delayq._dashboard.queues.Queues.source", no_source)
    while isinstance(event := await viewer.said(), dict):
        pass
    assert event.startswith("Queue not found.")
    # It comes back.
    monkeypatch.undo()
    while isinstance(event := await viewer.said(), str):
        pass
    assert "Delayed 1 " in texts(" ".join(event.values()))
    await viewer.leave()


@pytest.mark.usefixtures("one")
async def test_a_viewer_who_leaves_takes_nothing_from_the_others(client: Client) -> None:
    app = delayq.dashboard(client)
    # Even if it is the viewer that asks.
    first, second = Viewer(app), Viewer(app)
    await first.leave()
    assert "Delayed 1 " in await second.next()
    await second.leave()
    del first, second
    gc.collect()
    # What nobody views any more is not kept.
    kept = [live_object for live_object in gc.get_objects() if isinstance(live_object, live.Live)]
    assert kept
    assert not any(each._views for each in kept)


@pytest.mark.usefixtures("one")
async def test_many_viewers_share_one_reading_of_the_server(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_INTERVAL", 0.4)
    monkeypatch.setattr(live, "_FRESH", 0.36)
    app = delayq.dashboard(client)
    viewers = [Viewer(app) for _ in range(40)]
    for viewer in viewers:
        await viewer.next()
    asked, started = client.session.server, time.monotonic()
    before = asked.round_trips

    def looks() -> float:
        """Return the largest number of looks so far; the first may fall in between."""
        return (time.monotonic() - started) / 0.36 + 2

    for _ in range(3):
        for viewer in viewers:
            await viewer.next()
    # Each reads the clock, the counts, the upcoming due times and a page of messages.
    assert asked.round_trips - before <= 4 * max(5, looks())
    async with browse(app) as browser:
        before, started = asked.round_trips, time.monotonic()
        await asyncio.gather(*(page(browser, "/") for _ in range(40)))
    # The viewers go on meanwhile.
    assert asked.round_trips - before <= max(10, 4 * looks())
    await asyncio.gather(*(viewer.leave() for viewer in viewers))


@pytest.mark.gate
async def test_the_command_serves_localhost_and_ends_with_views(own_server: PrivateServer) -> None:
    async with serving(own_server) as (client, address):
        await client.reliable_queue("jobs").offer(1, 3600)
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        async with httpx.AsyncClient() as browser:
            for host, status in (("127.0.0.1", 200), ("localhost", 200), ("evil.test", 400)):
                answer = await browser.get(address, headers={"Host": f"{host}:{port}"})
                assert answer.status_code == status, host
        # A live view does not delay the shutdown.
        assert live._STREAM_SECONDS <= 15
        view = await asyncio.to_thread(
            urlopen, f"{address}events?kind=reliable&name=jobs", None, 60
        )
    view.close()


async def test_a_closed_client_and_a_server_that_is_away_are_told(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def find(server: Any) -> Any:
        asked.append(server)
        return await find_queues(server)

    monkeypatch.setattr("delayq._dashboard.queues.find_queues", find)
    client = delayq.connect(own_server.url)
    async with browse(delayq.dashboard(client)) as browser:
        assert "open the client first" in await page(browser, "/", 503)
        async with client:
            own_server.stop()
            asked.clear()
            # One after the other, they would wait for minutes.
            for shown in await asyncio.gather(*(page(browser, "/", 503) for _ in range(20))):
                assert "does not answer" in shown
    assert len(asked) == 1
