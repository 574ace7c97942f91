"""The dashboard, clicked through in a real browser: scripts, styles, policies, and each action."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

import delayq
from delayq import Offer
from delayq._dashboard import live
from delayq.admin import inspect as inspection
from delayq.testing import advance
from tests.support.board import TOKEN
from tests.support.browser import (
    CHROMIUM,
    DRIVER,
    PAGES,
    WITHIN,
    Seen,
    bury,
    fill,
    serving,
    trouble,
    visit,
    work,
)
from tests.support.incident import broken, fix_in_the_dashboard
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason=(
        "NO CHROMIUM HERE: nobody has clicked through the dashboard (apt install chromium"
        " chromium-driver)"
    ),
)
pytestmark = [pytest.mark.browser, needs_chromium]
ROOT = Path(__file__).parents[2]


async def test_every_action_by_clicking(own_server: PrivateServer) -> None:
    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)
        await _to_operate(client)
        for name in ("jobs", "old"):
            dying = client.reliable_queue(name)
            await dying.offer_many([Offer(i) for i in range(3)])
            await bury(dying, 3)
        async with running(work(client.reliable_queue("thumbs"))):
            await visit(partial(_click_through, address), 390)
        mails = client.reliable_queue("mails", lease=600)
        assert await mails.settings() == delayq.QueueSettings(2, 50_000, "dead", 5400.0)
        stats = await mails.stats()
        assert not stats.paused
        assert stats.dead == 0
        assert await mails.get("welcome-ada") is None
        assert await mails.get("bounce-0")
        assert await mails.get("bounce-1")
        moved = await mails.get("welcome-grace")
        assert moved is not None
        assert (moved.due_at - await client.server_time()).total_seconds() > 4 * 86_400
        assert await client.delayed_queue("orders:unpaid").pending.size() == 39
        (last,) = await inspection.records(client, "orders:unpaid", "delayed", offset=38)
        assert b"1001" in last.raw
        parts = client.reliable_queue("thumbnails", partitions=8)
        assert [(await part.store.depth()).paused for part in parts._open.partitions] == [True] * 8
        ops = client.reliable_queue("ops", lease=600)
        stats = await ops.stats()
        assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (0, 0, 0, 0)
        assert await ops.schedules() == []
        assert (await ops.groups.get("another")).limit == delayq.Limit(ordered=True)


def _configure(browser: Seen) -> None:
    browser.find('a[href^="settings"]').click()
    browser.until("Number of partitions")
    browser.type("#max_size", "50000")
    browser.find("#expired").send_keys("become")
    browser.type("#dedup_window", "1.5")
    browser.find("#unit").send_keys("hours")
    browser.follow(("Change settings", "Settings changed"))
    browser.until("become dead letters Dedup window 1 h 30 min")
    browser.type("#partitions", "2")
    browser.follow(("Change partitions", "Nothing changed: confirm"))
    browser.type("#partitions", "2")
    browser.find('[name="sure"]').click()
    browser.follow(("Change partitions", "mails reliable, 2 partitions"))


async def _to_operate(client: delayq.Client) -> None:
    """Fill a queue for :func:`_operate`."""
    ops = client.reliable_queue("ops", lease=600, keep=600)
    await ops.offer_many([Offer(i, id=f"dead-{i}") for i in range(4)])
    for message in await ops.claim(4):
        await message.bury("x", "TimeoutError: slow" if message.value < 2 else "LookupError: gone")
    await ops.offer("running", id="running")
    await ops.claim()
    offers = [Offer({"n": i}, delay=3000 + i, id=f"wait-{i}", group="tenant") for i in range(4)]
    await ops.offer_many(offers)
    await ops.schedule("nightly", every=86_400, value=1)


def _operate(address: str, browser: Seen) -> None:
    """Click through the pages for operators."""
    ops = f"{address}queue?kind=reliable&name=ops"

    def select(number: int) -> None:
        browser.find(f'[aria-label="Select wait-{number}"]').click()

    browser.go(ops)
    browser.until("wait-0")
    browser.type("#q", "RUNNING")
    browser.follow(("Find messages", "1 found."), ("running", "Attempt 1 is running"))
    browser.go(ops)
    for button, said in (
        ("Run now", "1 message rescheduled."),
        ("Reschedule", "1 message rescheduled."),
        ("Cancel", "1 message cancelled."),
    ):
        browser.until("wait-1")
        select(1)
        browser.follow((button, said), ("Undo", "1 message is as before."))
    browser.go(f"{ops}&state=leased")
    browser.until("running")
    browser.find('[name="all"]').click()
    browser.follow(("Cancel running", "1 message cancelled."))

    browser.go(f"{address}letters?kind=reliable&name=ops")
    for text, verb, said in (
        ("timeout", "Redrive matching", "2 messages re-queued."),
        ("lookup", "Drop matching", "2 dead letters dropped."),
    ):
        browser.type("#error", text)
        browser.follow(("Filter", "2 matching."))
        browser.find('[name="sure"]').click()
        browser.follow((verb, said))
        browser.go(f"{address}letters?kind=reliable&name=ops")

    browser.go(f"{address}groups?kind=reliable&name=ops")
    browser.type("#q", "tenant")
    browser.follow(("Find", "tenant"))
    browser.type('[aria-label="Limit of tenant"]', "five")
    browser.follow(("Set", "must be how many run at a time"))
    # The browser logs the status of the refused form; discard that entry.
    browser.complaints()
    browser.type('[aria-label="Limit of tenant"]', "5,100/10m")
    browser.follow(("Set", "Limit set."), ("Clear", "group limit applies again"))
    browser.follow(("Pause", "Group paused."), ("Resume", "Group resumed."))
    browser.type("#new_group", "another")
    browser.type("#limit", "ordered")
    browser.follow(("Set the limit", "Limit set."))

    browser.go(f"{address}schedules?kind=reliable&name=ops")
    browser.follow(("Run now", "The next run is due now."), ("Undo", "1 message is as before."))
    browser.go(f"{address}schedules?kind=reliable&name=ops")
    browser.follow(("Pause", "Schedule paused."), ("Resume", "Schedule resumed."))
    browser.find("summary").click()
    browser.follow(("Remove it", "Schedule removed."))

    browser.click("New message")
    browser.until("Headers, one")
    browser.type("#payload", "{")
    browser.follow(("Add the message", "The payload must be JSON"))
    browser.complaints()
    browser.type("#payload", '{"n": 9}')
    browser.type("#delay", "500")
    browser.type("#id", "mine")
    browser.follow(("Add the message", "Message added."))
    assert "mine delayed" in browser.text()

    browser.click("Purge")
    browser.until("Drop messages for good")
    browser.find("#state").send_keys("All")
    browser.type("#typed", "oops")
    browser.follow(("Drop the messages", "This is not the name of the queue."))
    browser.complaints()
    browser.type("#typed", "ops")
    browser.follow(("Drop the messages", "messages dropped. This cannot be undone."))


def _click_through(address: str, browser: Seen) -> None:
    browser.go(address)
    browser.until("Queues 8")
    browser.click("Log in")
    browser.log_in("wrong-wrong-wrong-wrong", "Wrong token")
    # The browser logs the status of the refused login; discard that entry.
    browser.complaints()
    browser.log_in()
    # Scripts on the page cannot read the cookie.
    assert browser.driver.execute_script("return document.cookie") == ""
    (cookie,) = browser.driver.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

    browser.go(address + "queue?kind=reliable&name=thumbs")
    browser.until(lambda: float(browser.find("#gone").text.replace("–", "0")) > 1)  # noqa: RUF001
    browser.click("Queues")
    browser.follow(("mails", "live"))
    browser.until(lambda: "Deliveries per second (at least) 0" in browser.text())
    browser.follow(("Pause", "Queue paused"), ("Resume", "Queue resumed"))
    _configure(browser)
    browser.follow(("Messages", "welcome-ada"))
    browser.follow(
        *(("welcome-ada", "ada@example.org"), ("Cancel message", "Message cancelled")),
        *(("Next →", "26–50 of"), ("← Previous", "1–25 of")),  # noqa: RUF001
    )
    browser.go(address + "message?kind=reliable&name=mails&at=//welcome-grace")
    browser.put_off()

    browser.go(address + "dead?kind=reliable&name=mails")
    for names, verb, said in (
        (("bounce-0", "bounce-1"), "Redrive", "1 message re-queued."),
        (("bounce-2", "bounce-3"), "Drop", "1 dead letter dropped."),
    ):
        browser.find(f'[aria-label="Select {names[0]}"]').click()
        browser.follow((f"{verb} selected", said))
        browser.click(names[1])
        browser.follow((verb, said))
    for name, verb, said in (
        ("jobs", "Redrive all", "3 messages re-queued."),
        ("old", "Drop all", "3 dead letters dropped."),
    ):
        browser.go(f"{address}dead?kind=reliable&name={name}")
        browser.follow((verb, "Nothing changed"))
        browser.find('[name="sure"]').click()
        browser.follow((verb, said))

    browser.go(address + "queue?kind=delayed&name=orders:unpaid")
    browser.find("tbody a").click()
    browser.until('"order": 1000')
    browser.follow(("Cancel message", "Message cancelled"))
    browser.find("tbody a").click()
    browser.until('"order": 1001')
    browser.put_off()

    _operate(address, browser)
    browser.click("Queues")
    browser.type("#q", "THUMBN")
    browser.follow(("Find", "Queues 1"))
    browser.click("thumbnails")
    browser.follow(("Pause", "Queue paused"), ("Log out", "You are logged out"))
    assert "Operator" not in browser.text()
    # Every button has been clicked at least once.
    templates = (Path(delayq.__file__).parent / "_dashboard" / "templates").iterdir()
    buttons = {
        text
        for each in templates
        for text in re.findall(r"<button[^>]*>([^<]+)</button>", each.read_text("utf-8"))
    }
    assert buttons - browser.clicked == set()


async def test_an_incident_is_fixed_in_the_dashboard_as_the_page_tells(
    own_server: PrivateServer,
) -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    story = page.partition("## The same incident, in the dashboard\n")[2].partition("\n## ")[0]
    told = {text for text in re.findall(r"\*\*(.+?)\*\*", story) if text[0].isupper()}
    async with broken(own_server) as mailer, serving(own_server, "--token", TOKEN) as served:
        client, address = served
        # A minute passes, after which the queue counts as late.
        mails = client.reliable_queue("mails")
        await advance(mails, 70)
        clicked: set[str] = set()

        def fix(browser: Seen) -> None:
            fix_in_the_dashboard(address, mailer, browser)
            clicked.update(browser.clicked)

        await visit(fix, 1440)
        assert told - {"History"} <= clicked
        assert (await mails.stats()).ready == 0
        assert await client.reliable_queue("invoices").get("invoice-2") is None
        webhooks = await client.reliable_queue("webhooks").stats()
        assert (webhooks.dead, webhooks.ready, webhooks.delayed) == (0, 0, 0)
        exports = client.reliable_queue("exports")
        assert [each.name for each in await exports.groups.list()] == ["acme"]
        assert (await exports.groups.get("acme")).limit == delayq.Limit(2)


async def test_updates_come_without_a_reload_and_keep_focus_ticks_and_selection(
    own_server: PrivateServer,
) -> None:
    async with serving(own_server, "--token", TOKEN) as (client, address):
        loop = asyncio.get_running_loop()

        def now(work: Any) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result(WITHIN)

        jobs = client.reliable_queue("jobs")
        await jobs.offer_many([Offer(i) for i in range(3)])
        await client.reliable_queue("another").offer(1)

        def look(browser: Seen) -> None:
            asks = browser.driver.execute_script

            def updated() -> None:
                asks("document.getElementById('live').hidden = true")
                browser.until(lambda: browser.find("#live").is_displayed())

            browser.go(address)
            browser.until("live")
            # The queue with the focus moves up, because it is in trouble now.
            asks("[...document.links].find(a => a.textContent == 'jobs').focus()")
            now(jobs.pause())
            browser.until(lambda: browser.find("tbody a").text == "jobs")
            assert asks("return document.activeElement.textContent") == "jobs"
            # A selected row is not replaced while it is being copied.
            asks("getSelection().selectAllChildren(document.querySelector('tbody tr'))")
            selected = asks("return String(getSelection())")
            assert "paused" in selected
            now(jobs.resume())
            updated()
            updated()
            assert asks("return String(getSelection())") == selected
            asks("getSelection().removeAllRanges()")
            browser.until(lambda: "paused" not in browser.find("#live_queues").text)
            # A tick stays where it is when other letters come.
            now(bury(jobs, 2))
            browser.click("Log in")
            browser.log_in()
            browser.go(address + "dead?kind=reliable&name=jobs")
            browser.until("live")
            box = browser.find('[name="at"]')
            box.click()
            now(bury(jobs, 1))
            browser.until("Dead letters 3")
            assert asks("return document.querySelectorAll(':checked').length") == 1
            assert box.is_selected()
            browser.go(address + "queue?kind=reliable&name=jobs")
            browser.until("live")
            now(jobs.offer_many([Offer(i) for i in range(1234)]))
            browser.until(lambda: browser.find('[data-of="ready"]').text == "1,234")
            browser.until(lambda: browser.points("late-line") > 2)

        await visit(look)


@pytest.mark.usefixtures("_workers_stay_listed")
async def test_clients_of_one_process_stay_listed(own_server: PrivateServer) -> None:
    async with (
        serving(own_server) as (client, address),
        delayq.connect(own_server.url, resync_interval=0.05) as one,
        delayq.connect(own_server.url, resync_interval=0.05) as two,
    ):
        taking = [each.reliable_queue("jobs").claim(wait=3600) for each in (one, two)]

        async def are_listed() -> bool:
            return len(await inspection.workers(client, "jobs")) == 2

        def look(browser: Seen) -> None:
            browser.go(address + "workers")
            browser.until(lambda: browser.find("#live").is_displayed())
            browser.until("Workers 2")
            rows = browser.driver.find_elements("css selector", "tbody tr")
            asks = browser.driver.execute_script
            asks("document.querySelectorAll('tbody tr').forEach((row, n) => { row.n = n; })")
            asks("document.getElementById('live').hidden = true")
            browser.until(lambda: browser.find("#live").is_displayed())
            # They are the same rows, in the same order.
            assert [asks("return arguments[0].n", row) for row in rows] == [0, 1]
            assert len(browser.driver.find_elements("css selector", "tbody tr")) == 2

        async with running(taking[0]), running(taking[1]):
            await until(are_listed)
            await visit(look)


async def test_a_page_goes_on_once_a_proxy_has_an_answer_again(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_STREAM_LASTS", 1.0)
    is_away = False

    async with delayq.connect(own_server.url) as client:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1, 600)
        app = delayq.dashboard(client)

        async def proxy(scope: Any, receive: Any, send: Any) -> None:
            if is_away and scope["path"] == "/events":
                await PlainTextResponse("Bad gateway", 502)(scope, receive, send)
            else:
                await app(scope, receive, send)

        config = uvicorn.Config(proxy, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        loop = asyncio.get_running_loop()

        def look(browser: Seen) -> None:
            nonlocal is_away
            port = server.servers[0].sockets[0].getsockname()[1]
            badge = partial(browser.find, "#live")
            browser.go(f"http://127.0.0.1:{port}/queue?kind=reliable&name=jobs")
            browser.until(lambda: badge().is_displayed())
            is_away = True
            browser.until("This page is not up to date")
            assert not badge().is_displayed()
            offering = jobs.offer_many([Offer(i) for i in range(1234)])
            asyncio.run_coroutine_threadsafe(offering, loop).result(WITHIN)
            is_away = False
            browser.until(lambda: browser.find('[data-of="ready"]').text == "1,234")
            assert badge().is_displayed()
            assert "This page is not up to date" not in browser.text()
            # The browser logs the answers of the proxy; discard these entries.
            assert all("502" in each for each in browser.complaints())

        serving_it = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        try:
            await visit(look)
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving_it, WITHIN)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the source of axe-core, which finds what keeps people from using a page."""
    npm = shutil.which("npm")
    if npm is None:
        return ""
    where = tmp_path_factory.mktemp("axe")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(where))
    done = subprocess.run(
        (npm, "install", *options, "axe-core@4"), check=False, capture_output=True, timeout=120
    )
    if done.returncode:
        return ""
    return (where / "node_modules/axe-core/axe.min.js").read_text("utf-8")


