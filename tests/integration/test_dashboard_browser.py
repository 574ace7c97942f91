"""The dashboard, clicked through in a real browser: scripts, styles, policies, and each action."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import delayq
from delayq import Offer
from delayq.admin import inspect as inspection
from tests.support.board import TOKEN
from tests.support.tasks import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from delayq import Client
    from tests.support.servers import PrivateServer

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason=(
        "NO CHROMIUM HERE: nobody has clicked through the dashboard (apt install chromium"
        " chromium-driver)"
    ),
)
pytestmark = [pytest.mark.browser, needs_chromium]
# The directory for the pictures in docs/dashboard.md, if they are wanted.
PICTURES = os.environ.get("DELAYQ_DASHBOARD_PICTURES")
WITHIN = 30.0
READ_TOKEN = "look-look-look-look"


@asynccontextmanager
async def serving(server: PrivateServer, *options: str) -> AsyncIterator[tuple[Client, str]]:
    """Run ``delayq dashboard`` in a process of its own. Yields a client, and its address."""
    command = ("-m", "delayq", "dashboard", "--url", server.url, "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), WITHIN)).decode()
        found = re.match(r"http://\S+/", said)
        assert found is not None, said
        async with delayq.connect(server.url) as client:
            yield client, found[0]
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), WITHIN)


async def visit(look: Callable[[Seen], None], *args: Any, **options: Any) -> None:
    """Look at pages with a :func:`chromium` that has nothing to complain about."""

    def with_browser() -> None:
        with chromium(*args, **options) as browser:
            look(browser)
            assert not browser.complaints()

    await asyncio.to_thread(with_browser)


@contextmanager
def chromium(
    width: int = 1200, height: int = 900, *, dark: bool = False, script: bool = True
) -> Iterator[Any]:
    """Start a browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ["headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"]:
        options.add_argument(f"--{argument}")
    options.add_argument("--no-proxy-server")
    if not script:
        no_script = {"profile.managed_default_content_settings.javascript": 2}
        options.add_experimental_option("prefs", no_script)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield Seen(driver)
    finally:
        driver.quit()


class Seen:
    """Drives a browser in the words of a person sitting in front of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.clicked: set[str] = set()

    def go(self, address: str) -> None:
        self.driver.get(address)

    def text(self) -> str:
        return " ".join(self.driver.find_element("tag name", "body").text.split())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, text: str) -> None:
        """Click the link or button with this text."""
        path = f'//a[normalize-space()="{text}"] | //button[normalize-space()="{text}"]'
        (found, *_) = self.driver.find_elements("xpath", path)
        found.click()
        self.clicked.add(text)

    def follow(self, *steps: tuple[str, str]) -> None:
        """Click one link or button after the other, and wait for what each leads to."""
        for text, said in steps:
            self.click(text)
            self.until(said)

    def put_off(self) -> None:
        """Give the message of a page another time."""
        self.type("#delay", "5")
        self.find("#unit").send_keys("days")
        self.follow(("Reschedule", "Due in 4 d 23 h"))

    def points(self, line: str) -> int:
        """Return how many points a line of a live view has, less one."""
        return int(self.find(f"#{line} polyline").get_attribute("points").count(","))

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def until(self, said: str | Callable[[], Any]) -> None:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        # The page may change while it is being read.
        waiting = WebDriverWait(self.driver, WITHIN, 0.1, [StaleElementReferenceException])
        waiting.until(lambda _: said() if callable(said) else said in self.text())

    def log_in(self, token: str = TOKEN, said: str = "logged in as an operator") -> None:
        self.type("#token", token)
        self.find("main button").click()
        self.until(said)

    def complaints(self) -> list[str]:
        """Return the browser's complaints: violated policies, missing files, failed scripts."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, name: str) -> None:
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            # As tall as the content, but no taller than a screen.
            height = self.driver.execute_script(
                "return document.querySelector('main').getBoundingClientRect().bottom"
            )
            width = self.driver.execute_script("return innerWidth")
            height = min(height, 860 if width > 500 else 812)
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
            Path(f"{PICTURES}/{name}.png").write_bytes(base64.b64decode(picture["data"]))


def mail(to: str, template: str = "welcome", **options: Any) -> Offer[dict[str, str]]:
    return Offer({"to": f"{to}@example.org", "template": template}, **options)


