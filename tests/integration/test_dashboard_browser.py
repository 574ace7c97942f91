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
from delayq.admin.doctor import diagnose
from tests.support.board import TOKEN
from tests.support.browser import (
    CHROMIUM,
    DRIVER,
    PAGES,
    WITHIN,
    Seen,
    bury,
    fill,
    remember,
    serving,
    trouble,
    visit,
    work,
)
from tests.support.incident import broken, fix_in_the_dashboard, overloaded
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


async def test_every_action_by_clicking(own_server: PrivateServer) -> None:
    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)
        for name in ("jobs", "old"):
            dying = client.reliable_queue(name)
            await dying.offer_many([Offer(i) for i in range(3)])
            await bury(dying, 3)
        ops = client.reliable_queue("ops", lease=600, keep=600)
        await ops.offer_many([Offer(i) for i in range(3)])
        for error in ("TimeoutError: slow", "LookupError: gone", "KeyError: dropped"):
            await bury(ops, 1, error)
        await ops.offer_many([Offer(i, id=f"fails-{i}") for i in range(3)])
        for message in await ops.claim(3):
            await message.nack(3000, error="KeyError: 'to'")
        await ops.offer("running", id="running")
        await ops.claim()
        await ops.offer({"n": 1}, delay=3000, id="waits", group="tenant")
        await ops.offer_batch([Offer(i, delay=3000) for i in range(2)])
        await ops.schedule("nightly", every=86_400, value=1)
        async with running(work(client.reliable_queue("thumbs"))):
            await visit(partial(_click_through, address), 390)
        mails = client.reliable_queue("mails", lease=600)
        assert await mails.settings() == delayq.QueueSettings(
            1, 50_000, "dead", 5400.0, keep=86_400.0
        )
        stats = await mails.stats()
        assert (stats.paused, stats.dead) == (False, 0)
        assert await mails.get("welcome-ada") is None
        moved = await mails.get("welcome-grace")
        assert moved is not None
        assert (moved.due_at - await client.server_time()).total_seconds() > 4 * 86_400
        assert await client.delayed_queue("orders:unpaid").pending.size() == 39
        assert (await client.reliable_queue("thumbnails", partitions=8).stats()).paused
        stats = await ops.stats()
        assert (stats.delayed, stats.ready, stats.leased, stats.dead) == (0, 0, 0, 0)


def _click_through(address: str, browser: Seen) -> None:
    browser.go(address)
    browser.until("Queues 8")
    browser.click("Log in")
    browser.log_in("wrong-wrong-wrong-wrong", "Wrong token")
    browser.log_in()
    # Scripts on the page cannot read the cookie.
    assert browser.driver.execute_script("return document.cookie") == ""
    (cookie,) = browser.driver.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

    browser.follow(("/queue?kind=reliable&name=thumbs", "Deliveries"))
    browser.until(lambda: float(browser.find("#gone").text.replace("–", "0")) > 1)  # noqa: RUF001
    browser.follow(
        *(("Queues", "mails"), ("mails", "Deliveries per second (at least) 0")),
        *(("Pause", "Queue paused"), ("Resume", "Queue resumed")),
        *(('a[href^="settings"]', None), ("#max_size", "50000"), ("#expired", "become")),
        *(("#dedup_window", "1.5h"), ("Change settings", "Settings changed")),
        *(("#partitions", "2"), ("Change partitions", "Nothing changed: confirm")),
        *(("#partitions", "2"), ('[name="sure"]', None)),
        *(("Change partitions", "delayq repartition mails --to 2"), ("Messages", "welcome-ada")),
        *(("welcome-ada", "ada@example.org"), ("Cancel message", "Message cancelled")),
        *(("Next →", "26–50 of"), ("← Previous", "1–25 of")),  # noqa: RUF001
        ("/message?kind=reliable&name=mails&at=//welcome-grace", "grace@example.org"),
    )
    browser.put_off()

    browser.follow(
        ("/dead?kind=reliable&name=mails", "bounce-0"),
        *(('[aria-label="Select bounce-0"]', None), ("Redrive selected", "1 message re-queued.")),
        *(("bounce-1", "nobody@example.org"), ("Redrive", "1 message re-queued.")),
        *(('[aria-label="Select bounce-2"]', None), ("summary", None)),
        *(("Drop selected", "1 dead letter dropped."), ("bounce-3", "nobody@example.org")),
        *(("summary", None), ("Drop", "1 dead letter dropped.")),
    )
    browser.follow(
        *(("/all-retries", "TimeoutError"), ("Retry now", "5 messages rescheduled.")),
        *(
            ("Undo", "5 messages are as before."),
            ("details + details summary", None),
            ("Cancel them", "messages cancelled."),
            ("mails", "retry-3"),
            ("retry-3", "Attempts 1"),
        ),
        *(("Back to the list", "retry-3"), ('[aria-label="Select retry-3"]', None)),
        *(("Retry selected", _RESCHEDULED), ('[aria-label="Select retry-3"]', None)),
        ("Cancel selected", "1 message cancelled."),
        *(("/all-dead?error=dropped", "KeyError"), ("summary", None)),
        ("Drop them", "1 dead letter dropped. This cannot be undone."),
    )
    for name, verb, notice in (
        ("jobs", "Redrive all", "3 messages re-queued."),
        ("old", "Drop all", "3 dead letters dropped."),
    ):
        browser.follow((f"/dead?kind=reliable&name={name}", verb), (verb, "Nothing changed"))
        browser.follow(('[name="sure"]', None), (verb, notice))

    browser.follow(
        *(("/queue?kind=delayed&name=orders:unpaid", "Due times"), ("tbody a", None)),
        *(("Cancel message", "Message cancelled"), ("tbody a", None)),
    )
    browser.put_off()

    for page, *steps in _OPERATE:
        browser.follow((f"/{page}?kind=reliable&name=ops", ""), *steps)
    browser.follow(
        *(("Queues", "mails"), ("#q", "THUMBN"), ("Find", "Queues 1"), ("thumbnails", "Pause")),
        *(("Pause", "Queue paused"), ("Log out", "You are logged out")),
    )
    assert "Operator" not in browser.text()
    # Every button has been clicked at least once.
    templates = (Path(delayq.__file__).parent / "_dashboard" / "templates").iterdir()
    buttons = {
        text
        for template in templates
        for text in re.findall(r"<button[^>]*>([^<]+)</button>", template.read_text("utf-8"))
    }
    assert buttons - browser.clicked == set()