async def test_everyone_can_use_every_page(own_server: PrivateServer, axe: str) -> None:
    def look(address: str, width: int, browser: Seen) -> None:
        asks = browser.driver.execute_script
        for page, path in PAGES.items():
            browser.go(address + path)
            # Nothing overflows the page, and all text stands out from its background.
            assert asks("return document.documentElement.scrollWidth") <= width, page
            assert asks(_FAINT) == [], page
            if axe:
                asks(axe)
                assert browser.driver.execute_async_script(_VIOLATIONS) == [], page
            if page == "login":
                browser.log_in()
        # One of the pages does not exist, and the browser logs it.
        browser.complaints()

    def without_scripts(address: str, browser: Seen) -> None:
        browser.go(address)
        assert browser.find("noscript meta").get_attribute("content") == "5"
        browser.click("Log in")
        browser.log_in()

    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)
        await trouble(client, own_server)
        await visit(partial(without_scripts, address), script=False)
        for width, dark in ((1440, False), (375, True)):
            await visit(partial(look, address, width), width, dark=dark)
    if not axe:
        pytest.skip("NO AXE-CORE HERE: little has checked the dashboard's accessibility")


_VIOLATIONS = """const done = arguments[0];
axe.run(document, { resultTypes: ["violations"] }).then(
  result => done(result.violations.map(each => [each.id, each.nodes.map(node => node.html)])),
  error => done([String(error)]))"""