async def fill(client: Client) -> None:
    mails = client.reliable_queue("mails", lease=600)
    delays = {"ada": 42, "grace": 3000, "edsger": 7000, "barbara": 40_000, "donald": 300_000}
    await mails.offer_many(
        mail(name, delay=delay, id=f"welcome-{name}") for name, delay in delays.items()
    )
    await mails.offer_many(mail(f"customer-{i}", "invoice", delay=90 + 37 * i) for i in range(60))
    await mails.offer_many(mail("nobody", id=f"bounce-{i}", priority=9) for i in range(4))
    error = "Traceback (most recent call last):\nLookupError: no mailbox of this name"
    await bury(mails, 4, error)
    await mails.offer_many(mail("now", headers={"trace": "4bf92f35"}) for _ in range(12))
    await mails.claim(3)
    orders = client.delayed_queue("orders:unpaid")
    await orders.offer_many([({"order": 1000 + i}, 60.0 * (i + 1)) for i in range(40)])
    parts = client.reliable_queue("thumbnails", partitions=8)
    await parts.offer_many([Offer({"image": i}, delay=300 + i) for i in range(200)])
    reports = client.reliable_queue("reports")
    await reports.offer({"report": "monthly"}, delay=86_400)
    await reports.pause()


async def bury(queue: delayq.ReliableQueue[Any], count: int, error: str | None = None) -> None:
    for message in await queue.claim(count):
        await message.bury("rejected", error)


async def work(jobs: delayq.ReliableQueue[Any]) -> None:
    """Keep a queue busy."""
    at = 0
    while True:
        at += 1
        count = 8 + at * 7 % 13 + at % 5
        await jobs.offer_many(
            [Offer({"image": f"photos/{i}.jpeg"}, delay=2 + i / 10) for i in range(count)]
        )
        await asyncio.sleep(0.4)
        for message in await jobs.claim(count - at % 7):
            await message.ack()


async def test_every_action_by_clicking(own_server: PrivateServer) -> None:
    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)
        for name in ("jobs", "old"):
            dying = client.reliable_queue(name)
            await dying.offer_many([Offer(i) for i in range(3)])
            await bury(dying, 3)
        async with running(work(client.reliable_queue("thumbs"))):
            await visit(partial(_click_through, address))
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


def _configure(browser: Seen) -> None:
    browser.find('a[href^="settings"]').click()
    browser.until("Number of partitions")
    browser.picture("dashboard-settings-light")
    browser.type("#max_size", "50000")
    browser.find("#expired").send_keys("become")
    browser.type("#dedup_window", "1.5")
    browser.find("#unit").send_keys("hours")
    browser.find("section form button").click()
    browser.until("Settings changed")
    browser.until("become dead letters Dedup window 1 h 30 min")
    browser.click("Change settings")
    browser.type("#partitions", "2")
    browser.follow(("Change partitions", "Nothing changed: confirm"))
    browser.type("#partitions", "2")
    browser.find('[name="sure"]').click()
    browser.follow(("Change partitions", "mails reliable, 2 partitions"))


def _click_through(address: str, browser: Seen) -> None:
    browser.go(address)
    browser.until("Queues 7")
    browser.picture("dashboard-overview-light")
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
    if PICTURES:
        browser.until(lambda: browser.points("gone-line") > 15)
    browser.picture("dashboard-live-light")
    browser.click("Queues")
    browser.follow(("mails", "live"))
    browser.until(lambda: "Deliveries per second (at least) 0" in browser.text())
    browser.picture("dashboard-queue-light")
    browser.follow(("Pause", "Queue paused"), ("Resume", "Queue resumed"))
    _configure(browser)
    browser.follow(
        *(("welcome-ada", "ada@example.org"), ("Cancel message", "Message cancelled")),
        *(("Next →", "26–50 of"), ("← Previous", "1–25 of")),  # noqa: RUF001
    )
    browser.go(address + "message?kind=reliable&name=mails&at=//welcome-grace")
    browser.picture("dashboard-message-light")
    browser.put_off()

    browser.go(address + "dead?kind=reliable&name=mails")
    browser.picture("dashboard-dead-light")
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


async def test_figures_move_without_a_reload(own_server: PrivateServer) -> None:
    async with serving(own_server) as (client, address):
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1, 600)
        loop = asyncio.get_running_loop()

        def look(browser: Seen) -> None:
            browser.go(address + "queue?kind=reliable&name=jobs")
            browser.until("live")
            offering = jobs.offer_many([Offer(i) for i in range(1234)])
            asyncio.run_coroutine_threadsafe(offering, loop).result(WITHIN)
            browser.until(lambda: browser.find('[data-of="ready"]').text == "1,234")
            browser.until(lambda: browser.points("late-line") > 2)

        await visit(look)