_SELECT = ('[aria-label="Select waits"]', None)
_UNDO = ("Undo", "1 message is as before.")
_RESTORE = ("Undo", "1 message is restored, with all attempts.")
_RESCHEDULED = "1 message rescheduled."
_BURIED = "1 message is a dead letter now."
# What an operator does on each page.
_OPERATE: Any = (
    ("queue", ("#q", "RUN"), ("Find messages", "1 found."), ("running", "Attempt 1 is running")),
    ("queue", _SELECT, ("Run now", _RESCHEDULED), _UNDO),
    ("queue", _SELECT, ("#delay", "5"), ("Reschedule", _RESCHEDULED), _UNDO),
    ("queue", _SELECT, ("Cancel", "1 message cancelled."), _RESTORE),
    (
        *("queue", ("Leased", "running"), ('[name="all"]', None)),
        ("Cancel running", "1 message cancelled."),
    ),
    (
        *("letters", ("#error", "timeout"), ("Filter", "1 matching."), ('[name="sure"]', None)),
        ("Redrive matching", "1 message re-queued."),
    ),
    (
        *("letters", ("#error", "lookup"), ("Filter", "1 matching."), ('[name="sure"]', None)),
        ("Drop matching", "1 dead letter dropped."),
    ),
    (
        *("groups", ("tenant", "New limit")),
        *(("#limit", "five"), ("Set", "must be how many run at a time")),
        *(("#limit", "5,100/10m"), ("Set", "Limit set.")),
        ("Unset", "group limit applies again"),
        *(("Pause the group", "Group paused."), ("Resume the group", "Group resumed.")),
        *(("#q", "another"), ("Find", "New limit"), ("#limit", "ordered"), ("Set", "Limit set.")),
    ),
    (
        *("batches", (".stack tbody tr:first-child a", None), ('[name="running"]', None)),
        ("Cancel the batch", "messages of the batch cancelled."),
    ),
    ("schedules", ("Run now", "The next run is due now."), _UNDO),
    (
        *("schedules", ("Pause", "Schedule paused."), ("Resume", "Schedule resumed.")),
        *(("summary", None), ("Remove it", "Schedule removed.")),
    ),
    (
        *("enqueue", ("#payload", "{"), ("Add the message", "The payload must be JSON")),
        *(("#payload", '{"n": 9}'), ("#delay", "500"), ("#id", "mine")),
        *(("Add the message", "Message added."), ("New message", "Headers, one")),
    ),
    ("retries", ("fails-0", "Attempts 1"), ("Bury message", _BURIED), _RESTORE),
    ("retries", ('[aria-label="Select fails-1"]', None), ("Bury selected", _BURIED), _RESTORE),
    ("retries", ("summary", None), ("Bury them", _BURIED), _RESTORE),
    (
        *("purge", ("#state", "All"), ("#typed", "oops")),
        *(("Drop the messages", "This is not the name of the queue."), ("#typed", "ops")),
        ("Drop the messages", "messages dropped. This cannot be undone."),
    ),
)


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