async def test_queues_of_any_name_are_shown_and_acted_on(own_server: PrivateServer) -> None:
    """Browsers change line breaks in forms, and queue names may have them."""
    hostile = (
        "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    )
    names = ["a\nb\r\n c", "100%41/?#&+ä\u2028 \x01", "../..//", hostile]
    async with serving(own_server, "--token", TOKEN) as (client, address):
        for name in names:
            await client.reliable_queue(name).offer(name, 3600, id=name, headers={"trace": name})

        def look(browser: Seen) -> None:
            def is_harmless() -> None:
                assert "owned" not in browser.driver.title.replace(hostile, "")
                assert len(browser.driver.find_elements("css selector", "script, main img")) == 1

            browser.go(address)
            browser.click("Log in")
            browser.log_in()
            for place in range(len(names)):
                browser.go(address)
                is_harmless()
                browser.driver.find_elements("css selector", "tbody th a")[place].click()
                browser.follow(("Pause", "Queue paused"))
                is_harmless()
                browser.find("tbody a").click()
                browser.until("Cancel message")
                is_harmless()
                browser.follow(("Cancel message", "Message cancelled"))

        await visit(look)
        for name in names:
            stats = await client.reliable_queue(name).stats()
            assert (stats.paused, stats.delayed) == (True, 0), name


# WCAG 2.1, 1.4.3: a contrast of 4.5 to 1 between text and its background.
_FAINT = """
const light = (c) => { const [r, g, b] = c.map(v => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = parts(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const faint = [];
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  if (!e.getClientRects().length || e.closest('svg')) continue;
  const [a, b] = [light(parts(getComputedStyle(e).color).slice(0, 3)), light(behind(e))]
    .sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(e.outerHTML.slice(0, 120));
}
return faint;"""
