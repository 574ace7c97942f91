"""The dashboard, clicked through in a real browser: scripts, styles, the policy that the browser
enforces, and each action.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import delayq
from delayq.admin import inspect as inspection
from tests.support.board import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

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
async def serving(url: str, *options: str) -> AsyncIterator[str]:
    """Run ``delayq dashboard`` in a process of its own. Yields its address."""
    command = (sys.executable, "-m", "delayq", "dashboard", "--url", url, "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), WITHIN)).decode()
        found = re.match(r"http://\S+/", said)
        assert found is not None, said
        yield found[0]
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), WITHIN)


@contextmanager
def chromium(
    width: int = 1200, height: int = 900, *, dark: bool = False, script: bool = True
) -> Iterator[Any]:
    """Start a browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-proxy-server",
    ):
        options.add_argument(argument)
    if not script:
        options.add_experimental_option(
            "prefs", {"profile.managed_default_content_settings.javascript": 2}
        )
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

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def until(self, said: str | Callable[[], Any]) -> None:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        # The page may change while it is being read.
        waiting = WebDriverWait(
            self.driver, WITHIN, ignored_exceptions=[StaleElementReferenceException]
        )
        waiting.until(lambda _: said() if callable(said) else said in self.text())

    def log_in(self, token: str = TOKEN) -> None:
        self.click("Log in")
        self.type("#token", token)
        self.find("main button").click()

    def complaints(self) -> list[str]:
        """Return the browser's own complaints: policy violations, missing files, scripts that
        failed.
        """
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def picture(self, name: str) -> None:
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            # As tall as the content, but no taller than a screen.
            height = self.driver.execute_script(
                "return document.querySelector('main').getBoundingClientRect().bottom"
            )
            width = self.driver.execute_script("return innerWidth")
            clip = {
                "x": 0,
                "y": 0,
                "width": width,
                "height": min(height, 860 if width > 500 else 812),
                "scale": 1,
            }
            picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
            Path(f"{PICTURES}/{name}.png").write_bytes(base64.b64decode(picture["data"]))


async def fill(client: delayq.Client) -> None:
    mails = client.reliable_queue("mails", lease=600)
    await mails.offer_many(
        [
            delayq.Offer(
                {"to": f"{name}@example.org", "template": "welcome"},
                delay=delay,
                id=f"welcome-{name}",
            )
            for name, delay in (
                ("ada", 42),
                ("grace", 3000),
                ("edsger", 7000),
                ("barbara", 40_000),
                ("donald", 300_000),
            )
        ]
    )
    await mails.offer_many(
        [
            delayq.Offer(
                {"to": f"customer-{i}@example.org", "template": "invoice"}, delay=90 + 37 * i
            )
            for i in range(60)
        ]
    )
    await mails.offer_many(
        [delayq.Offer({"to": "nobody@example.org"}, id=f"bounce-{i}", priority=9) for i in range(4)]
    )
    for message in await mails.claim(4):
        await message.bury(
            "rejected", "Traceback (most recent call last):\nLookupError: no mailbox of this name"
        )
    await mails.offer_many(
        [delayq.Offer({"to": "now@example.org"}, headers={"trace": "4bf92f35"}) for _ in range(12)]
    )
    await mails.claim(3)
    orders = client.delayed_queue("orders:unpaid")
    await orders.offer_many([({"order": 1000 + i}, 60.0 * (i + 1)) for i in range(40)])
    parts = client.reliable_queue("thumbnails", partitions=8)
    await parts.offer_many([delayq.Offer({"image": i}, delay=300 + i) for i in range(200)])
    reports = client.reliable_queue("reports")
    await reports.offer({"report": "monthly"}, delay=86_400)
    await reports.pause()


async def work(jobs: delayq.ReliableQueue[Any]) -> None:
    """Keep a queue busy."""
    at = 0
    while True:
        at += 1
        count = 8 + at * 7 % 13 + at % 5
        await jobs.offer_many(
            [delayq.Offer({"image": f"photos/{i}.jpeg"}, delay=2 + i / 10) for i in range(count)]
        )
        await asyncio.sleep(0.4)
        for message in await jobs.claim(count - at % 7):
            await message.ack()


async def test_every_action_by_clicking(own_server: PrivateServer) -> None:
    async with (
        delayq.connect(own_server.url) as client,
        serving(own_server.url, "--token", TOKEN) as address,
    ):
        await fill(client)
        for name in ("jobs", "old"):
            dying = client.reliable_queue(name)
            await dying.offer_many([delayq.Offer(i) for i in range(3)])
            for message in await dying.claim(3):
                await message.bury("rejected")
        working = asyncio.create_task(work(client.reliable_queue("thumbs")))
        await asyncio.to_thread(_click_through, address)
        working.cancel()
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