async def test_what_a_payload_says_never_runs(own_server: PrivateServer) -> None:
    hostile = (
        "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    )
    async with serving(own_server) as (client, address):
        jobs = client.reliable_queue(hostile)
        await jobs.offer(hostile, 60, id=hostile, headers={hostile: hostile})

        def look(browser: Seen) -> None:
            for selector in (None, "tbody a", "tbody a"):
                browser.find(selector).click() if selector else browser.go(address)
                assert "<script>document.title" in browser.text()
                assert "owned" not in browser.driver.title.replace(hostile, "")
                assert len(browser.driver.find_elements("css selector", "script, main img")) == 1

        await visit(look)


async def test_a_queue_of_any_name_can_be_acted_on(own_server: PrivateServer) -> None:
    """Browsers change line breaks in forms, and queue names may have them."""
    names = ["a\nb\r\n c", "100%41/?#&+ä\u2028 \x01", "../..//"]
    async with serving(own_server, "--token", TOKEN) as (client, address):
        for name in names:
            await client.reliable_queue(name).offer(1, 60, id=name)

        def look(browser: Seen) -> None:
            browser.go(address)
            browser.click("Log in")
            browser.log_in()
            for place in range(len(names)):
                browser.go(address)
                browser.driver.find_elements("css selector", "tbody a")[place].click()
                browser.follow(("Pause", "Queue paused"))
                browser.find("tbody a").click()
                browser.follow(("Cancel message", "Message cancelled"))

        await visit(look)
        for name in names:
            stats = await client.reliable_queue(name).stats()
            assert (stats.paused, stats.delayed) == (True, 0)


async def test_reading_takes_a_token_where_one_is_asked_for(own_server: PrivateServer) -> None:
    options = ("--token", TOKEN, "--read-token", READ_TOKEN)
    async with serving(own_server, *options) as (client, address):
        await fill(client)

        def look(browser: Seen) -> None:
            browser.go(address + "queue?kind=reliable&name=mails")
            browser.until("The read token gives read-only access.")
            assert "mails" not in browser.text()
            browser.picture("dashboard-login-light")
            browser.log_in(READ_TOKEN, "logged in with read-only access")
            browser.follow(("mails", "live"))
            assert not browser.driver.find_elements("css selector", 'form[action="act"]')
            browser.picture("dashboard-read-light")
            browser.follow(("Log out", "You are logged out"))
            browser.go(address)
            browser.until("The read token gives read-only access.")
            browser.log_in()

        await visit(look)


async def test_it_is_read_without_scripts_on_phones_in_the_dark(own_server: PrivateServer) -> None:
    pages = {
        "overview": "",
        "queue": "queue?kind=reliable&name=thumbs",
        "message": "message?kind=reliable&name=mails&at=//welcome-ada",
        "dead": "dead?kind=reliable&name=mails",
        "login": "login",
    }
    async with serving(own_server, "--token", TOKEN) as (client, address):
        await fill(client)

        def without_scripts(browser: Seen) -> None:
            browser.go(address)
            assert browser.find("noscript meta").get_attribute("content") == "5"
            browser.click("Log in")
            browser.log_in()

        def look(kind: str, width: int, browser: Seen) -> None:
            browser.go(address)
            browser.click("Log in")
            browser.log_in()
            for page, path in pages.items():
                browser.go(address + path)
                if page == "queue":
                    browser.until("live")
                    if PICTURES:
                        browser.until(lambda: browser.points("gone-line") > 15)
                asks = browser.driver.execute_script
                # Nothing overflows the page.
                assert asks("return document.documentElement.scrollWidth") <= width, (kind, page)
                # Every field has a label.
                assert asks(_UNLABELLED) == []
                # All text stands out from its background.
                assert asks(_FAINT) == [], (kind, page)
                browser.picture(f"dashboard-{page}-{kind}")

        async with running(work(client.reliable_queue("thumbs"))):
            await visit(without_scripts, script=False)
            await visit(partial(look, "phone", 375), 375, 812)
            await visit(partial(look, "dark", 1200), dark=True)


_UNLABELLED = """return [...document.querySelectorAll('input:not([type=hidden]), select')]
  .filter(field => !field.labels.length && !field.ariaLabel).map(field => field.outerHTML)"""
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


async def test_the_command_serves_localhost_and_ends_with_views(own_server: PrivateServer) -> None:
    async with serving(own_server) as (client, address):
        await client.reliable_queue("jobs").offer(1, 60)
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        answers = []
        for host in ("127.0.0.1", "localhost", "evil.test"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            answers.append((await reader.read(12))[-3:])
            writer.close()
        assert answers == [b"200", b"200", b"400"]
        # A live view does not delay the shutdown.
        view = await asyncio.to_thread(urlopen, f"{address}events?kind=reliable&name=jobs", None, 5)
    view.close()