async def test_a_page_goes_on_once_a_proxy_has_an_answer_again(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_STREAM_SECONDS", 1.0)
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
            assert all("502" in complaint for complaint in browser.complaints())

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
    def look(address: str, browser: Seen) -> None:
        asks = browser.driver.execute_script
        for page, path in PAGES.items():
            browser.go(address + path)
            # Nothing overflows the page.
            assert asks("return document.documentElement.scrollWidth") <= 375, page
            if axe:
                asks(axe)
                for scheme in ("dark", "light"):
                    browser.prefer(scheme)
                    violations = browser.driver.execute_async_script(_VIOLATIONS, scheme == "dark")
                    assert violations == [], (page, scheme)
            if page == "login":
                browser.log_in()
        # One of the pages does not exist, and the browser logs it.
        browser.complaints()

    def far_away(address: str, browser: Seen) -> None:
        zone = {"timezoneId": "Asia/Kathmandu"}
        browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", zone)
        browser.go(address + PAGES["history"])
        # A quarter of an hour from all others, and its ticks are at round times.
        labels = [tick.text for tick in browser.driver.find_elements("css selector", ".times text")]
        assert len(labels) == 6
        assert all(re.fullmatch(r"\d\d:\d0", label) for label in labels)
        # One stop of the Tab key leads to all columns.
        browser.driver.execute_script("document.querySelector('.columns :checked').focus()")
        browser.driver.switch_to.active_element.send_keys("\ue012")
        tip = browser.driver.execute_script("return document.activeElement.parentNode.innerText")
        assert "Handled" in tip

    def without_scripts(address: str, browser: Seen) -> None:
        browser.go(address)
        assert browser.find("noscript meta").get_attribute("content") == "5"
        browser.click("Log in")
        browser.log_in()

    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)
        await trouble(client, own_server)
        remember(own_server)
        await visit(partial(without_scripts, address), script=False)
        await visit(partial(look, address), 375)
        await visit(partial(far_away, address))
    if not axe:
        pytest.skip("NO AXE-CORE HERE: little has checked the dashboard's accessibility")


_VIOLATIONS = """const [onlyContrast, done] = arguments;
const rules = onlyContrast ? { runOnly: ["color-contrast"] } : {};
axe.run(document, { resultTypes: ["violations"], ...rules }).then(
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


@pytest.mark.nightly
async def test_incidents_are_found_and_fixed_from_the_first_page(
    own_server: PrivateServer,
) -> None:
    async with broken(own_server) as mailer, serving(own_server, "--token", TOKEN) as (_, address):
        await visit(partial(fix_in_the_dashboard, address, mailer), 1440, 900)


def _shows(browser: Seen, pattern: str) -> bool:
    return re.search(pattern, browser.text()) is not None


# Each with what a doctor advises.
_OVERLOAD = {
    r"group 'acme', with \d+ ready, is at its limit of 2 at a time": "delayq groups list syncs",
    r"\d (retries|dead letters) a (second|minute): ConnectionError": "delayq pause payments",
    r"shrink \(overload.py, line \d+\) blocked the event loop of process \d+": "to_thread()",
}


async def _finds_every_cause(client: delayq.Client) -> bool:
    # A queue is late after a minute: do not keep the server busy until then.
    await asyncio.sleep(1)
    findings = [finding async for finding in diagnose(client)]
    return all(
        any(re.search(cause, found.text) and advice in found.advice for found in findings)
        for cause, advice in _OVERLOAD.items()
    )


@pytest.mark.nightly
async def test_causes_of_an_overload_are_removed_in_four_clicks(own_server: PrivateServer) -> None:
    def look(address: str, browser: Seen) -> None:
        browser.go(address + "login")
        browser.log_in()
        for cause in _OVERLOAD:
            browser.until(partial(_shows, browser, cause))
        browser.follow(("syncs", "Due times"), ("Groups", "Own limit"), ("acme", "New limit"))
        browser.follow(("#limit", "10"), ("Set", "Limit set."))
        browser.follow(("Queues", "payments"), ("payments", "Due times"), ("Pause", "paused"))
        browser.follow(("Workers", "was blocked for"))

    async with overloaded(own_server), serving(own_server, "--token", TOKEN) as (client, address):
        await until(partial(_finds_every_cause, client), within=WITHIN)
        await visit(partial(look, address), 1440, 900)
        syncs, payments = client.reliable_queue("syncs"), client.reliable_queue("payments")
        assert (await syncs.groups.get("acme")).running == 10
        assert (await payments.stats()).paused