def _click_through(address: str) -> None:
    with chromium() as browser:
        browser.go(address)
        browser.until("Queues 7")
        browser.picture("dashboard-overview-light")
        browser.log_in("wrong-wrong-wrong-wrong")
        browser.until("Wrong token")
        # The browser logs the status of the refused login; discard that entry.
        browser.complaints()
        browser.type("#token", TOKEN)
        browser.find("main button").click()
        browser.clicked.add("Log in")
        browser.until("logged in as an operator")
        # Scripts on the page cannot read the cookie.
        assert browser.driver.execute_script("return document.cookie") == ""
        (cookie,) = browser.driver.get_cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

        browser.go(address + "queue?kind=reliable&name=thumbs")
        browser.until(lambda: float(browser.find("#gone").text.replace("–", "0")) > 1)  # noqa: RUF001
        if PICTURES:
            browser.until(
                lambda: browser.find("#gone-line polyline").get_attribute("points").count(",") > 15
            )
        browser.picture("dashboard-live-light")
        browser.click("Queues")
        browser.click("mails")
        browser.until("live")
        browser.until(lambda: "Deliveries per second (at least) 0" in browser.text())
        browser.picture("dashboard-queue-light")
        browser.click("Pause")
        browser.until("Queue paused")
        browser.click("Resume")
        browser.until("Queue resumed")
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
        browser.click("Change partitions")
        browser.until("Nothing changed: confirm")
        browser.type("#partitions", "2")
        browser.find('[name="sure"]').click()
        browser.click("Change partitions")
        browser.until("mails reliable, 2 partitions")

        browser.click("welcome-ada")
        browser.until("ada@example.org")
        browser.click("Cancel message")
        browser.until("Message cancelled")

        browser.click("Next →")
        browser.until("26–50 of")  # noqa: RUF001
        browser.click("← Previous")
        browser.until("1–25 of")  # noqa: RUF001
        browser.go(address + "message?kind=reliable&name=mails&at=//welcome-grace")
        browser.picture("dashboard-message-light")
        browser.type("#delay", "5")
        browser.find("#unit").send_keys("days")
        browser.click("Reschedule")
        browser.until("Due in 4 d 23 h")

        browser.go(address + "dead?kind=reliable&name=mails")
        browser.picture("dashboard-dead-light")
        browser.find('[aria-label="Select bounce-0"]').click()
        browser.click("Redrive selected")
        browser.until("1 message re-queued.")
        browser.click("bounce-1")
        browser.click("Redrive")
        browser.until("1 message re-queued.")
        browser.find('[aria-label="Select bounce-2"]').click()
        browser.click("Drop selected")
        browser.until("1 dead letter dropped.")
        browser.click("bounce-3")
        browser.click("Drop")
        browser.until("1 dead letter dropped.")
        browser.go(address + "dead?kind=reliable&name=jobs")
        browser.click("Redrive all")
        browser.until("Nothing changed")
        browser.find('[name="sure"]').click()
        browser.click("Redrive all")
        browser.until("3 messages re-queued.")
        browser.go(address + "dead?kind=reliable&name=old")
        browser.click("Drop all")
        browser.until("Nothing changed")
        browser.find('[name="sure"]').click()
        browser.click("Drop all")
        browser.until("3 dead letters dropped.")

        browser.go(address + "queue?kind=delayed&name=orders:unpaid")
        browser.find("tbody a").click()
        browser.until('"order": 1000')
        browser.click("Cancel message")
        browser.until("Message cancelled")
        browser.find("tbody a").click()
        browser.until('"order": 1001')
        browser.type("#delay", "5")
        browser.find("#unit").send_keys("days")
        browser.click("Reschedule")
        browser.until("Due in 4 d 23 h")

        browser.click("Queues")
        browser.type("#q", "THUMBN")
        browser.click("Find")
        browser.until("Queues 1")
        browser.click("thumbnails")
        browser.click("Pause")
        browser.until("Queue paused")

        browser.click("Log out")
        browser.until("You are logged out")
        assert "Operator" not in browser.text()
        assert not browser.complaints()
        # Every button has been clicked at least once.
        templates = (Path(delayq.__file__).parent / "_dashboard" / "templates").iterdir()
        buttons = {
            text
            for each in templates
            for text in re.findall(r"<button[^>]*>([^<]+)</button>", each.read_text("utf-8"))
        }
        assert buttons - browser.clicked == set()


async def test_figures_move_without_a_reload(own_server: PrivateServer) -> None:
    async with delayq.connect(own_server.url) as client, serving(own_server.url) as address:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1, 600)

        def look() -> None:
            with chromium() as browser:
                browser.go(address + "queue?kind=reliable&name=jobs")
                browser.until("live")
                future = asyncio.run_coroutine_threadsafe(
                    jobs.offer_many([delayq.Offer(i) for i in range(1234)]), loop
                )
                future.result(WITHIN)
                browser.until(lambda: browser.find('[data-of="ready"]').text == "1,234")
                browser.until(
                    lambda: (
                        browser.find("#late-line polyline").get_attribute("points").count(",") > 2
                    )
                )
                assert not browser.complaints()

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(look)


async def test_what_a_payload_says_never_runs(own_server: PrivateServer) -> None:
    hostile = (
        "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    )
    async with delayq.connect(own_server.url) as client, serving(own_server.url) as address:
        await client.reliable_queue(hostile).offer(
            hostile, 60, id=hostile, headers={hostile: hostile}
        )

        def look() -> None:
            with chromium() as browser:
                for selector in (None, "tbody a", "tbody a"):
                    browser.find(selector).click() if selector else browser.go(address)
                    assert "<script>document.title" in browser.text()
                    assert "owned" not in browser.driver.title.replace(hostile, "")
                    assert (
                        len(browser.driver.find_elements("css selector", "script, main img")) == 1
                    )
                assert not browser.complaints()

        await asyncio.to_thread(look)


async def test_a_queue_of_any_name_can_be_acted_on(own_server: PrivateServer) -> None:
    """Browsers change line breaks in forms.

    Queue names may have them, and any other characters with a meaning in an address.
    """
    names = ["a\nb\r\n c", "100%41/?#&+ä\u2028 \x01", "../..//"]
    async with (
        delayq.connect(own_server.url) as client,
        serving(own_server.url, "--token", TOKEN) as address,
    ):
        for name in names:
            await client.reliable_queue(name).offer(1, 60, id=name)

        def look() -> None:
            with chromium() as browser:
                browser.go(address)
                browser.log_in()
                browser.until("logged in as an operator")
                for place in range(len(names)):
                    browser.go(address)
                    browser.driver.find_elements("css selector", "tbody a")[place].click()
                    browser.click("Pause")
                    browser.until("Queue paused")
                    browser.find("tbody a").click()
                    browser.click("Cancel message")
                    browser.until("Message cancelled")
                assert not browser.complaints()

        await asyncio.to_thread(look)
        for name in names:
            stats = await client.reliable_queue(name).stats()
            assert (stats.paused, stats.delayed) == (True, 0)


async def test_reading_takes_a_token_where_one_is_asked_for(own_server: PrivateServer) -> None:
    options = ("--token", TOKEN, "--read-token", READ_TOKEN)
    async with (
        delayq.connect(own_server.url) as client,
        serving(own_server.url, *options) as address,
    ):
        await fill(client)

        def look() -> None:
            with chromium() as browser:
                browser.go(address + "queue?kind=reliable&name=mails")
                browser.until("The read token gives read-only access.")
                assert "mails" not in browser.text()
                browser.picture("dashboard-login-light")
                browser.type("#token", READ_TOKEN)
                browser.find("main button").click()
                browser.until("logged in with read-only access")
                browser.click("mails")
                browser.until("live")
                assert not browser.driver.find_elements("css selector", 'form[action="act"]')
                browser.picture("dashboard-read-light")
                browser.click("Log out")
                browser.until("You are logged out")
                browser.go(address)
                browser.until("The read token gives read-only access.")
                browser.log_in()
                browser.until("logged in as an operator")
                assert not browser.complaints()

        await asyncio.to_thread(look)


async def test_it_is_read_without_scripts_on_a_phone_and_in_the_dark(
    own_server: PrivateServer,
) -> None:
    async with (
        delayq.connect(own_server.url) as client,
        serving(own_server.url, "--token", TOKEN) as address,
    ):
        await fill(client)

        def look() -> None:
            pages = {
                "overview": "",
                "queue": "queue?kind=reliable&name=thumbs",
                "message": "message?kind=reliable&name=mails&at=//welcome-ada",
                "dead": "dead?kind=reliable&name=mails",
                "settings": "settings?kind=reliable&name=mails",
                "login": "login",
            }
            with chromium(script=False) as browser:
                browser.go(address)
                assert browser.find("noscript meta").get_attribute("content") == "5"
                browser.log_in()
                browser.until("logged in as an operator")
            for name, (width, dark) in {"phone": (375, False), "dark": (1200, True)}.items():
                with chromium(width, 812 if width < 500 else 900, dark=dark) as browser:
                    browser.go(address)
                    browser.log_in()
                    for page, path in pages.items():
                        browser.go(address + path)
                        if page == "queue":
                            browser.until("live")
                            if PICTURES:
                                line = browser.find("#gone-line polyline")
                                browser.until(
                                    lambda line=line: line.get_attribute("points").count(",") > 15
                                )
                        # Nothing overflows the page.
                        wide = browser.driver.execute_script(
                            "return document.documentElement.scrollWidth"
                        )
                        assert wide <= width, (name, page, wide)
                        # Every field has a label.
                        assert browser.driver.execute_script(_UNLABELLED) == []
                        # All text stands out from its background.
                        assert browser.driver.execute_script(_FAINT) == [], (name, page)
                        browser.picture(f"dashboard-{page}-{name}")
                    assert not browser.complaints()

        working = asyncio.create_task(work(client.reliable_queue("thumbs")))
        await asyncio.to_thread(look)
        working.cancel()


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
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer(1, 60)
    async with serving(own_server.url) as address:
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        answers = []
        for host in ("127.0.0.1", "localhost", "evil.test"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            answers.append((await reader.read(12))[-3:])
            writer.close()
        assert answers == [b"200", b"200", b"400"]
        # A live view does not delay the shutdown.
        view = await asyncio.to_thread(urlopen, f"{address}events?kind=reliable&name=jobs", None, 5)
    view.close()
